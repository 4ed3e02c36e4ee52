"""Pooling as autograd sees it: numerical gradients of both orders, what is kept for them, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from knnpool_gen import (
    InvalidArgumentError,
    KNNPoolError,
    KNNPoolFunction,
    UnknownModeError,
    UnsupportedTypeError,
    pool_backward,
    pool_forward,
    pool_function,
    pool_meta_from_indices,
)
from tables import DTYPES, Table, assert_same_bits, small_tables

NAN = float("nan")
MODES = ("max", "avg", "sum", "weighted")

any_mode = pytest.mark.parametrize("mode", MODES)
any_nan_rule = pytest.mark.parametrize("nan", ["omit", "propagate"])
any_normalize = pytest.mark.parametrize("normalize", [False, True], ids=["", "normalized"])

OPTIONS = [
    pytest.param(mode, nan, normalize, id=f"{mode}-{nan}" + "-normalized" * normalize)
    for mode in MODES
    for nan in ("omit", "propagate")
    for normalize in ((False, True) if mode == "weighted" else (False,))
]
any_options = pytest.mark.parametrize(("mode", "nan", "normalize"), OPTIONS)


def options_for(table: Table, mode: str, nan: str, normalize: bool) -> dict[str, Any]:
    """Keyword options; the weights of pads are NaN."""
    if mode != "weighted":
        return {"nan": nan}
    weights = torch.rand(table.indices.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    return {
        "nan": nan,
        "weights": weights.masked_fill(table.indices >= table.nin, NAN),
        "normalize_weights": normalize,
    }


def far_apart(nin: int) -> Tensor:
    """``[2, nin]``, no two of them so close that a small step changes the winner."""
    return torch.randperm(2 * nin, generator=torch.Generator().manual_seed(0)).reshape(2, nin).double()


def check_gradients(table: Table, x: Tensor, mode: str, options: dict[str, Any]) -> None:
    """Numerically, for the inputs that are no NaN and the columns that hold a number."""
    numbers = ~x.isnan()
    plain = pool_function(x, table.indices, mode, **options)
    columns = plain.isfinite()

    def function(free: Tensor) -> Tensor:
        # Differences of -inf or NaN tell nothing.
        return pool_function(x.masked_scatter(numbers, free), table.indices, mode, **options)[columns]

    free = x[numbers].requires_grad_()
    assert torch.autograd.gradcheck(function, (free,))
    assert torch.autograd.gradgradcheck(function, (free,))


@pytest.mark.parametrize("table", [t for t in small_tables() if t.k < 33 and t.nin < 20], ids=str)
@any_options
def test_gradients(table: Table, mode: str, nan: str, normalize: bool) -> None:
    check_gradients(table, far_apart(table.nin), mode, options_for(table, mode, nan, normalize))


@pytest.mark.parametrize("table", [t for t in small_tables() if 0 < t.k < 33 and 1 < t.nin < 20], ids=str)
@any_options
def test_gradients_beside_nan(table: Table, mode: str, nan: str, normalize: bool) -> None:
    x = far_apart(table.nin)
    x[0, ::3] = NAN
    x[1, 1] = NAN
    check_gradients(table, x, mode, options_for(table, mode, nan, normalize))


def double_backward(x: Tensor, table: Tensor, mode: str, grad_y: Tensor, tangent: Tensor, **options: Any) -> Tensor:
    """The derivative of <gradient of x, tangent> with respect to ``grad_y``."""
    x = x.clone().requires_grad_()
    grad_y = grad_y.clone().requires_grad_()
    y = pool_function(x, table, mode, **options)
    (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
    (result,) = torch.autograd.grad(grad_x, grad_y, tangent)
    return result


@any_options
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_double_backward_is_the_transpose(mode: str, nan: str, normalize: bool, dtype: torch.dtype) -> None:
    """<backward(g), t> = <g, double_backward(t)>, with NaN inputs, pads and an empty column."""
    table = Table("here", torch.tensor([[0, 9, 3, 2, 1], [1, 9, 9, 2, 1], [4, 9, 0, 3, 9]]), 5)
    options = options_for(table, mode, nan, normalize)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, generator=generator).to(dtype)
    x[0, 1] = x[1, 2] = x[1, 3] = NAN
    x[2] = NAN
    grad_y = torch.randn(3, 5, generator=generator).to(dtype)
    tangent = torch.randn(3, 5, generator=generator).to(dtype)
    result = double_backward(x, table.indices, mode, grad_y, tangent, **options)
    assert result.dtype == dtype
    assert (result[:, 1] == 0).all()
    meta = pool_meta_from_indices(table.indices, 5)
    _, aux = pool_forward(meta, x, mode, **options)
    grad_x = pool_backward(meta, grad_y, aux, mode, x=x, **options)
    there = (grad_x.double() * tangent.double()).sum(-1)
    back = (grad_y.double() * result.double()).sum(-1)
    tolerance = 40 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-14
    torch.testing.assert_close(there, back, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("max", [2.0, 0.0, 5.0]), ("avg", [1.5, 0.0, 5.0]), ("sum", [3.0, 0.0, 5.0]), ("weighted", [3.0, 0.0, 5.0])],
)
@any_nan_rule
@pytest.mark.parametrize("empty_value", [None, NAN, 3.0])
def test_double_backward_of_an_empty_column(
    mode: str, expected: list[float], nan: str, empty_value: float | None
) -> None:
    table = torch.tensor([[0, 9, 2], [1, 9, 9]])
    weights = torch.ones(2, 3) if mode == "weighted" else None
    x, tangent = torch.tensor([3.0, 7.0, 1.0]), torch.tensor([1.0, 2.0, 5.0])
    result = double_backward(x, table, mode, torch.ones(3), tangent, nan=nan, empty_value=empty_value, weights=weights)
    assert result.tolist() == expected


@any_mode
@any_nan_rule
@pytest.mark.parametrize(("k", "nin"), [(0, 3), (2, 0), (0, 0)])
def test_double_backward_where_all_is_empty(mode: str, nan: str, k: int, nin: int) -> None:
    weights = torch.ones(k, 4) if mode == "weighted" else None
    table = torch.zeros(k, 4, dtype=torch.int64)
    x, tangent = torch.ones(2, nin), torch.ones(2, nin)
    result = double_backward(x, table, mode, torch.ones(2, 4), tangent, nan=nan, weights=weights)
    assert_same_bits(result, torch.zeros(2, 4))


@any_options
def test_a_nan_tangent_is_not_lost(mode: str, nan: str, normalize: bool) -> None:
    """It belongs to node 1, the winner of column 1, and must not be taken for an input that is left out."""
    table = Table("here", torch.tensor([[0, 1, 0], [9, 0, 9]]), 2)
    result = double_backward(
        torch.tensor([1.0, 2.0]),
        table.indices,
        mode,
        torch.ones(3),
        torch.tensor([1.0, NAN]),
        **options_for(table, mode, nan, normalize),
    )
    assert result.isnan().tolist() == [False, True, False]


@any_options
def test_third_order(mode: str, nan: str, normalize: bool) -> None:
    """Pooling is linear between its kinks, but what it is multiplied with need not be."""
    table = Table("here", torch.tensor([[0, 9, 3, 2], [1, 9, 9, 2], [4, 9, 0, 3]]), 5)
    options = options_for(table, mode, nan, normalize)
    columns = [0, 2, 3]

    def cubes(x: Tensor) -> Tensor:
        return pool_function(x**3, table.indices, mode, **options)[columns]

    def slopes(x: Tensor) -> Tensor:
        (grad,) = torch.autograd.grad((cubes(x) ** 2).sum(), x, create_graph=True)
        return grad

    x = torch.tensor([0.5, 1.5, -0.7, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(slopes, (x,), atol=1e-4)


# What is kept.


def kept_by(x: Tensor, table: Tensor, mode: str, **options: Any) -> list[Tensor]:
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pool_function(x, table, mode, **options)
    return kept


@any_options
@pytest.mark.parametrize("k", [3, 300])
def test_what_is_kept_for_the_backward(mode: str, nan: str, normalize: bool, k: int) -> None:
    table = Table("here", torch.arange(k * 4).reshape(k, 4) % 50, 40)
    x = torch.ones(6, 5, 40, requires_grad=True)
    kept = kept_by(x, table.indices, mode, **options_for(table, mode, nan, normalize))
    if mode == "max":
        assert [(t.dtype, t.shape) for t in kept] == [(torch.uint8 if k == 3 else torch.int16, (6, 5, 4))]
    elif nan == "omit":
        assert [t.data_ptr() for t in kept] == [x.data_ptr()]
    else:
        assert kept == []


@any_mode
def test_nothing_is_kept_where_nobody_wants_a_gradient(mode: str) -> None:
    table = torch.tensor([[0, 1], [2, 9]])
    options = {"weights": torch.ones(2, 2)} if mode == "weighted" else {}
    x = torch.ones(2, 3)
    assert kept_by(x, table, mode, nan="omit", **options) == []
    x.requires_grad_()
    with torch.no_grad():
        assert kept_by(x, table, mode, nan="omit", **options) == []
        assert not pool_function(x, table, mode, **options).requires_grad
    assert pool_function(x, table, mode, **options).requires_grad


def test_an_input_changed_since_is_noticed() -> None:
    x = torch.ones(3, requires_grad=True)
    for mode in ("avg", "sum"):
        leaf = x * 1
        y = pool_function(leaf, torch.tensor([[0, 1]]), mode, nan="omit")
        leaf.fill_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_weights_changed_since_do_not_matter() -> None:
    x = torch.ones(2, requires_grad=True)
    weights = torch.tensor([[2.0], [3.0]])
    y = pool_function(x, torch.tensor([[0], [1]]), "weighted", weights=weights)
    weights.fill_(NAN)
    y.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 3.0]


# What is refused.

TABLE = torch.tensor([[0, 1], [2, 9]])
ONES = torch.ones(2, 2)
REFUSED: list[tuple[str, str, dict[str, Any], type[Exception], str]] = [
    ("unknown mode", "median", {}, ValueError, "mode = 'median'; there are 'max', 'avg', 'sum', 'weighted'"),
    ("no mode", None, {}, ValueError, "mode = None; there are"),  # type: ignore[list-item]
    ("unknown nan", "max", {"nan": "ignore"}, ValueError, "nan = 'ignore'; there are 'omit', 'propagate'"),
    ("nan=False", "avg", {"nan": False}, ValueError, "nan = False; there are"),
    ("no weights", "weighted", {}, ValueError, r"mode 'weighted' needs weights \[K, Nout\]"),
    ("weights of max", "max", {"weights": ONES}, ValueError, "mode 'max' takes no weights"),
    ("weights of avg", "avg", {"weights": ONES}, ValueError, "mode 'avg' takes no weights"),
    ("weights of sum", "sum", {"weights": ONES}, ValueError, "mode 'sum' takes no weights"),
    ("normalize avg", "avg", {"normalize_weights": True}, ValueError, "normalize_weights goes with mode 'weighted'"),
    ("normalize without", "weighted", {"normalize_weights": True}, ValueError, "needs weights"),
    ("shape", "weighted", {"weights": torch.ones(2, 3)}, ValueError, r"weights have shape \[2, 3\], .* = \[2, 2\]"),
    ("rank", "weighted", {"weights": torch.ones(4)}, ValueError, r"weights have shape \[4\]"),
    ("broadcast", "weighted", {"weights": torch.ones(1, 2)}, ValueError, r"weights have shape \[1, 2\]"),
    ("int", "weighted", {"weights": ONES.int()}, TypeError, "floating-point tensor, not torch.int32"),
    ("complex", "weighted", {"weights": ONES.cfloat()}, TypeError, "floating-point tensor, not torch.complex64"),
    ("list", "weighted", {"weights": [[1.0, 1.0], [1.0, 1.0]]}, TypeError, "floating-point tensor, not list"),
    ("learnt", "weighted", {"weights": ONES.clone().requires_grad_()}, ValueError, "require a gradient .* detach"),
    ("empty_value", "max", {"empty_value": "-inf?"}, TypeError, "empty_value must be a number, not '-inf\\?'"),
    ("empty_values", "max", {"empty_value": torch.ones(2)}, TypeError, "empty_value must be a number, not tensor"),
]


@pytest.mark.parametrize(
    ("mode", "options", "kind", "message"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED]
)
def test_what_is_refused(mode: str, options: dict[str, Any], kind: type[Exception], message: str) -> None:
    meta = pool_meta_from_indices(TABLE, 3)
    calls = [
        lambda: pool_function(torch.ones(3), TABLE, mode, **options),
        lambda: pool_function(torch.ones(3, requires_grad=True), TABLE, mode, **options),
        lambda: pool_forward(meta, torch.ones(3), mode, **options),
    ]
    if "empty_value" not in options:
        calls.append(lambda: pool_backward(meta, torch.ones(2), None, mode, **options))
    for call in calls:
        with pytest.raises(KNNPoolError, match=message) as caught:
            call()
        assert isinstance(caught.value, kind)


def test_an_unknown_mode_has_an_error_of_its_own() -> None:
    with pytest.raises(UnknownModeError):
        pool_function(torch.ones(3), TABLE, "min")
    with pytest.raises(UnknownModeError):
        KNNPoolFunction.apply(torch.ones(3), pool_meta_from_indices(TABLE, 3), "min", True)


@pytest.mark.parametrize("mode", ["avg", "sum", "weighted"])
def test_the_backward_without_nan_needs_the_input(mode: str) -> None:
    meta = pool_meta_from_indices(TABLE, 3)
    options = {"weights": ONES} if mode == "weighted" else {}
    grad_y = torch.ones(4, 2)
    with pytest.raises(InvalidArgumentError, match=r"nan = 'omit' needs x, the input of the forward"):
        pool_backward(meta, grad_y, None, mode, nan="omit", **options)
    with pytest.raises(InvalidArgumentError, match=r"x has shape \(5, 3\), grad_y \(4, 2\)"):
        pool_backward(meta, grad_y, None, mode, nan="omit", x=torch.ones(5, 3), **options)
    with pytest.raises(InvalidArgumentError, match=r"x has shape \(4, 2\).* Nin = 3"):
        pool_backward(meta, grad_y, None, mode, nan="omit", x=torch.ones(4, 2), **options)
    with pytest.raises(UnsupportedTypeError, match=r"x has dtype int64"):
        pool_backward(meta, grad_y, None, mode, nan="omit", x=torch.ones(4, 3).long(), **options)
    plain = pool_backward(meta, grad_y, None, mode, **options)
    assert_same_bits(pool_backward(meta, grad_y, None, mode, nan="omit", x=torch.ones(4, 3), **options), plain)


def test_aux_is_checked() -> None:
    for k, wanted, other in ((255, torch.uint8, torch.int16), (256, torch.int16, torch.uint8)):
        meta = pool_meta_from_indices(torch.zeros(k, 2, dtype=torch.int64), 3)
        grad_y = torch.ones(4, 2)
        with pytest.raises(InvalidArgumentError, match=r"mode 'max' needs aux"):
            pool_backward(meta, grad_y, None, "max")
        with pytest.raises(UnsupportedTypeError, match=f"aux has dtype .*; wanted {str(wanted)[6:]} for K = {k}"):
            pool_backward(meta, grad_y, torch.zeros(4, 2, dtype=other), "max")
        with pytest.raises(InvalidArgumentError, match=r"aux has shape \(4, 1\), grad_y \(4, 2\)"):
            pool_backward(meta, grad_y, torch.zeros(4, 1, dtype=wanted), "max")
        with pytest.raises(UnsupportedTypeError, match="aux is a list"):
            pool_backward(meta, grad_y, [0], "max")  # type: ignore[arg-type]
        assert pool_backward(meta, grad_y, torch.zeros(4, 2, dtype=wanted), "max").tolist() == [[2.0, 0.0, 0.0]] * 4


@pytest.mark.parametrize("k", [2, 300])
def test_max_without_aux_has_no_backward(k: int) -> None:
    x = torch.ones(3, requires_grad=True)
    y = KNNPoolFunction.apply(x, pool_meta_from_indices(torch.zeros(k, 2, dtype=torch.int64), 3), "max", False)
    with pytest.raises(InvalidArgumentError, match="need_aux=True"):
        y.sum().backward()


@any_normalize
def test_a_failed_call_leaves_nothing_behind(normalize: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    weights = torch.ones(2, 2, requires_grad=True)
    for _ in range(2):
        with pytest.raises(InvalidArgumentError):
            pool_function(x, TABLE, "weighted", weights=weights, normalize_weights=normalize)
    weights.requires_grad_(False)
    y = pool_function(x, TABLE, "weighted", weights=weights, normalize_weights=normalize)
    assert y.tolist() == ([1.0, 1.0] if normalize else [2.0, 1.0])
