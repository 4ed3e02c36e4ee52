"""The spec model: what a variant is, and its one name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from knnpool_gen.codegen.faults import Place
from knnpool_gen.kernel import KernelKey
from knnpool_gen.vocabulary import Direction, Mode, Staging


class PlanTable(str, Enum):
    """Tables of the plan or made of the weights, besides the neighbour table and its reverse, that a mode reads."""

    FIRST_SLOT = "first_slot"
    COUNT = "count"
    WEIGHTS = "weights"
    REV_WEIGHTS = "rev_weights"


TABLES_OF_WEIGHTS = frozenset({PlanTable.WEIGHTS, PlanTable.REV_WEIGHTS})
"""Those that exist only where a call brings weights."""
PLAN_TABLES = {
    Direction.FORWARD: (PlanTable.FIRST_SLOT, PlanTable.COUNT, PlanTable.WEIGHTS),
    Direction.BACKWARD: (PlanTable.COUNT, PlanTable.REV_WEIGHTS),
}
"""Those that kernels of a direction can read."""


class TileValue(str, Enum):
    """What a backward tile holds for each output."""

    VALUE = "value"
    """The gradient as it is."""
    ACCUMULATE = "accumulate"
    """Each reader's share of it, worked out once while staging, in the dtype sums run in."""


@dataclass(frozen=True)
class DType:
    """A dtype that can be pooled: one entry of dtypes.yaml."""

    name: str
    """torch's name; also names the template piece ``dtypes/<name>.cu.jinja``."""
    bytes: int
    vector: int
    """Neighbouring nodes of a row that one load brings."""
    accumulate: str
    """Name of the dtype in which sums run; names ``accumulate/<name>.cu.jinja``."""
    at: Place = field(compare=False, repr=False)
    """Where it is defined."""


@dataclass(frozen=True)
class ModeSpec:
    """A way to reduce a column: one entry of modes.yaml."""

    mode: Mode
    aux: bool
    """Whether the forward records the winning slot of every output, and the backward reads it."""
    forward_reads: tuple[PlanTable, ...]
    backward_reads: tuple[PlanTable, ...]
    backward_tile: TileValue
    at: Mapping[str, Place] = field(compare=False, repr=False)
    """Where its definition stands (``mode``), and each key of it."""

    def reads(self, direction: Direction) -> tuple[PlanTable, ...]:
        """The tables of the plan that kernels of ``direction`` read."""
        return self.forward_reads if direction is Direction.FORWARD else self.backward_reads


@dataclass(frozen=True)
class Variant:
    """One kernel: one file, one symbol, one dispatch entry."""

    direction: Direction
    mode: ModeSpec
    dtype: DType
    staging: Staging
    rows: int
    """Rows of a tile."""

    @property
    def name(self) -> str:
        """File stem, symbol, dispatch entry, test id: this string, made here and nowhere else."""
        return (
            f"knnpool_{self.direction.value}_{self.mode.mode.value}_{self.dtype.name}_{self.staging.value}_r{self.rows}"
        )

    @property
    def key(self) -> KernelKey:
        """What the dispatch table finds it by."""
        return KernelKey(self.direction, self.mode.mode, self.dtype.name, self.staging, self.rows)
