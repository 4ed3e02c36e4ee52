"""Pooling in plain torch, as people write it: gather to ``[B, C, K, Nout]``, then reduce."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.runtime.weights import EPSILON
from knnpool_gen.vocabulary import Mode

PoolingFunction = Callable[[Tensor], Tensor]


def torch_baseline(table: BenchTable, mode: Mode, weights: Tensor | None, dtype: torch.dtype) -> PoolingFunction:
    """A function of ``x`` ``[B, C, Nin]`` in ``dtype``, differentiable, on the device of the table's indices.

    ``index_select`` is the quickest way in both directions: gathering with ``x[..., indices]`` takes ten times as long
    backward. Pads read one more node that changes nothing; a table without pads needs no such copy of ``x``. Weighted
    sums are divided by the sum of their weights.
    """
    nin, shape = table.nin, (table.k, table.nout)
    real = table.indices < nin
    padded = not bool(real.all())
    neutral = -torch.inf if mode is Mode.MAX else 0.0
    index = table.indices.clamp(max=nin).flatten()
    share: Tensor | None = None
    if mode is Mode.AVG:
        share = real.sum(0).to(dtype).reciprocal()
    elif mode is Mode.WEIGHTED and weights is not None:
        used = weights.masked_fill(~real, 0)
        share = (used / (used.sum(0) + EPSILON)).to(dtype)

    def pool(x: Tensor) -> Tensor:
        if padded:
            x = torch.nn.functional.pad(x, (0, 1), value=neutral)
        gathered = x.index_select(-1, index).view(*x.shape[:-1], *shape)
        if mode is Mode.MAX:
            return gathered.amax(-2)
        if mode is Mode.SUM or share is None:
            return gathered.sum(-2)
        return (gathered * share).sum(-2) if mode is Mode.WEIGHTED else gathered.sum(-2) * share

    return pool
