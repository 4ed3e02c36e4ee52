"""The canary: proof that a kernel writes every element of its outputs.

The outputs are filled with one bit pattern, the kernel runs; the same with another pattern. An element that keeps
whatever was there differs between the runs, one that was written does not, whether it is NaN, inf or anything else.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Sequence
from enum import Enum

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, KernelError

PATTERNS = (0x55, 0xAA)
"""Bytes that differ in every bit."""


class Canary(str, Enum):
    """How often outputs are checked: ``KNNPOOL_CANARY``, read before a kernel's first check."""

    OFF = "off"
    FIRST = "first"
    """Once for every kernel and table shape (the default)."""
    ALWAYS = "always"


_SETTINGS = {canary.value: canary for canary in Canary}
_checked: set[Hashable] = set()
_always = False
"""What the environment said when it was last looked at."""
_lock = threading.Lock()


def setting() -> Canary:
    """What ``KNNPOOL_CANARY`` asks for."""
    value = os.environ.get("KNNPOOL_CANARY", "first")
    found = _SETTINGS.get(value)
    if found is None:
        raise InvalidArgumentError(f"KNNPOOL_CANARY = {value!r}; allowed: {', '.join(_SETTINGS)}")
    return found


def due(what: Hashable) -> bool:
    """Whether the outputs of ``what`` are to be checked now. Never inside a graph capture: it would synchronise."""
    global _always
    if what in _checked and not _always:
        return False  # without a look at the environment, which costs as much as a launch
    canary = setting()
    _always = canary is Canary.ALWAYS
    if canary is Canary.OFF or (canary is Canary.FIRST and what in _checked):
        return False
    return not torch.cuda.is_current_stream_capturing()


def check(what: Hashable, name: str, outputs: Sequence[Tensor], launch: Callable[[], None]) -> None:
    """Launch twice into differently filled ``outputs``; they hold the result afterwards.

    Raises:
        KernelError: elements were left unwritten.
    """
    first = None
    for pattern in PATTERNS:
        for output in outputs:
            _bytes(output).fill_(pattern)
        launch()
        if first is None:
            first = [_bytes(output).clone() for output in outputs]
    assert first is not None
    holes = sum(int((_bytes(output) != before).sum()) for output, before in zip(outputs, first, strict=True))
    if holes:
        raise KernelError(f"{name} left {holes} byte(s) of its output unwritten; please report this")
    with _lock:
        _checked.add(what)


def forget() -> None:
    """Check everything again on its next launch."""
    with _lock:
        _checked.clear()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
