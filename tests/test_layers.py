"""Layers like fovi's, pooled in their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from knnpool_gen import InvalidArgumentError, optimized_pool_forward, pool_function
from tables import adversarial_values, assert_same_bits, real_tables

TABLE = [[0, 9, 3, 2], [1, 9, 9, 2], [4, 9, 0, 3]]
NIN = 5


class Layer(nn.Module):
    """What fovi's KNNPoolingLayer shows of itself."""

    def __init__(self, mode: str, weights: Tensor | None = None) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("knn_indices_pad_token", torch.tensor(TABLE))
        self.knn_pad_token_val = NIN
        if weights is not None:
            self.register_buffer("gaussian_weights", weights)


def gaussian(x: Tensor, table: Tensor, nin: int, weights: Tensor) -> Tensor:
    """The layer's formula on gathered values, the pads left out of the sum of the weights."""
    real = table < nin
    padded = torch.cat([x, x.new_zeros((*x.shape[:-1], 1))], -1)
    values = padded[..., table.clamp(max=nin)]
    used = weights.masked_fill(~real, 0).to(x.dtype)
    return (values * used).sum(-2) / (used.sum(0) + 1e-8)


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_a_layer_is_pooled_as_its_table(mode: str) -> None:
    layer = Layer(mode)
    x = adversarial_values(7, NIN, torch.float32).requires_grad_()
    y = optimized_pool_forward(layer, x)
    assert y is not None
    expected = pool_function(x, torch.tensor(TABLE), mode)
    assert_same_bits(y, expected)
    grad_y = torch.arange(28.0).reshape(7, 4)
    assert_same_bits(*torch.autograd.grad(y, x, grad_y), *torch.autograd.grad(expected, x, grad_y))


def test_a_gaussian_layer() -> None:
    weights = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    layer = Layer("gaussian", weights)
    x = torch.randn(2, 3, NIN, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = optimized_pool_forward(layer, x)
    assert y is not None
    expected = gaussian(x, torch.tensor(TABLE), NIN, weights)
    torch.testing.assert_close(y, expected, rtol=1e-14, atol=1e-14)
    assert y[..., 1].tolist() == [[0.0] * 3] * 2
    grad_y = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(
        torch.autograd.grad(y, x, grad_y), torch.autograd.grad(expected, x, grad_y), rtol=1e-14, atol=1e-14
    )
    layer.gaussian_weights.mul_(torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))
    again = optimized_pool_forward(layer, x)
    assert again is not None
    torch.testing.assert_close(
        again, gaussian(x, torch.tensor(TABLE), NIN, layer.gaussian_weights), rtol=1e-14, atol=1e-14
    )


def test_fovis_gaussian_sampler(pytestconfig: pytest.Config) -> None:
    (table,) = (t for t in real_tables() if t.name.startswith("sampler64"))
    with np.load(pytestconfig.rootpath / "tests" / "data" / "fovi_tables.npz") as arrays:
        weights = torch.from_numpy(arrays["sampler64__weights"])
    layer = Layer("gaussian", weights)
    layer.knn_indices_pad_token = table.indices
    layer.knn_pad_token_val = table.nin
    x = torch.rand(1, 3, table.nin, generator=torch.Generator().manual_seed(0))
    y = optimized_pool_forward(layer, x)
    assert y is not None
    torch.testing.assert_close(y.double(), gaussian(x.double(), table.indices, table.nin, weights), rtol=1e-6, atol=0)


def derived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every derivation of tables from weights."""
    from knnpool_gen.runtime import weights as module

    calls: list[int] = []
    derive = module._derive

    def counted(*args: Any) -> Any:
        calls.append(1)
        return derive(*args)

    monkeypatch.setattr(module, "_derive", counted)
    return calls


def test_weights_of_a_layer_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = derived(monkeypatch)
    layer = Layer("gaussian", torch.rand(3, 4))
    for _ in range(3):
        assert optimized_pool_forward(layer, torch.ones(2, NIN, requires_grad=True)) is not None
    assert len(calls) == 1


def test_weights_that_are_learnt_are_left_to_the_layer() -> None:
    """Their gradient must not be cut without a word; where none is recorded there is none to lose."""
    layer = Layer("gaussian", torch.ones(3, 4))
    layer.gaussian_weights.requires_grad_()
    assert optimized_pool_forward(layer, torch.ones(2, NIN)) is None
    with torch.no_grad():
        y = optimized_pool_forward(layer, torch.ones(2, NIN))
    assert y is not None
    assert y.tolist() == [[1.0, 0.0, 1.0, 1.0]] * 2


def test_what_is_left_to_the_layer() -> None:
    x = torch.ones(2, NIN)
    for mode in ("median", "", None, 3):
        assert optimized_pool_forward(Layer(mode), x) is None  # type: ignore[arg-type]
    assert optimized_pool_forward(Layer("gaussian"), x) is None  # no weights
    assert optimized_pool_forward(Layer("max"), x.long()) is None
    assert optimized_pool_forward(Layer("max"), x.cfloat()) is None


def test_what_is_a_mistake() -> None:
    with pytest.raises(InvalidArgumentError, match="Nin = 5"):
        optimized_pool_forward(Layer("max"), torch.ones(2, NIN + 1))
    with pytest.raises(InvalidArgumentError, match=r"weights have shape \[4, 3\]"):
        optimized_pool_forward(Layer("gaussian", torch.ones(4, 3)), torch.ones(2, NIN))
