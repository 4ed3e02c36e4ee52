"""Pooling as an autograd function: the short way from a tensor to its pooled values and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knnpool_gen import library
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.pooling import backward, check_input, forward
from knnpool_gen.reduction import Reduction, make_reduction
from knnpool_gen.runtime.aux_layout import AuxLayout, unblock_aux
from knnpool_gen.runtime.execute import aux_layout
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
        if isinstance(mode, Reduction):  # made for x, which has been checked
            reduction = mode
        else:
            check_input(meta, x)
            reduction = make_reduction(meta, x.dtype, mode)
        layout = aux_layout(meta, x, reduction) if need_aux else AuxLayout.ROWS
        y, aux = forward(meta, x, reduction, need_aux, layout=layout)
        ctx.meta = meta
        ctx.layout = layout
        ctx.shape = y.shape
        ctx.reduction = reduction
        ctx.save_for_backward(aux, x if reduction.backward_reads_x else None)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        """The gradient of ``x``."""
        aux, x = ctx.saved_tensors
        if aux is None and ctx.reduction.mode is Mode.MAX:
            raise InvalidArgumentError("the backward of 'max' needs the winning slots: apply with need_aux=True")
        grad_y = grads[0]
        if torch.is_grad_enabled() or library.watched(grad_y) or torch._C._functorch.is_legacy_batchedtensor(grad_y):
            if ctx.layout is AuxLayout.BLOCKS:
                aux = unblock_aux(aux, ctx.shape)
            return library.pull_back(grad_y, aux, x, ctx.meta, ctx.reduction), None, None, None
        return backward(ctx.meta, grad_y, aux, ctx.reduction, x, layout=ctx.layout), None, None, None


# What torch's own `apply` leads to, without its look for default arguments and for transforms: 1.5 µs less a call.
_record: Any = super(torch.autograd.Function, KNNPoolFunction).apply


def pool_recorded(x: Tensor, meta: PoolMeta, reduction: Reduction) -> Tensor:
    """``KNNPoolFunction.apply`` with arguments that are known to be good, where no transform of functorch is active.

    ``x`` is none of its wrappers either, not even one that has left its transform.
    """
    y: Tensor = _record(x, meta, reduction, True)
    return y
