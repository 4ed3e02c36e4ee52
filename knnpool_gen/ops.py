"""Pooling as an autograd function, differentiable as often as one likes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.pooling import backward, check_input, divisor_without_nan, forward, undivided
from knnpool_gen.reduction import Reduction, accumulate_dtype, make_reduction
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.vocabulary import Mode


class KNNPoolFunction(torch.autograd.Function):
    """``KNNPoolFunction.apply(x, meta, mode, need_aux) -> y``.

    Keeps the plan and, for max, the winning slots (one byte an output); nothing of size ``[.., K, Nout]``, and ``x``
    only where ``nan="omit"`` asks for it. Autocast leaves it alone: the dtype is that of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, meta: PoolMeta, mode: str | Reduction, need_aux: bool) -> Tensor:
        """Pool; arguments and errors as in :func:`knnpool_gen.pool_forward`. ``mode`` may come with its options."""
        check_input(meta, x)
        reduction = mode if isinstance(mode, Reduction) else make_reduction(meta, x.dtype, mode)
        y, aux = forward(meta, x, reduction, need_aux)
        ctx.meta = meta
        ctx.reduction = reduction
        ctx.save_for_backward(aux, x if reduction.backward_reads_x else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """The gradient of ``x``."""
        aux, x = ctx.saved_tensors
        if aux is None and ctx.reduction.mode is Mode.MAX:
            raise InvalidArgumentError("the backward of 'max' needs the winning slots: apply with need_aux=True")
        grad_x = _KNNPoolGradient.apply(grads[0], aux, x, ctx.meta, ctx.reduction)  # type: ignore[no-untyped-call]
        return grad_x, None, None, None


class _KNNPoolGradient(torch.autograd.Function):
    """The gradient of pooling. It is linear in ``grad_y``, so its own gradient is the pooling it transposes."""

    @staticmethod
    def forward(
        ctx: Any, grad_y: Tensor, aux: Tensor | None, x: Tensor | None, meta: PoolMeta, reduction: Reduction
    ) -> Tensor:
        ctx.meta = meta
        ctx.reduction = reduction
        ctx.save_for_backward(aux, x)
        return backward(meta, grad_y, aux, reduction, x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None]:
        aux, x = ctx.saved_tensors
        if ctx.reduction.mode is Mode.MAX:
            pooled = _winners_of(grads[0], aux, ctx.meta)
        elif x is None:
            pooled = _apply(grads[0], ctx.meta, replace(ctx.reduction, empty_value=None))
            if ctx.reduction.mode is Mode.AVG:  # of nothing it is NaN, yet nothing flows through it
                pooled = pooled.masked_fill(ctx.meta.count == 0, 0)
        else:
            pooled = _pooled_without(x, grads[0], ctx.meta, ctx.reduction)
        return pooled, None, None, None, None


def _apply(x: Tensor, meta: PoolMeta, reduction: Reduction) -> Tensor:
    y: Tensor = KNNPoolFunction.apply(x, meta, reduction, False)  # type: ignore[no-untyped-call]
    return y


def _pooled_without(x: Tensor, values: Tensor, meta: PoolMeta, reduction: Reduction) -> Tensor:
    """``values`` pooled where ``x`` is not NaN; a NaN among those is as good as any value."""
    dtype = accumulate_dtype(values.dtype)
    pooled = _apply(values.masked_fill(x.isnan(), 0).to(dtype), meta, undivided(reduction))
    size = divisor_without_nan(meta, x, reduction, dtype)
    if size is not None:
        pooled = pooled / size.masked_fill(size == 0, torch.inf)  # an average of nothing
    return pooled.to(values.dtype)


def _winners_of(x: Tensor, aux: Tensor, meta: PoolMeta) -> Tensor:
    """``x`` at the node in the winning slot of each column ``[..., Nout]``; 0 for an empty column."""
    if meta.k == 0 or meta.nin == 0:
        return x.new_zeros((*x.shape[:-1], meta.nout))  # no entry to look at
    empty = meta.count == 0
    slots = aux.long().masked_fill(empty, 0)
    table = meta.indices_i64.masked_fill(meta.indices_i64 >= meta.nin, 0)
    nodes = table[slots, torch.arange(meta.nout, device=x.device)]
    return x.gather(-1, nodes).masked_fill(empty, 0.0)
