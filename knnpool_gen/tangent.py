"""What a small change of ``x`` does to ``y``: linear in the change, and the transpose of the backward."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from knnpool_gen.pooling import divisor_without_nan, forward, undivided
from knnpool_gen.reduction import Reduction, accumulate_dtype
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.vocabulary import Mode


@torch.no_grad()
def tangent(meta: PoolMeta, change: Tensor, aux: Tensor | None, reduction: Reduction, x: Tensor | None) -> Tensor:
    """The change of ``y`` ``[..., Nout]``; 0 for an empty column.

    Args:
        meta: the plan that the forward used.
        change: ``[..., Nin]``, the change of ``x``.
        aux: the winning slots that the forward gave, for max.
        reduction: that of the forward; its ``empty_value`` is not looked at.
        x: the input of the forward, where :attr:`Reduction.backward_reads_x`.
    """
    if reduction.mode is Mode.MAX and aux is not None:
        return _winners_of(change, aux, meta)
    if reduction.backward_reads_x and x is not None:
        return _pooled_without(x, change, meta, reduction)
    pooled, _ = forward(meta, change, replace(reduction, empty_value=None), need_aux=False)
    # An average of nothing is NaN, yet nothing flows through it.
    return pooled.index_fill_(-1, meta.empty_columns, 0) if reduction.mode is Mode.AVG else pooled


def _winners_of(values: Tensor, aux: Tensor, meta: PoolMeta) -> Tensor:
    """``values`` at the node in the winning slot of each column ``[..., Nout]``; 0 for an empty column."""
    if meta.k == 0 or meta.nin == 0:
        return values.new_zeros((*values.shape[:-1], meta.nout))  # no entry to look at
    empty = meta.count == 0
    slots = aux.long().masked_fill(empty, 0)
    table = meta.indices_i64.masked_fill(meta.indices_i64 >= meta.nin, 0)
    nodes = table[slots, torch.arange(meta.nout, device=values.device)]
    return values.gather(-1, nodes).masked_fill(empty, 0.0)


def _pooled_without(x: Tensor, values: Tensor, meta: PoolMeta, reduction: Reduction) -> Tensor:
    """``values`` pooled where ``x`` is not NaN; a NaN among those is as good as any value."""
    dtype = accumulate_dtype(values.dtype)
    pooled, _ = forward(meta, values.masked_fill(x.isnan(), 0).to(dtype), undivided(reduction), need_aux=False)
    size = divisor_without_nan(meta, x, reduction, dtype)
    if size is not None:
        pooled = pooled / size.masked_fill(size == 0, torch.inf)  # an average of nothing
    return pooled.to(values.dtype)
