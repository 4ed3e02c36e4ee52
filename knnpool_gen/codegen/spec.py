"""specs/*.yaml to variants. The only module that knows what the specs say.

All faults of a run are reported together, as ``file:line: what is wrong; what is allowed``. One fault is
reported once: what follows from it alone, such as a dtype that is unknown because dtypes.yaml cannot be
read, is not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Generic, TypeVar

from knnpool_gen.codegen.faults import Faults
from knnpool_gen.codegen.variant import (
    PLAN_TABLES,
    TABLES_OF_WEIGHTS,
    DType,
    ModeSpec,
    PlanTable,
    TileValue,
    Variant,
)
from knnpool_gen.codegen.yaml_source import Value, read_yaml
from knnpool_gen.errors import SpecError
from knnpool_gen.kernel import KernelKey
from knnpool_gen.vocabulary import Direction, Mode, Staging

T = TypeVar("T")
E = TypeVar("E", bound=Enum)

AXES = KernelKey._fields
DTYPE_NAME = re.compile(r"[a-z]+([0-9]+)[a-z0-9_]*")
"""Names of dtypes, with their size in bits; they become parts of file names and symbols, also where file names ignore
case."""
ACCUMULATE = {name: name for name in ("float32", "float64")}
MAX_BYTES = 8
MAX_VECTOR = 16
WIDEST_LOAD = 16
"""Bytes that one load brings at most."""
MAX_ROWS = 32
"""Rows of the tallest tile: more leave no shared memory for real tables and no registers for a thread's rows.
Powers of two alone, so that the values of a node fill whole reads of up to 16 bytes."""


@dataclass(frozen=True)
class Specs:
    """Everything the specs say; ``variants`` in the order in which the matrix lists its values."""

    dtypes: tuple[DType, ...]
    modes: tuple[ModeSpec, ...]
    variants: tuple[Variant, ...]

    def __post_init__(self) -> None:
        """Refuse two variants of one name: one would overwrite the other's file."""
        names = [variant.name for variant in self.variants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SpecError(f"more than one variant is named {', '.join(twice)}")


def load_specs(folder: Path) -> Specs:
    """Read ``dtypes.yaml``, ``modes.yaml`` and ``variants.yaml``.

    Raises:
        SpecError: all faults, a line each.
    """
    folder = folder.absolute()  # messages begin with its name, which "." does not have
    faults = Faults()
    dtypes = _read_dtypes(read_yaml(folder / "dtypes.yaml", faults))
    modes = _read_modes(read_yaml(folder / "modes.yaml", faults))
    keys = _read_variants(read_yaml(folder / "variants.yaml", faults), dtypes, modes)
    faults.raise_if_any()
    return Specs(
        tuple(dtypes.read.values()),
        tuple(modes.read.values()),
        tuple(
            Variant(key.direction, modes.read[key.mode.value], dtypes.read[key.dtype], key.staging, key.rows)
            for key in keys
        ),
    )


# --- dtypes.yaml and modes.yaml


@dataclass(frozen=True)
class _Definitions(Generic[T]):
    """The entries of a file, by name."""

    places: Mapping[str, Value] | None
    """Where each stands, also those with faults; None if the file could not be read."""
    read: Mapping[str, T]


def _read_definitions(
    root: Value | None, file: str, allowed: Sequence[str] | None, read: Callable[[str, Value], T | None]
) -> _Definitions[T]:
    entries = root.mapping(file, allowed) if root else None
    if entries is None:
        return _Definitions(None, {})
    results = {key.name: read(key.name, value) for key, value in entries.items()}
    return _Definitions(
        places={key.name: key.at for key in entries},
        read={name: result for name, result in results.items() if result is not None},
    )


def _read_dtypes(root: Value | None) -> _Definitions[DType]:
    definitions = _read_definitions(root, "dtypes.yaml", None, _read_dtype)
    for name, at in (definitions.places or {}).items():
        if not DTYPE_NAME.fullmatch(name):
            at.fault(f"dtype {name!r} must be named as in torch: small letters, the size in bits, and what follows it")
    return definitions


def _read_dtype(name: str, value: Value) -> DType | None:
    what = f"dtype {name!r}"
    fields = value.fields(what, ("bytes", "vector", "accumulate"))
    if fields is None:
        return None
    size = _power_of_two(fields["bytes"], f"bytes of {what}", MAX_BYTES)
    vector = _power_of_two(fields["vector"], f"vector of {what}", MAX_VECTOR)
    accumulate = fields["accumulate"].word("accumulate", ACCUMULATE)
    if size is None or vector is None or accumulate is None:
        return None
    known = DTYPE_NAME.fullmatch(name)
    if known and known.group(1) != str(8 * size):
        fields["bytes"].fault(f"bytes of {what} is {size}, but by its name it has {known.group(1)} bits")
        return None
    if vector * size > WIDEST_LOAD:
        fields["vector"].fault(
            f"vector of {what} must be at most {WIDEST_LOAD // size}, not {vector}: "
            f"a load brings {WIDEST_LOAD} bytes, a value has {size}"
        )
    rule = "float64" if size == MAX_BYTES else "float32"
    if accumulate != rule:
        fields["accumulate"].fault(
            f"accumulate of {what} must be {rule}, not {accumulate}: "
            f"everything is added in float64 for values of {MAX_BYTES} bytes, otherwise in float32"
        )
    return DType(name, size, vector, accumulate, value.place)


def _read_modes(root: Value | None) -> _Definitions[ModeSpec]:
    return _read_definitions(root, "modes.yaml", [mode.value for mode in Mode], _read_mode)


def _read_mode(name: str, value: Value) -> ModeSpec | None:
    what = f"mode {name!r}"
    fields = value.fields(what, ("aux", "forward_reads", "backward_reads", "backward_tile"))
    if fields is None:
        return None
    mode = Mode(name)
    aux = fields["aux"].boolean(f"aux of {what}")
    if aux is not None and aux != mode.has_winner:
        right, why = ("true", "its winning slots") if mode.has_winner else ("false", "no winning slot")
        fields["aux"].fault(f"aux of {what} must be {right}: it has {why}")
    return ModeSpec(
        mode=mode,
        aux=mode.has_winner,
        forward_reads=_plan_tables(fields["forward_reads"], mode, Direction.FORWARD),
        backward_reads=_plan_tables(fields["backward_reads"], mode, Direction.BACKWARD),
        backward_tile=fields["backward_tile"].word("backward_tile", _words(TileValue)) or TileValue.VALUE,
        at={"mode": value.place, **{key: field.place for key, field in fields.items()}},
    )


def _plan_tables(value: Value, mode: Mode, direction: Direction) -> tuple[PlanTable, ...]:
    what = f"{direction.value}_reads of mode {mode.value!r}"
    allowed = [table for table in PLAN_TABLES[direction] if mode.takes_weights or table not in TABLES_OF_WEIGHTS]
    words = {table.value: table for table in allowed}
    items = value.items(what) or []
    return tuple(_distinct(items, what, lambda item: item.word(f"{direction.value} table", words)) or ())


# --- variants.yaml


def _read_variants(root: Value | None, dtypes: _Definitions[DType], modes: _Definitions[ModeSpec]) -> list[KernelKey]:
    """The combinations that are left; incomplete if there are faults."""
    fields = root.fields("variants.yaml", ("matrix",), ("exclude",)) if root else None
    axes = fields["matrix"].fields("matrix", AXES) if fields else None
    if fields is None or axes is None:
        return []
    readers = _axis_readers(dtypes.places, modes.places)
    matrix = {axis: _read_axis(axes[axis].items(axis), axes[axis], axis, readers[axis]) for axis in AXES}
    _check_listed("dtype", dtypes.places, matrix["dtype"])
    _check_listed("mode", modes.places, matrix["mode"])
    excludes = [
        _read_exclude(item, readers)
        for item in (fields["exclude"].items("exclude") or () if "exclude" in fields else ())
    ]
    complete = {axis: values for axis, values in matrix.items() if values is not None}
    if len(complete) < len(AXES):
        return []
    keys = [KernelKey(*values) for values in itertools.product(*complete.values())]
    removed_by: dict[_Half, Value] = {}
    for exclude in excludes:
        if exclude is not None:
            kept = exclude.apply(keys)
            removed_by |= {_half(key): exclude.at for key in keys if key not in kept}
            keys = kept
    _check_used(complete, keys)
    if None not in excludes:
        _check_directions(complete["direction"], keys, removed_by)
    return keys


_AxisReader = Callable[[Value], Any]
"""Reads one value of an axis; None after a fault."""
_Axis = Mapping[Any, Value]
"""The values of an axis and where each stands."""


def _axis_readers(dtypes: Mapping[str, Value] | None, modes: Mapping[str, Value] | None) -> dict[str, _AxisReader]:
    known_dtypes = None if dtypes is None else {name: name for name in dtypes}
    known_modes = {mode.value: mode for mode in Mode if modes is None or mode.value in modes}

    def read_dtype(value: Value) -> str | None:
        return value.text("dtype") if known_dtypes is None else value.word("dtype", known_dtypes)

    return {
        "direction": lambda value: value.word("direction", _words(Direction)),
        "mode": lambda value: value.word("mode", known_modes),
        "dtype": read_dtype,
        "staging": lambda value: value.word("staging", _words(Staging)),
        "rows": lambda value: _power_of_two(value, "rows", MAX_ROWS),
    }


def _read_axis(items: Sequence[Value] | None, at: Value, axis: str, read: _AxisReader) -> _Axis | None:
    if items is not None and not items:
        at.fault(f"{axis} lists nothing")
    return _distinct(items, axis, read) if items else None


@dataclass(frozen=True)
class _Exclude:
    """An entry of ``exclude``."""

    at: Value
    wanted: Mapping[str, _Axis]
    """The axes it names and the values it names of each."""

    def apply(self, keys: Sequence[KernelKey]) -> list[KernelKey]:
        """The keys it leaves."""
        kept = [key for key in keys if not all(getattr(key, axis) in values for axis, values in self.wanted.items())]
        if len(kept) == len(keys):
            self.at.fault("this exclude matches no variant that is left; remove it")
        return kept


def _read_exclude(item: Value, readers: Mapping[str, _AxisReader]) -> _Exclude | None:
    fields = item.fields("exclude", ("why",), AXES)
    if fields is None:
        return None
    _some_text(fields["why"], "why", "say what speaks against these variants")
    named = [axis for axis in AXES if axis in fields]
    if not named:
        item.fault(f"exclude names no axis; allowed: {', '.join(AXES)}")
        return None
    wanted: dict[str, _Axis] = {}
    for axis in named:
        value = fields[axis]
        values = _read_axis(value.items(axis) if value.is_list else [value], value, axis, readers[axis])
        if values is not None:
            wanted[axis] = values
    return _Exclude(item, wanted) if len(wanted) == len(named) else None


def _check_listed(axis: str, defined: Mapping[str, Value] | None, listed: _Axis | None) -> None:
    if defined is None or listed is None:
        return
    for name, at in defined.items():
        if name not in listed:
            at.fault(f"{axis} {name!r} is defined here and used by no variant")


_Half = tuple[Mode, str, Direction]
"""What gradients of a mode and dtype take two of."""


def _half(key: KernelKey) -> _Half:
    return key.mode, key.dtype, key.direction


def _check_directions(listed: _Axis, keys: Sequence[KernelKey], removed_by: Mapping[_Half, Value]) -> None:
    """Whatever has a forward needs a backward, and the other way round: both serve one call."""
    if len(listed) < len(Direction):
        ((only, at),) = listed.items()
        missing = next(direction for direction in Direction if direction is not only)
        at.fault(f"direction lists {only.value} without {missing.value}; a mode and dtype need both")
        return
    halves = dict.fromkeys(map(_half, keys))
    if len({direction for *_, direction in halves}) < len(Direction):
        return  # that no variant uses one of them is said already
    for mode, dtype, direction in halves:
        for missing in Direction:
            if (mode, dtype, missing) not in halves:
                at = removed_by[mode, dtype, missing]
                at.fault(
                    f"mode {mode.value!r} of dtype {dtype!r} is left with a {direction.value} and no {missing.value}; "
                    "it needs both",
                )


def _check_used(matrix: Mapping[str, _Axis], keys: Sequence[KernelKey]) -> None:
    for axis, values in matrix.items():
        used = {getattr(key, axis) for key in keys}
        for value, at in values.items():
            if value not in used:
                at.fault(f"no variant uses {axis} {_shown(value)}: every one is excluded")


# --- values


def _distinct(items: Sequence[Value] | None, what: str, read: Callable[[Value], T | None]) -> dict[T, Value] | None:
    """What ``items`` say and where; one that stands twice is a fault. None if one cannot be read."""
    if items is None:
        return None
    found: dict[T, Value] = {}
    complete = True
    for item in items:
        value = read(item)
        if value is None:
            complete = False
        elif value in found:
            item.fault(f"{_shown(value)} stands twice in {what}")
        else:
            found[value] = item
    return found if complete else None


def _words(enum: type[E]) -> dict[str, E]:
    return {word.value: word for word in enum}


def _some_text(value: Value, what: str, hint: str) -> str | None:
    text = value.text(what)
    if text is not None and not text.strip():
        value.fault(f"{what} is empty; {hint}")
    return text


def _power_of_two(value: Value, what: str, most: int) -> int | None:
    number = value.integer(what)
    if number is not None and (number < 1 or number > most or number & (number - 1)):
        value.fault(f"{what} must be a power of two from 1 to {most}, not {number}")
        return None
    return number


def _shown(value: object) -> str:
    return repr(getattr(value, "value", value))
