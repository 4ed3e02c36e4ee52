"""Pooling under torch.func and forward-mode AD: the same as the formula under the same transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from formulas import FILLED, NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import InvalidArgumentError, optimized_pool_forward, pool_function

# torch's own rules for forward mode are scripted when they are first used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

Function = Callable[[Tensor], Tensor]


def both(mode: str, nan: str | None, normalize: bool) -> list[Function]:
    """Pooling and its formula, where an empty column counts for nothing."""
    chosen = options(mode, nan, normalize)
    return [lambda x, f=f: f(x, TABLE, mode, **chosen)[..., FILLED] for f in (pool_function, pooled)]


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[..., 0, 1] = torch.nan
    return x


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True)


TRANSFORMS: dict[str, Callable[[Function], Callable[[Tensor], Any]]] = {
    "vmap": vmap,
    "vmap over the middle": lambda f: vmap(f, in_dims=1, out_dims=1),
    "vmap over the nodes of others": lambda f: vmap(lambda x: f(x.movedim(0, -1)), in_dims=0),
    "nested vmap": lambda f: vmap(vmap(f, in_dims=1), in_dims=1),
    "grad": lambda f: grad(lambda x: (f(x) ** 2).nansum()),
    "vmap of grad": lambda f: vmap(grad(lambda x: (f(x) ** 2).nansum())),
    "grad of grad": lambda f: grad(lambda x: (grad(lambda x: (f(x) ** 3).nansum())(x) ** 2).nansum()),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: (f(x) ** 3).nansum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (values(*x.shape, seed=3),)),
    "vjp": lambda f: lambda x: vjp(f, x)[1](values(*f(x).shape, seed=3)),
    "vmap of jvp": lambda f: vmap(lambda x: jvp(f, (x,), (torch.ones_like(x),))),
    "jvp of grad": lambda f: lambda x: jvp(grad(lambda x: (f(x) ** 3).nansum()), (x,), (torch.ones_like(x),)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@any_case
def test_transforms(mode: str, nan: str, normalize: bool, transform: Any) -> None:
    ours, theirs = both(mode, nan, normalize)
    for x in (values(2, 3, NIN), with_nan(values(2, 3, NIN))):
        if transform is TRANSFORMS["vmap over the nodes of others"]:
            x = x.movedim(-1, 1)
        if nan == "propagate" and x.isnan().any():
            continue  # what a formula makes of NaN times 0 is its own affair
        close(transform(ours)(x), transform(theirs)(x))


@any_case
def test_forward_mode(mode: str, nan: str, normalize: bool) -> None:
    x, change = values(2, 3, NIN), values(2, 3, NIN, seed=1)
    tangents = []
    for function in both(mode, nan, normalize):
        for wants_gradient in (False, True):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(x.clone().requires_grad_(wants_gradient), change)
                tangents.append(forward_ad.unpack_dual(function(dual)).tangent.detach())
    for tangent in tangents:
        close(tangent, tangents[-1])


@any_mode
def test_an_empty_column_has_no_tangent(mode: str) -> None:
    _, change = jvp(lambda x: pool_function(x, TABLE, mode, **options(mode)), (values(NIN),), (values(NIN, seed=1),))
    assert change[1] == 0
    filled = {"empty_value": 7.0} | options(mode)
    y, change = jvp(lambda x: pool_function(x, TABLE, mode, **filled), (values(NIN),), (values(NIN, seed=1),))
    assert (y[1], change[1]) == (7, 0)


@any_case
def test_gradcheck_in_every_direction(mode: str, nan: str, normalize: bool) -> None:
    function, _ = both(mode, nan, normalize)
    x = values(2, NIN).requires_grad_()
    assert torch.autograd.gradcheck(
        function, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(
        function, (x,), check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@any_mode
def test_gradients_in_batches(mode: str) -> None:
    """``is_grads_batched`` has a vmap of its own, older than torch.func."""
    function, formula = both(mode, None, False)
    grads = values(4, 2, 3)
    results = []
    for f in (function, formula):
        x = values(2, NIN).requires_grad_()
        results.append(torch.autograd.grad(f(x), x, grads, is_grads_batched=True))
    close(*results)


class Layer(nn.Module):
    """A layer like fovi's behind something to learn."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.scale = nn.Parameter(values(NIN) + 3)
        self.register_buffer("knn_indices_pad_token", TABLE.clone())
        self.knn_pad_token_val = NIN

    def forward(self, x: Tensor) -> Tensor:
        y = optimized_pool_forward(self, x * self.scale)
        assert y is not None
        return y[..., FILLED]


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_gradients_per_sample_of_a_module(mode: str) -> None:
    layer = Layer(mode)
    parameters, buffers = dict(layer.named_parameters()), dict(layer.named_buffers())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (functional_call(layer, (parameters, buffers), (x,)) ** 2).sum()

    x = values(6, 3, NIN)
    per_sample = vmap(grad(loss), in_dims=(None, 0))(parameters, x)["scale"]
    formula = vmap(grad(lambda scale, x: (pooled(x * scale, TABLE, mode)[..., FILLED] ** 2).sum()), in_dims=(None, 0))
    close(per_sample, formula(layer.scale.detach(), x))


def test_weights_are_not_differentiated_by_any_transform() -> None:
    x, weights = values(NIN), torch.ones(TABLE.shape, dtype=torch.float64)

    def loss(weights: Tensor) -> Tensor:
        return pool_function(x, TABLE, "weighted", weights=weights).sum()

    transforms: list[Callable[[], Any]] = [
        lambda: grad(loss)(weights),
        lambda: grad(lambda w: grad(lambda x: pool_function(x, TABLE, "weighted", weights=w).sum())(x).sum())(weights),
        lambda: jvp(loss, (weights,), (weights,)),
        lambda: vmap(grad(loss))(weights.expand(2, 3, 4)),
    ]
    for transform in transforms:
        with pytest.raises(InvalidArgumentError, match=r"detach them|vmap over weights"):
            transform()
    change = values(NIN, seed=1)
    y, tangent = jvp(lambda x: pool_function(x, TABLE, "weighted", weights=weights), (x,), (change,))
    close((y, tangent), tuple(pooled(t, TABLE, "weighted", weights=weights) for t in (x, change)))
    with forward_ad.dual_level(), pytest.raises(InvalidArgumentError, match="detach them"):
        loss(forward_ad.make_dual(weights, weights))


def test_vmap_over_tables_says_what_to_do() -> None:
    x = values(NIN)
    with pytest.raises(InvalidArgumentError, match="vmap over indices: every table has a plan of its own"):
        vmap(lambda table: pool_function(x, table, "max"))(torch.stack([TABLE, TABLE]))
    weights = torch.ones(2, *TABLE.shape)
    with pytest.raises(InvalidArgumentError, match="vmap over weights: every table has a plan of its own"):
        vmap(lambda weights: pool_function(x, TABLE, "weighted", weights=weights))(weights)


@any_mode
def test_a_tensor_that_has_left_its_transform_is_pooled_as_what_it_was(mode: str) -> None:
    x = values(2, NIN)
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x)
        return x.sum()

    grad(keep)(x)

    assert left[0].requires_grad
    close(pool_function(left[0], TABLE, mode, **options(mode)), pooled(x, TABLE, mode, **options(mode)))
