"""Layers in training on the device."""

from __future__ import annotations

import copy

import pytest
import torch

from formulas import pooled
from knnpool_gen import KNNPool, clear_pool_cache
from tables import DTYPES, assert_same_bits
from training import CHECKS, batch, loss, network, table

# Of torch's own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", CHECKS)
def test_training(name: str) -> None:
    CHECKS[name]("cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["max", "avg", "sum", "weighted"])
def test_the_bits_are_those_of_the_cpu(mode: str, dtype: torch.dtype) -> None:
    weights = torch.rand(5, 20, generator=torch.Generator().manual_seed(2)) if mode == "weighted" else None
    pool = KNNPool(table(40, 20), 40, mode, weights=weights, normalize_weights=mode == "weighted")
    there = copy.deepcopy(pool).cuda().to(dtype)
    x = batch().detach().to(dtype)
    leaf, leaf_there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    y, y_there = pool(leaf), there(leaf_there)
    grad_y = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    y.backward(grad_y)
    y_there.backward(grad_y.cuda())
    assert_same_bits(y_there.detach(), y.detach())
    assert_same_bits(leaf_there.grad, leaf.grad)


def test_captured_after_prepare() -> None:
    """Plan and weights are built ahead; the kernels are loaded inside the capture."""
    clear_pool_cache()
    weights = torch.rand(5, 20, device="cuda")
    pool = KNNPool(table(40, 20), 40, "weighted", weights=weights, normalize_weights=True).cuda()
    pool.prepare()
    x = torch.randn(6, 3, 40, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pool(x)
    for seed in range(3):
        x.copy_(torch.randn(6, 3, 40, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.testing.assert_close(y, pooled(x, pool.indices, "weighted", weights=weights, normalize_weights=True))


@pytest.mark.parametrize("return_indices", [False, True])
def test_captured_max(return_indices: bool) -> None:
    clear_pool_cache()
    pool = KNNPool(table(40, 20), 40, "max", return_indices=return_indices).cuda()
    pool.prepare()
    x = torch.randn(6, 3, 40, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = pool(x)
    x.copy_(torch.randn(6, 3, 40, generator=torch.Generator().manual_seed(5)))
    graph.replay()
    y = result[0] if return_indices else result
    assert_same_bits(y, pooled(x, pool.indices, "max"))
    if return_indices:
        assert_same_bits(x.gather(-1, result[1]), y)


def test_a_model_compiled_for_the_device() -> None:
    model = network(KNNPool, "cuda")
    x = batch("cuda")
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    grads = [torch.autograd.grad(loss(call(x)), [*model.parameters(), x]) for call in (compiled, model)]
    torch.testing.assert_close(*grads)
    torch._dynamo.reset()
