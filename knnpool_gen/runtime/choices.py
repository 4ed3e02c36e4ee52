"""What :mod:`~knnpool_gen.runtime.select` chooses for every mode and dtype of a table, for people to look at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime.launch import device_facts
from knnpool_gen.runtime.plan import aux_dtype, packs_narrow, reads_narrow
from knnpool_gen.runtime.select import H200, DeviceFacts, Problem, select, supported_dtypes
from knnpool_gen.vocabulary import Direction, Mode, NanRule


@dataclass(frozen=True)
class Choice:
    """One problem and the kernel that serves it."""

    direction: str
    mode: str
    dtype: str
    nan: str
    variant: str
    stack: int
    grid: int
    threads: int
    shared_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def current_device() -> tuple[str, DeviceFacts]:
    """Name and facts of the current CUDA device, or of an H200 where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), device_facts(torch.cuda.current_device())
    return "an H200 (there is no CUDA device here)", H200


def choices(nin: int, nout: int, k: int, rows: int, device: DeviceFacts) -> list[Choice]:
    """Choose for a table ``[k, nout]`` of ``nin`` inputs, every direction, mode, dtype and NaN rule.

    Raises:
        InvalidArgumentError: a size is negative.
    """
    if min(nin, nout, k, rows) < 0:
        raise InvalidArgumentError(f"Nin {nin}, Nout {nout}, K {k} and rows {rows} must not be negative")
    return [
        _choice(direction, mode, dtype, rule, (nin, nout, k, rows), device)
        for direction in Direction
        for mode in Mode
        for dtype in supported_dtypes(mode)
        for rule in NanRule
    ]


def problem_of_sizes(
    direction: Direction,
    mode: Mode,
    dtype: str,
    sizes: tuple[int, int, int, int],
    omit_nan: bool = False,
    normalize: bool = False,
) -> Problem:
    """The problem of a table and an input of ``(Nin, Nout, K, rows)``; max with winning slots."""
    nin, nout, k, rows = sizes
    return Problem(
        direction=direction,
        mode=mode,
        dtype=dtype,
        k=k,
        nin=nin,
        nout=nout,
        rows=rows,
        need_aux=mode is Mode.MAX,
        omit_nan=omit_nan,
        normalize=normalize,
        index_bytes=2 if reads_narrow(nin) else 4,
        slot_bytes=aux_dtype(k).itemsize,
        entry_bytes=4 if packs_narrow(k, nout) else 8,
    )


def _choice(
    direction: Direction, mode: Mode, dtype: str, rule: NanRule, sizes: tuple[int, int, int, int], device: DeviceFacts
) -> Choice:
    problem = problem_of_sizes(direction, mode, dtype, sizes, omit_nan=rule is NanRule.OMIT)
    chosen = select(problem, device)
    return Choice(
        direction=direction.value,
        mode=mode.value,
        dtype=dtype,
        nan=rule.value,
        variant=chosen.kernel.name,
        stack=int(dict(chosen.macros).get("KNNPOOL_STACK", 1)),
        grid=chosen.grid,
        threads=chosen.threads,
        shared_bytes=chosen.shared_bytes,
    )
