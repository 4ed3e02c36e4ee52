"""Pooling as a formula in plain torch: a gather and a reduction, differentiable in every way that torch knows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

TABLE = torch.tensor([[0, 9, 3, 2], [1, 9, 9, 2], [4, 9, 0, 3]])
"""With pads, an empty column, and an input that stands twice in a column."""
NIN = 5
FILLED = [0, 2, 3]
"""Its columns that are not empty."""

CASES = [
    pytest.param(mode, nan, normalize, id=f"{mode}-{nan}" + "-normalized" * normalize)
    for mode in ("max", "avg", "sum", "weighted")
    for nan in ("omit", "propagate")
    for normalize in ((False, True) if mode == "weighted" else (False,))
]
any_case = pytest.mark.parametrize(("mode", "nan", "normalize"), CASES)
any_mode = pytest.mark.parametrize("mode", ["max", "avg", "sum", "weighted"])


def options(mode: str, nan: str | None = None, normalize: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """Keyword options for :data:`TABLE`."""
    if mode != "weighted":
        return {"nan": nan}
    weights = torch.rand(TABLE.shape, dtype=dtype, generator=torch.Generator().manual_seed(1)) + 0.5
    return {"nan": nan, "weights": weights, "normalize_weights": normalize}


def values(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Far apart, so that no small step changes a winner."""
    size = torch.Size(shape).numel()
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return (order.reshape(shape).to(dtype) - size // 2) / 4


def pooled(
    x: Tensor,
    indices: Tensor,
    mode: str,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> Tensor:
    """What ``pool_function`` promises."""
    indices = indices.to(x.device)
    real = indices < x.shape[-1]
    gathered = x[..., indices.clamp(max=x.shape[-1] - 1)]
    omit = nan == "omit" or (nan is None and mode == "max")
    used = real & ~gathered.isnan() if omit else real.expand(gathered.shape)
    if mode == "max":
        y = torch.where(used, gathered, -torch.inf).max(-2).values
    else:
        weight = torch.ones_like(real, dtype=x.dtype) if weights is None else weights.to(x).where(real, 0)
        y = (torch.where(used, gathered, 0) * weight).sum(-2)
        size = torch.where(used, weight, 0).sum(-2)
        if mode == "avg":
            y = torch.where(size == 0, torch.nan, y / size.where(size != 0, 1))
        elif normalize_weights:
            y = y / (size + 1e-8)
    return y if empty_value is None else torch.where(real.any(0), y, empty_value)
