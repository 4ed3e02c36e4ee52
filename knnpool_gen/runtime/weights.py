"""Weights of the neighbours, as kernels and reference read them."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.runtime import capture
from knnpool_gen.runtime.plan import PoolMeta, check_dense, check_has_values
from knnpool_gen.runtime.table_cache import TableCache

EPSILON = 1e-8
"""Added to the sum of the weights before dividing by it, as fovi's layer does."""


@dataclass(frozen=True, eq=False)
class PoolWeights:
    """Tables derived from ``weights`` ``[K, Nout]``, in the dtype that sums run in."""

    weights: Tensor
    """``[K, Nout]``, 0 at pads."""
    rev_weights: Tensor
    """By entry of the reverse table."""
    rev_normalized: Tensor
    """The same, each divided by (the sum of its column + 1e-8)."""


_prepared: weakref.WeakKeyDictionary[PoolMeta, TableCache[PoolWeights]] = weakref.WeakKeyDictionary()
"""What was derived for each plan; it goes with the plan or with the weights, whichever dies first."""
_lock = threading.Lock()


def prepare_weights(meta: PoolMeta, weights: Tensor, dtype: torch.dtype) -> PoolWeights:
    """Derive the tables for sums in ``dtype``, or take them from the cache.

    Raises:
        UnsupportedTypeError: ``weights`` is no floating-point tensor.
        InvalidArgumentError: its shape is not that of the table, it wants a gradient, or it is a meta tensor.
    """
    check_weights(weights, meta.k, meta.nout)
    with _lock:
        tables = _prepared.setdefault(meta, TableCache())
    return tables.get(weights, dtype, lambda: _derive(meta, weights, dtype))


def check_weights(weights: object, k: int, nout: int) -> None:
    """Check what a look at weights tells, for a table ``[k, nout]``; raises as :func:`prepare_weights`."""
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise UnsupportedTypeError(f"weights must be a floating-point tensor, not {kind}")
    check_dense("weights", weights)
    if weights.shape != (k, nout):
        raise InvalidArgumentError(f"weights have shape {list(weights.shape)}, the table [K, Nout] = [{k}, {nout}]")
    if weights.requires_grad:
        raise InvalidArgumentError("weights that require a gradient are not supported: detach them")


def clear_weights() -> None:
    """Forget what was derived from weights."""
    with _lock:
        _prepared.clear()


@capture.built_apart
@torch.no_grad()
def _derive(meta: PoolMeta, weights: Tensor, dtype: torch.dtype) -> PoolWeights:
    check_has_values("weights", weights, "what is made of it")
    table = weights.to(meta.device, dtype).masked_fill(meta.indices >= meta.nin, 0).contiguous()
    size = table.new_zeros(meta.nout)
    for row in table:  # slots ascending, as the kernels add
        size += row
    slots, nodes = meta.unpack(meta.rev_kn)
    derived = PoolWeights(table, table[slots, nodes], (table / (size + EPSILON))[slots, nodes])
    capture.wait(meta.device)
    return derived
