"""specs/*.yaml to variants. The only module that knows what the YAML looks like.

All faults of a run are reported together, as ``file:line: what is wrong; what is allowed``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from knnpool_gen.codegen.variant import DType, ModeSpec, PlanTable, TileValue, Variant
from knnpool_gen.codegen.yaml_source import Faults, Value, read_yaml
from knnpool_gen.vocabulary import Direction, Mode, Staging

T = TypeVar("T")

AXES = ("direction", "mode", "dtype", "staging", "rows")
ACCUMULATE = {name: name for name in ("float32", "float64")}
MAX_ROWS = 32
"""Rows of the tallest tile: a warp's worth."""


@dataclass(frozen=True)
class Specs:
    """Everything the specs say; ``variants`` in the order of the matrix."""

    dtypes: tuple[DType, ...]
    modes: tuple[ModeSpec, ...]
    variants: tuple[Variant, ...]


def load_specs(folder: Path) -> Specs:
    """Read ``dtypes.yaml``, ``modes.yaml`` and ``variants.yaml``.

    Raises:
        SpecError: all faults, a line each.
    """
    faults = Faults()
    dtypes = _read_dtypes(read_yaml(folder / "dtypes.yaml", faults))
    modes = _read_modes(read_yaml(folder / "modes.yaml", faults))
    variants = _read_variants(read_yaml(folder / "variants.yaml", faults), dtypes, modes)
    faults.raise_if_any()
    return Specs(
        tuple(entry.value for entry in dtypes.values()),
        tuple(entry.value for entry in modes.values()),
        tuple(variants),
    )


@dataclass(frozen=True)
class _Entry(Generic[T]):
    """Something read, and where it stands."""

    value: T
    at: Value


def _read_dtypes(root: Value | None) -> dict[str, _Entry[DType]]:
    result: dict[str, _Entry[DType]] = {}
    for key, value in ((root and root.mapping("dtypes.yaml")) or {}).items():
        what = f"dtype {key.name!r}"
        fields = value.fields(what, ("bytes", "cuda_value", "vector", "accumulate"))
        if fields is None:
            continue
        dtype = DType(
            name=key.name,
            bytes=_power_of_two(fields, "bytes", what, 8),
            cuda_value=fields["cuda_value"].text(f"cuda_value of {what}") or "",
            vector=_power_of_two(fields, "vector", what, 16),
            accumulate=fields["accumulate"].word("accumulate", ACCUMULATE) or "",
        )
        result[key.name] = _Entry(dtype, key.at)
    return result


def _read_modes(root: Value | None) -> dict[str, _Entry[ModeSpec]]:
    result: dict[str, _Entry[ModeSpec]] = {}
    known = {mode.value: mode for mode in Mode}
    for key, value in ((root and root.mapping("modes.yaml", known)) or {}).items():
        what = f"mode {key.name!r}"
        fields = value.fields(what, ("aux", "forward_reads", "backward_reads", "backward_tile"))
        if fields is None:
            continue
        tiles = {tile.value: tile for tile in TileValue}
        spec = ModeSpec(
            mode=known[key.name],
            aux=bool(fields["aux"].boolean(f"aux of {what}")),
            forward_reads=_plan_tables(fields, "forward_reads", what),
            backward_reads=_plan_tables(fields, "backward_reads", what),
            backward_tile=fields["backward_tile"].word("backward_tile", tiles) or TileValue.VALUE,
        )
        result[key.name] = _Entry(spec, key.at)
    return result


def _plan_tables(fields: dict[str, Value], name: str, what: str) -> tuple[PlanTable, ...]:
    words = {table.value: table for table in PlanTable}
    read = [item.word("plan table", words) for item in fields[name].items(f"{name} of {what}") or ()]
    return tuple(table for table in read if table is not None)


def _power_of_two(fields: dict[str, Value], name: str, what: str, most: int) -> int:
    number = fields[name].integer(f"{name} of {what}")
    return _checked_power_of_two(fields[name], number, f"{name} of {what}", most) or 1


def _checked_power_of_two(at: Value, number: int | None, what: str, most: int) -> int | None:
    if number is not None and (number < 1 or number > most or number & (number - 1)):
        at.faults.add(at, f"{what} must be a power of two from 1 to {most}, not {number}")
        return None
    return number


