"""Real layers of fovi with and without these kernels, as checks that run on any device."""

from __future__ import annotations

from typing import Any

import torch
from fovi.arch.knn import KNNPoolingLayer
from fovi.sensing.coords import SamplingCoords
from torch import Tensor, nn

from knnpool_gen.integrations import fovi

MODES = ("max", "avg", "sum", "gaussian")
ROUNDING = {"rtol": 2e-6, "atol": 2e-6}
"""Whatever the dtype of the input, the layer normalises its gaussian weights in float32."""
OUTSIDE = 7
"""An output node that lies outside the field of view: its neighbours are all pads."""


def coordinates(device: str = "cpu") -> tuple[SamplingCoords, SamplingCoords, SamplingCoords]:
    levels = tuple(SamplingCoords(16, 0.5, resolution, device=device) for resolution in (16, 8, 4))
    levels[1].valid_mask = torch.ones(len(levels[1]), dtype=torch.bool, device=device)
    levels[1].valid_mask[OUTSIDE] = False
    return levels


def layer(mode: str, device: str = "cpu", **options: Any) -> KNNPoolingLayer:
    x_coordinates, y_coordinates, _ = coordinates(device)
    return KNNPoolingLayer(9, x_coordinates, y_coordinates, mode=mode, device=device, **{"gauss_sigma": 0.4, **options})


class Network(nn.Sequential):
    """Two poolings between channels that are mixed, as in fovi's networks; in float64, so that rounding stays small."""

    def __init__(self, mode: str, device: str = "cpu") -> None:
        sizes = coordinates(device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            super().__init__(
                nn.Conv1d(3, 8, 1),
                layer(mode, device),
                nn.GELU(),
                nn.Conv1d(8, 8, 1),
                KNNPoolingLayer(5, sizes[1], sizes[2], mode=mode, device=device, sample_cortex=False),
            )
        self.to(device, torch.float64)


def values(device: str, nodes: int, dtype: torch.dtype = torch.float32, nan: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, nodes, generator=generator)
    if nan:
        x[torch.rand(x.shape, generator=generator) < 0.2] = torch.nan
    return x.to(device, dtype).requires_grad_()


def trained(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What comes out, and the gradients of all that is learnt and of ``x``."""
    y = model(x)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)
    return [y.detach(), *torch.autograd.grad(y, [*model.parameters(), x], grad_y)]


def check_a_network(mode: str, device: str) -> None:
    model = Network(mode, device)
    x = values(device, model[1].knn_pad_token_val, torch.float64)
    before = trained(model, x)
    with fovi.enabled():
        during = trained(model, x)
        assert {model[i]._last_knn_pool_backend for i in (1, 4)} == {"knnpool_gen"}
    torch.testing.assert_close(during, before, **ROUNDING)
    after = trained(model, x)
    assert "knnpool_gen" not in {model[i]._last_knn_pool_backend for i in (1, 4)}
    torch.testing.assert_close(after, before)


def check_a_layer(mode: str, dtype: torch.dtype, device: str) -> None:
    """Pads, NaN, and an output outside the field of view; the dtype that comes out too."""
    pool = layer(mode, device)
    assert not pool._knn_all_outputs_valid
    x = values(device, pool.knn_pad_token_val, dtype, nan=True)
    y, grad_x = trained(pool, x)
    with fovi.enabled():
        pooled, pooled_grad_x = trained(pool, x)
    assert pooled.dtype == y.dtype
    assert (pooled[..., OUTSIDE] == 0).all()
    # Half precision is summed in half by some formulas of the layer, in float32 here.
    tolerance = ROUNDING if dtype.itemsize > 2 else {"rtol": 2**-7, "atol": 2**-7}
    torch.testing.assert_close(pooled, y, equal_nan=True, **tolerance)
    torch.testing.assert_close(pooled_grad_x, grad_x, **tolerance)


def check_neighbours_that_are_all_nan(mode: str, device: str) -> None:
    pool = layer(mode, device)
    x = values(device, pool.knn_pad_token_val).detach().fill_(torch.nan)
    y = pool(x)
    with fovi.enabled():
        torch.testing.assert_close(pool(x), y, equal_nan=True)
