"""Pooling as an autograd function, differentiable as often as one likes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knnpool_gen.pooling import pool_backward, pool_forward
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.vocabulary import Mode


class KNNPoolFunction(torch.autograd.Function):
    """``KNNPoolFunction.apply(x, meta, mode, need_aux) -> y``.

    Keeps the plan and, for max, the winning slots (one byte an output); neither ``x`` nor anything of size
    ``[.., K, Nout]``. Autocast leaves it alone: the dtype is that of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, meta: PoolMeta, mode: str, need_aux: bool) -> Tensor:
        """Pool; arguments and errors as in :func:`knnpool_gen.pool_forward`."""
        y, aux = pool_forward(meta, x, mode, need_aux=need_aux)
        ctx.meta = meta
        ctx.mode = mode
        ctx.save_for_backward(aux)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """The gradient of ``x``."""
        (aux,) = ctx.saved_tensors
        return _KNNPoolGradient.apply(grads[0], aux, ctx.meta, ctx.mode), None, None, None  # type: ignore[no-untyped-call]


class _KNNPoolGradient(torch.autograd.Function):
    """The gradient of pooling. It is linear in ``grad_y``, so its own gradient is the pooling it transposes."""

    @staticmethod
    def forward(ctx: Any, grad_y: Tensor, aux: Tensor | None, meta: PoolMeta, mode: str) -> Tensor:
        ctx.meta = meta
        ctx.mode = mode
        ctx.save_for_backward(aux)
        return pool_backward(meta, grad_y, aux, mode)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (aux,) = ctx.saved_tensors
        if ctx.mode == Mode.MAX:
            return _winners_of(grads[0], aux, ctx.meta), None, None, None
        # An empty column averages to NaN, yet nothing flows through it.
        average: Tensor = KNNPoolFunction.apply(grads[0], ctx.meta, ctx.mode, False)  # type: ignore[no-untyped-call]
        return average.masked_fill(ctx.meta.count == 0, 0.0), None, None, None


def _winners_of(x: Tensor, aux: Tensor, meta: PoolMeta) -> Tensor:
    """``x`` at the node in the winning slot of each column ``[..., Nout]``; 0 for an empty column."""
    empty = meta.count == 0
    slots = aux.long().masked_fill(empty, 0)
    table = meta.indices_i64.masked_fill(meta.indices_i64 >= meta.nin, 0)
    nodes = table[slots, torch.arange(meta.nout, device=x.device)]
    return x.gather(-1, nodes).masked_fill(empty, 0.0)
