"""Equality as kernels are held to it: every bit, except that any NaN equals any other."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """What is wrong with ``actual``, or None if it has shape, dtype and bits of ``expected``."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"{actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    different = bits(actual) != bits(expected)
    if actual.is_floating_point():
        different &= ~(actual.isnan() & expected.isnan())
    where = different.nonzero().tolist()
    if not where:
        return None
    first = tuple(where[0])
    return (
        f"{len(where)} of {different.numel()} elements differ, the first at {list(first)}: "
        f"{actual[first].item()!r}, expected {expected[first].item()!r}"
    )


def bits(values: Tensor) -> Tensor:
    """The bits of ``values`` as integers of the same width."""
    return values.contiguous().view(_BITS[values.element_size()])
