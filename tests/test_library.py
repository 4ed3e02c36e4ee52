"""The operators: what a tracer sees of them is what they do, and who gets to see them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from formulas import FILLED, NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import InvalidArgumentError, UnknownModeError, UnsupportedTypeError, pool_function
from knnpool_gen.library import pool, watched
from knnpool_gen.runtime import plan
from tables import DTYPES, assert_same_bits

OPS = torch.ops.knnpool


def call(mode: str, nan: str | None, normalize: bool) -> tuple[Any, ...]:
    return TABLE, options(mode, nan, normalize).get("weights"), mode, nan, normalize


def rest_of(mode: str, nan: str | None, normalize: bool, x: Tensor) -> tuple[Any, ...]:
    """What ``backward`` and ``tangent`` take after their first argument."""
    indices, weights, *others = call(mode, nan, normalize)
    aux = OPS.forward_max(x, TABLE, nan, None)[1] if mode == "max" else None
    return aux, x, indices, weights, NIN, *others


def check(operator: Any, *arguments: Any) -> None:
    assert set(torch.library.opcheck(operator.default, arguments).values()) == {"SUCCESS"}


@any_case
@pytest.mark.parametrize("wants_gradient", [False, True])
def test_opcheck_of_forward(mode: str, nan: str, normalize: bool, wants_gradient: bool) -> None:
    # An average of nothing is NaN, which the check takes to differ from itself.
    x = values(2, 3, NIN).requires_grad_(wants_gradient)
    check(OPS.forward, x, *call(mode, nan, normalize), 3.0)
    if mode == "max":
        check(OPS.forward_max, x, TABLE, nan, None)


@any_case
def test_opcheck_of_backward_and_tangent(mode: str, nan: str, normalize: bool) -> None:
    x = values(2, 3, NIN)
    x[0, 0, 2] = torch.nan
    rest = rest_of(mode, nan, normalize, x)
    check(OPS.backward, values(2, 3, 4).requires_grad_(), *rest)
    check(OPS.tangent, values(2, 3, NIN, seed=1).requires_grad_(), *rest)


@any_case
def test_tangent_is_the_transpose_of_backward(mode: str, nan: str, normalize: bool) -> None:
    x = values(6, NIN)
    x[0, 1] = x[1, 2] = x[2] = torch.nan
    rest = rest_of(mode, nan, normalize, x)
    change, grad_y = values(6, NIN, seed=1), values(6, 4, seed=2)
    there = (OPS.tangent(change, *rest) * grad_y).sum(-1)
    back = (change * OPS.backward(grad_y, *rest)).sum(-1)
    torch.testing.assert_close(there, back, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(NIN,), (0, NIN), (2, 3, NIN), (3, NIN, 2)], ids=str)
@any_mode
def test_what_is_promised_while_tracing_is_what_comes(mode: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    x = x.transpose(-1, -2) if shape[-1] != NIN else x
    arguments = (x, *call(mode, None, False), None)
    came = OPS.forward(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode_of_fakes:
        promised = OPS.forward(mode_of_fakes.from_tensor(x), *arguments[1:])
    on_meta = pool_function(x.to("meta"), TABLE, mode, weights=arguments[2])
    for other in (promised, on_meta):
        assert (other.shape, other.dtype, other.stride()) == (came.shape, came.dtype, came.stride())
    assert on_meta.is_meta
    assert promised.device.type == "cpu"


@pytest.mark.parametrize("k", [255, 256, 40_000])
def test_the_type_of_slots_while_tracing(k: int) -> None:
    table = torch.zeros(k, 2, dtype=torch.int64)
    x = torch.ones(3, 4)
    y, aux = OPS.forward_max(x, table, None, None)
    y_meta, aux_meta = OPS.forward_max(x.to("meta"), table, None, None)
    assert (aux_meta.dtype, aux_meta.shape, y_meta.dtype) == (aux.dtype, aux.shape, y.dtype)


def test_a_backward_on_meta() -> None:
    x = torch.ones(2, NIN, device="meta", requires_grad=True)
    pool_function(x, TABLE, "max").sum().backward()
    assert x.grad is not None
    assert (x.grad.shape, x.grad.is_meta) == (x.shape, True)


class Names(TorchDispatchMode):
    """Writes down which operators of this package are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "knnpool":
            self.names.append(func.__name__.removesuffix(".default"))
        return func(*args, **(kwargs or {}))


@any_mode
def test_a_dispatch_mode_sees_one_operator_each_way(mode: str) -> None:
    x = values(2, NIN).requires_grad_()
    forward = "forward_max" if mode == "max" else "forward"
    with Names() as seen:
        y = pool_function(x, TABLE, mode, **options(mode))
        y[:, FILLED].sum().backward()
    assert seen.names == [forward, "backward"]
    with Names() as seen, torch.no_grad():
        pool_function(x, TABLE, mode, **options(mode))
    assert seen.names == ["forward"]
    assert_same_bits(y.detach(), pool_function(x.detach(), TABLE, mode, **options(mode)))


def test_other_modes_get_along_with_it() -> None:
    with FlopCounterMode(display=False):
        assert pool_function(values(2, NIN), TABLE, "max").shape == (2, 4)


