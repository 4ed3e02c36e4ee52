"""Pooling in plain torch, on any device: the oracle of every kernel, and what CPU tensors run through.

Arguments are trusted here; :mod:`knnpool_gen.pooling` checks them. Sums are in the accumulation type,
float32 (float64 for float64), in a fixed order with one rounding at the end, so the bits are those of the
kernels. Loops run over slots (forward) and over the readers of a node (backward): whatever K is, memory stays
in the order of ``rows * Nout`` and ``rows * Nin``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.reduction import Reduction, accumulate_dtype
from knnpool_gen.runtime.plan import PoolMeta, aux_dtype
from knnpool_gen.runtime.weights import EPSILON, PoolWeights
from knnpool_gen.vocabulary import Mode


@torch.no_grad()
def reference_forward(
    meta: PoolMeta, x: Tensor, reduction: Reduction, need_aux: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Reduce every column of the table.

    Args:
        meta: the plan, on the device of ``x``.
        x: ``[..., Nin]``, float16, bfloat16, float32 or float64, any strides.
        reduction: what to do; its ``empty_value`` is not looked at.
        need_aux: whether max is to say which slots won.

    Returns:
        ``y`` ``[..., Nout]`` in the dtype of ``x``, and ``aux`` ``[..., Nout]`` for max if asked for,
        otherwise None. Both contiguous.
    """
    if reduction.mode is Mode.MAX:
        return _max_forward(meta, x, reduction.omit_nan, need_aux)
    total, size = _sums(meta, x, reduction)
    if reduction.mode is Mode.AVG:
        total = total / size
    elif reduction.normalize:
        total = total / (size + EPSILON)
    return total.to(x.dtype), None


@torch.no_grad()
def reference_backward(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, reduction: Reduction) -> Tensor:
    """Send the gradient of ``y`` back to the input nodes, as if no input were NaN.

    Args:
        meta: the plan of the forward, on the device of ``grad_y``.
        grad_y: ``[..., Nout]``, any strides.
        aux: what the forward gave for max, of the shape of ``grad_y``; not read otherwise.
        reduction: that of the forward.

    Returns:
        ``[..., Nin]``, contiguous, in the dtype of ``grad_y``. A node that nobody reads gets 0.
    """
    shares = {Mode.MAX: _max_share, Mode.AVG: _avg_share, Mode.SUM: _sum_share, Mode.WEIGHTED: _weighted_share}
    return _sum_over_readers(meta, grad_y, shares[reduction.mode](meta, grad_y, aux, reduction))


# Forward, over the slots of a table.


def _max_forward(meta: PoolMeta, x: Tensor, omit_nan: bool, need_aux: bool) -> tuple[Tensor, Tensor | None]:
    y = x.new_full((*x.shape[:-1], meta.nout), -torch.inf)
    # Of its own memory: the plan's table must not end up in the caller's hands.
    aux = meta.first_slot.expand(y.shape).clone() if need_aux else None
    for k, real, values in _slots(meta, x):
        wins = (values > y) & real  # strict: the first of equals stays, and a NaN never wins
        if not omit_nan:
            wins |= values.isnan() & ~y.isnan() & real
        y = torch.where(wins, values, y)
        if aux is not None:
            aux = torch.where(wins, k, aux)
    return y, aux


def _sums(meta: PoolMeta, x: Tensor, reduction: Reduction) -> tuple[Tensor, Tensor]:
    """The sum of each column, and what it is to be divided by: the number, or the weights, of what was added."""
    dtype = accumulate_dtype(x.dtype)
    total = x.new_zeros((*x.shape[:-1], meta.nout), dtype=dtype)
    if reduction.weights is None and not reduction.omit_nan:
        for _, real, values in _slots(meta, x):
            total += values.to(dtype).where(real, 0)
        return total, meta.count.to(dtype)
    size = torch.zeros_like(total)
    for k, real, values in _slots(meta, x):
        used = real & ~values.isnan() if reduction.omit_nan else real
        weight = size.new_ones(()) if reduction.weights is None else reduction.weights.weights[k]
        total += (values.to(dtype) * weight).where(used, 0)
        size += weight.where(used, 0)
    return total, size


def _slots(meta: PoolMeta, x: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each slot: its number, where it is no pad ``[Nout]``, its values ``[..., Nout]`` (any at pads)."""
    if meta.nin == 0:
        return  # only pads, and no value to read in their place
    for k in range(meta.k):
        real = meta.indices[k] < meta.nin
        yield k, real, _take(x, meta.indices_i64[k].where(real, 0))


# Backward: what the reader of a node gives to it, one function a mode.

Share = Callable[[Tensor], Tensor]
"""From entries of the reverse table, as int64 ``[E]`` positions, to what each gives to its node: ``[..., E]``."""


def _max_share(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, reduction: Reduction) -> Share:
    if aux is None:
        raise InvalidArgumentError("the backward of 'max' needs the aux that the forward gave")

    def share(entries: Tensor) -> Tensor:
        k, n = meta.unpack(meta.rev_kn[entries])
        # Selected, not multiplied by 0 or 1: a NaN or inf is to reach its owner and nobody else.
        return _take(grad_y, n).where(_take(aux, n) == k.to(aux_dtype(meta.k)), 0)

    return share


def _avg_share(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, reduction: Reduction) -> Share:
    dtype = accumulate_dtype(grad_y.dtype)
    return _sum_share(meta, grad_y.to(dtype) / meta.count.to(dtype), aux, reduction)


def _sum_share(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, reduction: Reduction) -> Share:
    return lambda entries: _take(grad_y, meta.unpack(meta.rev_kn[entries])[1])


def _weighted_share(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, reduction: Reduction) -> Share:
    rev_weights = reverse_weights(reduction)
    share = _sum_share(meta, grad_y.to(rev_weights.dtype), aux, reduction)
    return lambda entries: share(entries) * rev_weights[entries]


def reverse_weights(reduction: Reduction) -> Tensor:
    """What each reader's gradient is multiplied by: its weight, normalised if the forward did that."""
    weights = reduction.weights
    if not isinstance(weights, PoolWeights):
        raise InvalidArgumentError("mode 'weighted' needs weights")
    return weights.rev_normalized if reduction.normalize else weights.rev_weights


def _sum_over_readers(meta: PoolMeta, grad_y: Tensor, share: Share) -> Tensor:
    """Sum up for each node what its readers give, in the order of the reverse table."""
    degree = meta.rev_rowptr.diff()
    # With the most read nodes first, those that have a reader number d are the first width[d].
    order = degree.argsort(descending=True, stable=True)
    width = (meta.nin - degree.bincount().cumsum(0)).tolist()
    first = meta.rev_rowptr[:-1][order].to(torch.int64)
    total = grad_y.new_zeros((*grad_y.shape[:-1], meta.nin), dtype=accumulate_dtype(grad_y.dtype))
    for d, nodes in enumerate(width):
        total[..., :nodes] += share(first[:nodes] + d)
    return torch.empty_like(total).index_copy_(-1, order, total).to(grad_y.dtype)


def _take(values: Tensor, nodes: Tensor) -> Tensor:
    """``values[..., nodes]``; on a CPU, gather with an expanded index is several times faster at it."""
    return values.gather(-1, nodes.expand(*values.shape[:-1], -1))
