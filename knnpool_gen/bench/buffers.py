"""Tensors of a case, in so many sets that a set has left the L2 cache when its turn comes again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MIN_SETS = 6
MAX_SETS = 256
L2_TIMES = 2
"""All sets together hold this many times the L2."""
ALIGNMENT = 256
"""Bytes; torch's allocator gives no less, and slices of a shared allocation are to be no worse."""


def sets_needed(bytes_a_set: int, l2_bytes: int, limit_bytes: int) -> int:
    """How many sets of buffers to take turns with; 0 if not even two fit into ``limit_bytes``."""
    wanted = max(MIN_SETS, min(MAX_SETS, math.ceil(L2_TIMES * l2_bytes / max(1, bytes_a_set))))
    fitting = limit_bytes // max(1, bytes_a_set)
    return 0 if fitting < 2 else min(wanted, fitting)


def exceeds_l2(bytes_a_set: int, sets: int, l2_bytes: int) -> bool:
    """Whether so many sets do not fit the L2; the smallest cases always do."""
    return bytes_a_set * sets > l2_bytes


def empty_sets(sets: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """``sets`` tensors of one allocation, each at an aligned address."""
    count = math.prod(shape)
    step = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT // dtype.itemsize
    storage = torch.empty(sets * step, dtype=dtype, device=device).untyped_storage()
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    # Not views of one tensor: autograd and torch.compile treat those in their own ways.
    return [torch.empty(0, dtype=dtype, device=device).set_(storage, i * step, shape, strides) for i in range(sets)]


def random_sets(sets: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> list[Tensor]:
    """The same, holding normally distributed values that are the same on every run."""
    generator = torch.Generator(device).manual_seed(seed)
    return [tensor.normal_(generator=generator) for tensor in empty_sets(sets, shape, dtype, device)]