def _read_variants(
    root: Value | None, dtypes: dict[str, _Entry[DType]], modes: dict[str, _Entry[ModeSpec]]
) -> list[Variant]:
    fields = root and root.fields("variants.yaml", ("matrix",), ("exclude",))
    if not fields:
        return []
    axes = fields["matrix"].fields("matrix", AXES)
    if axes is None:
        return []
    readers: dict[str, Callable[[Value], object]] = {
        "direction": lambda value: value.word("direction", {word.value: word for word in Direction}),
        "mode": lambda value: value.word("mode", {name: name for name in modes}),
        "dtype": lambda value: value.word("dtype", {name: name for name in dtypes}),
        "staging": lambda value: value.word("staging", {word.value: word for word in Staging}),
        "rows": lambda value: _checked_power_of_two(value, value.integer("rows"), "rows", MAX_ROWS),
    }
    matrix = {axis: _read_axis(axes[axis], axis, readers[axis]) for axis in AXES}
    points = list(itertools.product(*([entry.value for entry in matrix[axis]] for axis in AXES)))
    kept = points
    for item in (fields["exclude"].items("exclude") or ()) if "exclude" in fields else ():
        kept = _exclude(item, kept, readers)
    if all(matrix.values()):
        _check_all_used(matrix, kept, dtypes, modes)
    return [
        Variant(direction, modes[mode].value, dtypes[dtype].value, staging, rows)  # type: ignore[arg-type,index]
        for direction, mode, dtype, staging, rows in kept
    ]


def _read_axis(value: Value, axis: str, read: Callable[[Value], object]) -> list[_Entry[object]]:
    items = value.items(axis)
    if items is not None and not items:
        value.faults.add(value, f"{axis} lists nothing")
    entries: list[_Entry[object]] = []
    for item in items or ():
        found = read(item)
        if found is None:
            continue
        if found in (entry.value for entry in entries):
            item.faults.add(item, f"{_shown(found)} stands twice in {axis}")
        else:
            entries.append(_Entry(found, item))
    return entries


def _exclude(
    item: Value, points: Sequence[tuple[object, ...]], readers: dict[str, Callable[[Value], object]]
) -> list[tuple[object, ...]]:
    fields = item.fields("exclude", ("why",), AXES)
    if fields is None:
        return list(points)
    why = fields["why"].text("why")
    if why is not None and not why.strip():
        item.faults.add(fields["why"], "why is empty; say what speaks against these variants")
    wanted: dict[int, list[object]] = {}
    for position, axis in enumerate(AXES):
        if axis in fields:
            values = fields[axis].items(axis) if fields[axis].is_list else [fields[axis]]
            wanted[position] = [readers[axis](value) for value in values or ()]
    if not wanted:
        item.faults.add(item, f"exclude names no axis; allowed: {', '.join(AXES)}")
        return list(points)
    if any(value is None for values in wanted.values() for value in values):
        return list(points)

    def matches(point: tuple[object, ...]) -> bool:
        return all(point[position] in values for position, values in wanted.items())

    kept = [point for point in points if not matches(point)]
    if len(kept) == len(points):
        item.faults.add(item, "this exclude matches no variant that is left; remove it")
    return kept


def _check_all_used(
    matrix: dict[str, list[_Entry[object]]],
    kept: Sequence[tuple[object, ...]],
    dtypes: dict[str, _Entry[DType]],
    modes: dict[str, _Entry[ModeSpec]],
) -> None:
    for position, axis in enumerate(AXES):
        used = {point[position] for point in kept}
        for entry in matrix[axis]:
            if entry.value not in used:
                entry.at.faults.add(entry.at, f"no variant uses {axis} {_shown(entry.value)}: every one is excluded")
    defined = {
        "dtype": {name: entry.at for name, entry in dtypes.items()},
        "mode": {name: entry.at for name, entry in modes.items()},
    }
    for axis, places in defined.items():
        listed = {entry.value for entry in matrix[axis]}
        for name, at in places.items():
            if name not in listed:
                at.faults.add(at, f"{axis} {name!r} is defined here and used by no variant")


def _shown(value: object) -> str:
    return repr(getattr(value, "value", value))
