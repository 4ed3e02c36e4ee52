"""What is derived from weights: when it is made anew, when it goes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from knnpool_gen import clear_pool_cache, pool_forward, pool_function, pool_meta_from_indices
from knnpool_gen.errors import UnsupportedTypeError
from knnpool_gen.runtime import weights as cached
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.runtime.weights import PoolWeights, prepare_weights

NAN = float("nan")


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    cached.clear_weights()
    yield
    cached.clear_weights()


def plan(nin: int = 3) -> PoolMeta:
    return pool_meta_from_indices(torch.tensor([[0, 1], [2, 9]]), nin)


def tensors_of(prepared: PoolWeights) -> list[Tensor]:
    return [prepared.weights, prepared.rev_weights, prepared.rev_normalized]


def kept() -> int:
    """Weights that something is kept for, over all plans."""
    return sum(len(tables) for tables in cached._prepared.values())


def test_by_hand() -> None:
    prepared = prepare_weights(plan(), torch.tensor([[2.0, 3.0], [6.0, NAN]]), torch.float64)
    assert prepared.weights.tolist() == [[2.0, 3.0], [6.0, 0.0]]
    assert prepared.rev_weights.tolist() == [2.0, 3.0, 6.0]
    assert prepared.rev_normalized.tolist() == pytest.approx([0.25, 1.0, 0.75], rel=1e-8)
    assert {tensor.dtype for tensor in tensors_of(prepared)} == {torch.float64}
    assert all(tensor.is_contiguous() for tensor in tensors_of(prepared))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_any_floating_point_dtype_and_strides(dtype: torch.dtype) -> None:
    weights = torch.tensor([[2.0, 3.0], [6.0, 1.0]], dtype=dtype)
    x = torch.tensor([1.0, 10.0, 100.0])
    for view in (weights, weights.T.contiguous().T, torch.stack([weights, weights], -1)[..., 1]):
        assert pool_function(x, torch.tensor([[0, 1], [2, 9]]), "weighted", weights=view).tolist() == [602.0, 30.0]
    expanded = weights[:1].expand(2, -1)
    assert pool_function(x, torch.tensor([[0, 1], [2, 9]]), "weighted", weights=expanded).tolist() == [202.0, 30.0]


def test_derived_once() -> None:
    meta, weights = plan(), torch.ones(2, 2)
    prepared = prepare_weights(meta, weights, torch.float32)
    assert prepare_weights(meta, weights, torch.float32) is prepared
    assert prepare_weights(meta, weights, torch.float64) is not prepared
    assert prepare_weights(meta, weights, torch.float32) is prepared
    assert prepare_weights(meta, weights.clone(), torch.float32) is not prepared
    assert kept() == 2  # the clone is gone


def test_no_memory_is_shared_with_the_weights() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 1], [2, 1]]), 3)
    for dtype in (torch.float32, torch.float64):
        weights = torch.ones(2, 2, dtype=dtype)
        prepared = prepare_weights(meta, weights, dtype)
        weights.fill_(7)
        assert prepared.weights.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def in_place(weights: Tensor) -> None:
    weights[0, 0] = 5


def through_a_view(weights: Tensor) -> None:
    weights.view(-1)[0] = 5


def through_detach(weights: Tensor) -> None:
    weights.detach()[0, 0] = 5


def new_data(weights: Tensor) -> None:
    weights.data = torch.tensor([[5.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize("change", [in_place, through_a_view, through_detach, new_data], ids=lambda f: f.__name__)
@pytest.mark.parametrize("normalize", [False, True])
def test_changed_weights_are_noticed(change: Callable[[Tensor], None], normalize: bool) -> None:
    table = torch.tensor([[0, 1], [2, 9]])
    weights = torch.ones(2, 2)
    x = torch.tensor([1.0, 10.0, 100.0], requires_grad=True)
    results = []
    for step in range(3):
        y = pool_function(x, table, "weighted", weights=weights, normalize_weights=normalize)
        (grad_x,) = torch.autograd.grad(y.sum(), x)
        results.append((y.tolist(), grad_x.tolist()))
        if step == 0:
            change(weights)
    if normalize:
        assert results[0] == ([50.5, 10.0], [0.5, 1.0, 0.5])
        assert results[1] == ([17.5, 10.0], [torch.tensor(5 / 6).item(), 1.0, torch.tensor(1 / 6).item()])
    else:
        assert results[0] == ([101.0, 10.0], [1.0, 1.0, 1.0])
        assert results[1] == ([105.0, 10.0], [5.0, 1.0, 1.0])
    assert results[2] == results[1]


def test_weights_of_inference_mode() -> None:
    """They do not count their changes; a NaN, at a pad say, is no change."""
    meta = plan()
    with torch.inference_mode():
        weights = torch.tensor([[1.0, 1.0], [1.0, NAN]])
        prepared = prepare_weights(meta, weights, torch.float32)
        assert prepare_weights(meta, weights, torch.float32) is prepared
        weights[0, 0] = 5
        assert prepare_weights(meta, weights, torch.float32).weights.tolist() == [[5.0, 1.0], [1.0, 0.0]]
    again = prepare_weights(meta, weights, torch.float32)
    assert not any(tensor.is_inference() for tensor in tensors_of(again) + tensors_of(prepared))
    x = torch.ones(3, requires_grad=True)
    pool_function(x, torch.tensor([[0, 1], [2, 9]]), "weighted", weights=weights).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [5.0, 1.0, 1.0]


def test_function_transforms_leave_no_mark() -> None:
    meta, weights = plan(), torch.ones(2, 2)
    found = []

    def function(x: Tensor) -> Tensor:
        found.append(prepare_weights(meta, weights, torch.float32))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    cached.clear_weights()
    torch.func.vmap(function)(torch.ones(2, 3))
    assert len(found) == 2
    for prepared in found:
        assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors_of(prepared))


def test_another_plan_with_the_same_weights() -> None:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    here = pool_meta_from_indices(torch.tensor([[0, 1], [2, 9]]), 3)
    there = pool_meta_from_indices(torch.tensor([[0, 9], [2, 1]]), 3)
    x = torch.tensor([1.0, 10.0, 100.0])
    for _ in range(2):
        assert pool_forward(here, x, "weighted", weights=weights)[0].tolist() == [301.0, 20.0]
        assert pool_forward(there, x, "weighted", weights=weights)[0].tolist() == [301.0, 40.0]
    assert prepare_weights(here, weights, torch.float32) is prepare_weights(here, weights, torch.float32)
    assert prepare_weights(there, weights, torch.float32) is prepare_weights(there, weights, torch.float32)


def test_a_plan_at_the_address_of_a_dead_one() -> None:
    """Python gives the id of a dead plan to the next one; what is derived must follow, and still be kept."""
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    x = torch.tensor([1.0, 10.0, 100.0])
    ids = set()
    for turn in range(400):
        table = [[0, 1], [2, 9]] if turn % 2 else [[0, 9], [2, 1]]
        meta = pool_meta_from_indices(torch.tensor(table), 3)
        ids.add(id(meta))
        y, _ = pool_forward(meta, x, "weighted", weights=weights)
        assert y.tolist() == ([301.0, 20.0] if turn % 2 else [301.0, 40.0])
        assert prepare_weights(meta, weights, torch.float32) is prepare_weights(meta, weights, torch.float32)
        assert kept() == 1
        del meta
    assert len(ids) < 400
    assert kept() == 0


def test_nothing_is_kept_alive() -> None:
    meta, weights = plan(), torch.ones(2, 2)
    derived = weakref.ref(prepare_weights(meta, weights, torch.float32))
    died = weakref.ref(weights)
    del weights
    gc.collect()
    assert died() is None
    assert derived() is None
    assert kept() == 0

    weights = torch.ones(2, 2)
    derived = weakref.ref(prepare_weights(meta, weights, torch.float32))
    plan_died = weakref.ref(meta)
    del meta
    gc.collect()
    assert plan_died() is None
    assert derived() is None
    assert kept() == 0


def test_a_graph_takes_its_weights_along() -> None:
    x = torch.ones(3, requires_grad=True)
    weights = torch.ones(2, 2)
    y = pool_function(x, torch.tensor([[0, 1], [2, 9]]), "weighted", weights=weights)
    del weights
    gc.collect()
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_the_cache_is_cleared_with_all_others() -> None:
    meta, weights = plan(), torch.ones(2, 2)
    prepared = prepare_weights(meta, weights, torch.float32)
    assert kept() == 1
    clear_pool_cache()
    assert kept() == 0
    assert prepare_weights(meta, weights, torch.float32) is not prepared


def test_sparse_weights_are_named() -> None:
    table = torch.tensor([[0, 1], [2, 5]])
    with pytest.raises(UnsupportedTypeError, match=r"^weights must be a strided tensor, not one of layout "):
        pool_function(torch.ones(3, 4), table, "weighted", weights=torch.ones(2, 2).to_sparse())
