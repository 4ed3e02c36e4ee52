"""What is measured: a table with an input, in one mode and direction, and how many bytes that must move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Direction, Mode

VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
BATCHES = (512, 64, 8, 1)
"""The largest first, so that a short run measures what matters most."""
DTYPES = ("float16", "bfloat16", "float32")
VARIANT_BATCHES = (512, 8)
VARIANT_DTYPES = ("float16", "float32")
HEADLINE_TABLE = "alexnet64_pool0"


class Group(str, Enum):
    """Why a case is there."""

    REAL = "real"
    """A table of a real network."""
    ODD = "odd"
    """A size that no real network has."""
    NIN = "nin"
    """One of several that differ in the length of a row."""
    K = "k"
    """One of several that differ in the length of a column."""


@dataclass(frozen=True)
class Case:
    """One pooling to be measured."""

    table: str
    nin: int
    nout: int
    k: int
    batch: int
    channels: int
    dtype: str
    mode: Mode
    direction: Direction
    group: Group = Group.REAL

    @property
    def name(self) -> str:
        """What reports and messages call it."""
        return f"{self.table} {self.batch}x{self.channels} {self.dtype} {self.mode.value} {self.direction.value}"

    @property
    def rows(self) -> int:
        """Rows of the input."""
        return self.batch * self.channels

    @property
    def reads_aux(self) -> bool:
        """Whether winning slots are written (forward) or read (backward)."""
        return self.mode is Mode.MAX

    @property
    def slot_bytes(self) -> int:
        """Bytes of a winning slot."""
        return 1 if self.k <= 255 else 2 if self.k <= 32767 else 4

    @property
    def traffic(self) -> int:
        """Bytes that must be read and written together: x, y and aux, or grad_y, aux and grad_x."""
        values = VALUE_BYTES[self.dtype] * (self.nin + self.nout)
        return self.rows * (values + (self.slot_bytes * self.nout if self.reads_aux else 0))

    @property
    def gathered(self) -> int:
        """Bytes of the ``[B, C, K, Nout]`` that plain torch gathers."""
        return self.rows * self.k * self.nout * VALUE_BYTES[self.dtype]


HEADLINES = tuple(Case(HEADLINE_TABLE, 964, 230, 9, 512, 96, "float16", Mode.MAX, direction) for direction in Direction)
"""``alexp0``: the case that everything is compared by, both ways."""


@dataclass(frozen=True)
class Selection:
    """What to measure; an empty list is the usual choice."""

    batches: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = ()
    directions: tuple[Direction, ...] = tuple(Direction)
    quick: bool = False
    """Only the largest batch in the first dtype, where nothing else is asked for."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            InvalidArgumentError: a dtype that is not known, or a batch below 1.
        """
        unknown = [dtype for dtype in self.dtypes if dtype not in VALUE_BYTES]
        if unknown:
            raise InvalidArgumentError(f"no dtype {', '.join(unknown)}; there are {', '.join(VALUE_BYTES)}")
        if any(batch < 1 for batch in self.batches):
            raise InvalidArgumentError(f"batch {min(self.batches)}: at least 1 is measured")


def real_cases(tables: Iterable[BenchTable], selection: Selection) -> list[Case]:
    """Every table at every batch size and dtype, both ways, in its own mode.

    Where no mode is asked for, the headline is measured in all of them.
    """
    batches = selection.batches or BATCHES[: 1 if selection.quick else None]
    dtypes = selection.dtypes or DTYPES[: 1 if selection.quick else None]
    cases: list[Case] = []
    for dtype in dtypes:
        for batch in batches:
            for table in tables:
                modes = selection.modes or (table.mode,)
                if not selection.modes and table.name == HEADLINE_TABLE and (batch, dtype) == (batches[0], dtypes[0]):
                    modes = tuple(Mode)
                for mode in modes:
                    cases += both_ways(table, batch, dtype, mode, selection, Group.REAL)
    return cases


def odd_cases(tables: Iterable[BenchTable], selection: Selection) -> list[Case]:
    """Every table once a mode, with a batch that makes about 30 million input values at most."""
    cases: list[Case] = []
    for table in tables:
        batches = selection.batches or (max(1, min(512, (1 << 25) // (table.nin * table.channels))),)
        for mode in selection.modes or (Mode.MAX, Mode.AVG):
            for batch in batches:
                cases += both_ways(table, batch, _first_dtype(selection), mode, selection, Group.ODD)
    return cases


def growing_cases(tables: Iterable[BenchTable], selection: Selection, group: Group) -> list[Case]:
    """Every table with the same 4096 rows."""
    mode = selection.modes[0] if selection.modes else Mode.MAX
    return [case for table in tables for case in both_ways(table, 64, _first_dtype(selection), mode, selection, group)]


def standard_cases(
    real: Sequence[BenchTable],
    odd: Sequence[BenchTable],
    nin: Sequence[BenchTable],
    k: Sequence[BenchTable],
    selection: Selection,
) -> list[Case]:
    """All cases of a benchmark, the most telling first: a run that is cut short misses other dtypes, not sizes.

    Odd and growing tables are left out of a quick run, growing ones also where batch sizes are asked for.
    """
    cases = real_cases(real, selection)
    first = _first_dtype(selection)
    others = [] if selection.quick else odd_cases(odd, selection)
    if not selection.quick and not selection.batches:
        others += growing_cases(nin, selection, Group.NIN) + growing_cases(k, selection, Group.K)
    return [
        *(case for case in cases if case.dtype == first),
        *others,
        *(case for case in cases if case.dtype != first),
    ]


def variant_cases(tables: Iterable[BenchTable], selection: Selection) -> list[Case]:
    """What every variant is measured on: large and small batches, narrow and wide values."""
    chosen = replace(
        selection,
        batches=selection.batches or VARIANT_BATCHES[: 1 if selection.quick else None],
        dtypes=selection.dtypes or VARIANT_DTYPES[: 1 if selection.quick else None],
    )
    return [
        case
        for dtype in chosen.dtypes
        for batch in chosen.batches
        for table in tables
        for mode in chosen.modes or (table.mode,)
        for case in both_ways(table, batch, dtype, mode, chosen, Group.REAL)
    ]


def tuned_cases(table: BenchTable, selection: Selection) -> list[Case]:
    """``table`` in its own mode, for every dtype and direction; batches of ``selection`` are rows of one channel."""
    one = replace(table, channels=1)
    return [
        case
        for dtype in selection.dtypes
        for rows in selection.batches
        for case in both_ways(one, rows, dtype, table.mode, selection, Group.REAL)
    ]


def both_ways(
    table: BenchTable, batch: int, dtype: str, mode: Mode, selection: Selection, group: Group
) -> Iterator[Case]:
    """The case in each direction of ``selection``."""
    for direction in selection.directions:
        yield Case(
            table.name, table.nin, table.nout, table.k, batch, table.channels, dtype, mode, direction, group
        )  # fmt: skip


def compiled_cases(cases: Sequence[Case]) -> set[Case]:
    """Those that are worth the seconds a ``torch.compile`` takes: the first of each real table and direction, and all
    odd ones."""
    chosen: dict[tuple[str, Direction], Case] = {}
    for case in cases:
        if case.group is Group.REAL:
            chosen.setdefault((case.table, case.direction), case)
    return {*chosen.values(), *(case for case in cases if case.group is Group.ODD)}


def _first_dtype(selection: Selection) -> str:
    return selection.dtypes[0] if selection.dtypes else DTYPES[0]
