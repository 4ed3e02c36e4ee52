"""Whether specs and templates mean the same kernels: where they contradict each other is a fault of the specs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum

from knnpool_gen.codegen.faults import Faults
from knnpool_gen.codegen.variant import DType, ModeSpec, PlanTable, TileValue, Variant
from knnpool_gen.vocabulary import Direction, Mode


class Piece(str, Enum):
    """What has a template of its own, in a folder of that name."""

    DTYPES = "dtypes"
    MODES = "modes"
    ACCUMULATE = "accumulate"

    def template(self, name: str) -> str:
        """The name of that template."""
        return f"{self.value}/{name}.cu.jinja"


def check_pieces(variants: Iterable[Variant], exists: Callable[[str], bool], faults: Faults) -> None:
    """Every dtype, mode and dtype of sums has its template; ``exists`` knows them by name."""
    for dtype in _dtypes(variants):
        template = Piece.DTYPES.template(dtype.name)
        if not exists(template):
            faults.add(dtype.at, f"dtype {dtype.name!r} has no template: write templates/{template}")
        template = Piece.ACCUMULATE.template(dtype.accumulate)
        if not exists(template):
            faults.add(dtype.at, f"accumulate {dtype.accumulate!r} has no template: write templates/{template}")
    for mode in _modes(variants):
        template = Piece.MODES.template(mode.mode.value)
        if not exists(template):
            faults.add(mode.at["mode"], f"mode {mode.mode.value!r} has no template: write templates/{template}")


def check_tiles(variants: Iterable[Variant], staged: Callable[[Variant, str], str], faults: Faults) -> None:
    """What the template of a mode stages for the text of a gradient, asked of ``staged``, is what ``backward_tile``
    says."""
    for variant in {variant.mode.mode: variant for variant in variants}.values():
        mode = variant.mode
        as_it_is = staged(variant, "value") == "value"
        right = TileValue.VALUE if as_it_is else TileValue.ACCUMULATE
        if mode.backward_tile is not right:
            faults.add(
                mode.at["backward_tile"],
                f"backward_tile of mode {mode.mode.value!r} must be {right.value}, not {mode.backward_tile.value}: "
                f"templates/{Piece.MODES.template(mode.mode.value)} stages "
                + ("the gradient as it is" if as_it_is else "what it works out"),
            )


def check_tables(sources: Mapping[Variant, str], faults: Faults) -> None:
    """The kernels of a mode read, from ``sources``, exactly the tables that their mode names."""
    read: dict[tuple[Mode, Direction], set[PlanTable]] = {}
    for variant, source in sources.items():
        code = re.sub(r"//.*", "", source)
        found = {table for table in PlanTable if re.search(rf"\b{table.value}\[", code)}
        read.setdefault((variant.mode.mode, variant.direction), set()).update(found)
    modes = {mode.mode: mode for mode in _modes(sources)}
    for (word, direction), tables in read.items():
        key = f"{direction.value}_reads"
        named = set(modes[word].reads(direction))
        for table in sorted(named ^ tables):
            wrong = "names" if table in named else "lacks"
            reads = "does not read" if table in named else "reads"
            template = Piece.MODES.template(word.value)
            faults.add(
                modes[word].at[key],
                f"{key} of mode {word.value!r} {wrong} {table.value}, which templates/{template} {reads}",
            )


def _dtypes(variants: Iterable[Variant]) -> list[DType]:
    return list({variant.dtype.name: variant.dtype for variant in variants}.values())


def _modes(variants: Iterable[Variant]) -> list[ModeSpec]:
    return list({variant.mode.mode: variant.mode for variant in variants}.values())