def test_who_is_watching() -> None:
    class Subclass(Tensor):
        pass

    x = torch.ones(2)
    ordinary = [x, x.clone().requires_grad_(), torch.nn.Parameter(x), x[:1], x.half()]
    with torch.inference_mode():
        ordinary.append(torch.ones(2))
    assert not any(watched(tensor) for tensor in ordinary)
    assert all(watched(tensor) for tensor in (x.to("meta"), x.as_subclass(Subclass), x.to_sparse()))
    with Names():
        assert watched(x)
    with torch.autograd.forward_ad.dual_level():
        assert watched(x)
    seen = []
    torch.func.vmap(lambda t: seen.append(watched(t)) or t)(x)
    torch.func.grad(lambda t: seen.append(watched(t)) or t.sum())(x)
    assert seen == [True, True]
    assert not watched(x)


def test_the_plan_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for what a compiled backward gets of a table that is a view: an alias that shares memory and version."""
    built = []
    build = plan.pool_meta_from_indices
    monkeypatch.setattr(plan, "pool_meta_from_indices", lambda *args: built.append(args) or build(*args))
    table = torch.cat([TABLE, TABLE], 1)[:, :4]
    weights = torch.cat([torch.ones(3, 4), torch.zeros(3, 4)], 1)[:, :4]
    x = values(2, NIN, dtype=torch.float32)
    for _ in range(3):
        expected = pooled(x, table, "weighted", weights=weights)
        for alias in (table, table.detach(), table.detach()):
            torch.testing.assert_close(pool(x, alias, "weighted", weights=weights.detach()), expected)
    assert len(built) == 1
    alias = table.detach()
    table[0, 0] = 3
    torch.testing.assert_close(pool(x, alias, "sum"), pooled(x, table, "sum"))
    torch.testing.assert_close(pool(x, table, "sum"), pooled(x, table, "sum"))
    assert len(built) == 2
    weights.fill_(2)
    torch.testing.assert_close(
        pool(x, alias, "weighted", weights=weights.detach()), pooled(x, table, "weighted", weights=weights)
    )
    assert len(built) == 2


def test_memory_that_is_used_again_is_no_alias() -> None:
    x = values(2, NIN)
    for turn in range(50):
        table = (TABLE + turn) % NIN
        torch.testing.assert_close(pool(x, table, "sum"), pooled(x, table, "sum"))
        del table
    table = TABLE.clone()
    pool(x, table, "max")
    table.set_(TABLE.flip(1).contiguous())
    torch.testing.assert_close(pool(x, table, "sum"), pooled(x, table, "sum"))


def test_a_double_backward_builds_no_second_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = plan.pool_meta_from_indices
    monkeypatch.setattr(plan, "pool_meta_from_indices", lambda *args: built.append(args) or build(*args))
    table = TABLE.clone()
    x = values(2, NIN).requires_grad_()
    grad_y = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    (grad_x,) = torch.autograd.grad(pool_function(x, table, "max"), x, grad_y, create_graph=True)
    grad_x.sum().backward()
    assert len(built) == 1


# What is refused, as early as it can be seen.


@pytest.mark.parametrize(
    ("mode", "changed", "kind", "message"),
    [
        ("median", {}, UnknownModeError, "mode = 'median'; there are"),
        ("max", {"nan": "ignore"}, InvalidArgumentError, "nan = 'ignore'; there are"),
        ("max", {"weights": torch.ones(3, 4)}, InvalidArgumentError, "mode 'max' takes no weights"),
        ("weighted", {"weights": torch.ones(2, 4)}, InvalidArgumentError, r"shape \[2, 4\], the table .* \[3, 4\]"),
        ("weighted", {"weights": torch.ones(3, 4, requires_grad=True)}, InvalidArgumentError, "require a gradient"),
        ("max", {"x": torch.ones(2, NIN).int()}, UnsupportedTypeError, "x has dtype int32; supported: float16"),
        ("max", {"indices": TABLE.float()}, UnsupportedTypeError, "must be an integer tensor, not torch.float32"),
        ("max", {"indices": TABLE[0]}, InvalidArgumentError, r"must have shape \[K, Nout\], not \[4\]"),
    ],
    ids=str,
)
def test_what_is_refused_while_tracing(mode: str, changed: dict[str, Any], kind: Any, message: str) -> None:
    arguments = {"x": torch.ones(2, NIN), "indices": TABLE} | changed
    arguments["x"] = arguments["x"].to("meta")
    for wants_gradient in {False, arguments["x"].is_floating_point()}:
        arguments["x"].requires_grad_(wants_gradient)
        with pytest.raises(kind, match=message):
            pool_function(**arguments, mode=mode)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("to", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_sparse_inputs(to: Any) -> None:
    with pytest.raises(UnsupportedTypeError, match=r"x is of layout torch.sparse_c.*; wanted a dense tensor"):
        pool_function(to(torch.ones(2, NIN)), TABLE, "max")


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_inputs(layout: torch.layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        x = torch.nested.nested_tensor([torch.ones(2, NIN), torch.ones(3, NIN)], layout=layout)
    with pytest.raises(UnsupportedTypeError, match="x is a nested tensor; wanted a dense tensor"):
        pool_function(x, TABLE, "max")


def test_a_table_without_values() -> None:
    with pytest.raises(InvalidArgumentError, match=r"indices is a meta tensor: the plan .* depends on its values"):
        pool_function(torch.ones(2, NIN), TABLE.to("meta"), "max")
