"""Pooling in plain torch, on any device: the oracle of every kernel, and what CPU tensors run through.

Arguments are trusted here; :mod:`knnpool_gen.functional` checks them. Sums are in the accumulation type,
float32 (float64 for float64), in a fixed order with one rounding at the end, so the bits are those of the
kernels. Loops run over slots (forward) and over the readers of a node (backward): whatever K is, memory stays
in the order of ``rows * Nout`` and ``rows * Nin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.vocabulary import Mode


@torch.no_grad()
def reference_forward(meta: PoolMeta, x: Tensor, mode: Mode, need_aux: bool = True) -> tuple[Tensor, Tensor | None]:
    """Reduce every column of the table.

    Args:
        meta: the plan, on the device of ``x``.
        x: ``[..., Nin]``, float16, bfloat16, float32 or float64, any strides.
        mode: max or avg.
        need_aux: whether max is to say which slots won.

    Returns:
        ``y`` ``[..., Nout]`` in the dtype of ``x``, and ``aux``: uint8 ``[..., Nout]`` for max if asked for,
        otherwise None. Both contiguous.
    """
    if mode is Mode.MAX:
        return _max_forward(meta, x, need_aux)
    if mode is Mode.AVG:
        return _avg_forward(meta, x), None
    raise _not_yet(mode)


@torch.no_grad()
def reference_backward(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, mode: Mode) -> Tensor:
    """Send the gradient of ``y`` back to the input nodes.

    Args:
        meta: the plan of the forward, on the device of ``grad_y``.
        grad_y: ``[..., Nout]``, any strides.
        aux: what the forward gave for max, of the shape of ``grad_y``; not read for avg.
        mode: max or avg.

    Returns:
        ``[..., Nin]``, contiguous, in the dtype of ``grad_y``. A node that nobody reads gets 0.
    """
    if mode is Mode.MAX:
        return _sum_over_readers(meta, grad_y, _max_share(meta, grad_y, aux))
    if mode is Mode.AVG:
        return _sum_over_readers(meta, grad_y, _avg_share(meta, grad_y))
    raise _not_yet(mode)


def _not_yet(mode: Mode) -> InvalidArgumentError:
    return InvalidArgumentError(f"mode {mode.value!r} is not supported yet, only 'max' and 'avg'")


# Forward: one function a mode, over the slots of a table.


def _max_forward(meta: PoolMeta, x: Tensor, need_aux: bool) -> tuple[Tensor, Tensor | None]:
    y = x.new_full((*x.shape[:-1], meta.nout), -torch.inf)
    aux = meta.first_slot.repeat(*x.shape[:-1], 1) if need_aux else None
    for k, real, values in _slots(meta, x):
        wins = (values > y) & real  # strict: the first of equals stays, and a NaN never wins
        y = torch.where(wins, values, y)
        if aux is not None:
            aux = torch.where(wins, k, aux)
    return y, aux


def _avg_forward(meta: PoolMeta, x: Tensor) -> Tensor:
    total = x.new_zeros((*x.shape[:-1], meta.nout), dtype=_accumulation_dtype(x))
    for _, real, values in _slots(meta, x):
        total += values.to(total.dtype).where(real, 0)
    return (total / meta.count.to(total.dtype)).to(x.dtype)


def _slots(meta: PoolMeta, x: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each slot: its number, where it is no pad ``[Nout]``, its values ``[..., Nout]`` (any at pads)."""
    if meta.nin == 0:
        return  # only pads, and no value to read in their place
    for k in range(meta.k):
        real = meta.indices[k] < meta.nin
        yield k, real, _take(x, meta.indices_i64[k].where(real, 0))


# Backward: what the reader of a node gives to it, one function a mode.

Share = Callable[[Tensor, Tensor], Tensor]
"""From slots and output nodes, both int64 ``[E]``, to what each gives to the node it reads: ``[..., E]``."""


def _max_share(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None) -> Share:
    if aux is None:
        raise InvalidArgumentError("the backward of 'max' needs the aux that the forward gave")
    # Selected, not multiplied by 0 or 1: a NaN or inf is to reach its owner and nobody else.
    return lambda k, n: _take(grad_y, n).where(_take(aux, n) == k.to(aux.dtype), 0)


def _avg_share(meta: PoolMeta, grad_y: Tensor) -> Share:
    dtype = _accumulation_dtype(grad_y)
    share = grad_y.to(dtype) / meta.count.to(dtype)
    return lambda k, n: _take(share, n)


def _sum_over_readers(meta: PoolMeta, grad_y: Tensor, share: Share) -> Tensor:
    """Sum up for each node what its readers give, in the order of the reverse table."""
    degree = meta.rev_rowptr.diff()
    # With the most read nodes first, those that have a reader number d are the first width[d].
    order = degree.argsort(descending=True, stable=True)
    width = (meta.nin - degree.bincount().cumsum(0)).tolist()
    first = meta.rev_rowptr[:-1][order]
    total = grad_y.new_zeros((*grad_y.shape[:-1], meta.nin), dtype=_accumulation_dtype(grad_y))
    for d, nodes in enumerate(width):
        packed = meta.rev_kn[first[:nodes] + d].to(torch.int64) & 0xFFFFFFFF
        total[..., :nodes] += share(packed >> 24, packed & 0xFFFFFF)
    return torch.empty_like(total).index_copy_(-1, order, total).to(grad_y.dtype)


def _take(values: Tensor, nodes: Tensor) -> Tensor:
    """``values[..., nodes]``; on a CPU, gather with an expanded index is several times faster at it."""
    return values.gather(-1, nodes.expand(*values.shape[:-1], -1))


def _accumulation_dtype(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype is torch.float64 else torch.float32
