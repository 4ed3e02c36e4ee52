"""The public functions on CPU tensors, against the rules written as loops over plain numbers."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from knnpool_gen import (
    InvalidArgumentError,
    KNNPoolFunction,
    UnsupportedTypeError,
    clear_pool_cache,
    ensure_pool_metadata,
    optimized_pool_forward,
    pool_backward,
    pool_forward,
    pool_function,
    pool_meta_from_indices,
    pooling,
)
from tables import DTYPES, Table, adversarial_values, assert_same_bits, small_tables

MODES = ("max", "avg", "sum", "weighted")
INF, NAN = math.inf, math.nan
EPSILON = 1e-8

any_mode = pytest.mark.parametrize("mode", MODES)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

INDICES = torch.tensor([[0, 2, 5, 1], [9, 3, 5, 4], [4, 2, 7, 0]])
"""Of 5 input nodes: columns with two, three, no and three neighbours."""
NIN = 5


def options(mode: str, table: Tensor = INDICES, seed: int = 0) -> dict[str, Any]:
    """What ``mode`` needs besides its name."""
    if mode != "weighted":
        return {}
    return {"weights": torch.rand(table.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


# The rules, value by value.


class Plain:
    """One table and one set of options; rows are lists of numbers."""

    def __init__(
        self, table: Table, dtype: torch.dtype, mode: str, nan: str | None = None, empty_value: float | None = None,
        weights: Tensor | None = None, normalize_weights: bool = False,
    ) -> None:  # fmt: skip
        self.table, self.dtype, self.mode, self.empty_value = table, dtype, mode, empty_value
        self.number: Any = np.float64 if dtype is torch.float64 else np.float32
        self.omit = (nan or ("omit" if mode == "max" else "propagate")) == "omit"
        self.normalize = normalize_weights
        entries = table.indices.tolist()
        self.columns = [[(k, row[n]) for k, row in enumerate(entries) if row[n] < table.nin] for n in range(table.nout)]
        ones = torch.ones(table.indices.shape)
        kind = torch.float64 if dtype is torch.float64 else torch.float32
        self.weight = [
            [self.number(w) for w in row] for row in (ones if weights is None else weights).to(kind).tolist()
        ]

    def forward(self, row: list[float]) -> tuple[list[float], list[int]]:
        results = [self._column(n, [(k, row[m]) for k, m in column]) for n, column in enumerate(self.columns)]
        return [y for y, _ in results], [slot for _, slot in results]

    def _column(self, n: int, values: list[tuple[int, float]]) -> tuple[float, int]:
        if not values and self.empty_value is not None:
            return self.empty_value, 255
        if self.mode == "max":
            return self._max(values)
        total = self.number(0)
        for k, value in self._used(values):
            total += self.number(value) * self.weight[k][n]
        if self.mode == "avg" or self.normalize:
            total = total / self._divisor(n, values)
        return float(total), 255

    def _max(self, values: list[tuple[int, float]]) -> tuple[float, int]:
        best, winner = -INF, values[0][0] if values else 255
        for k, value in values:
            if math.isnan(value) and not self.omit:
                return NAN, k
            if value > best:
                best, winner = value, k
        return best, winner

    def _used(self, values: list[tuple[int, float]]) -> list[tuple[int, float]]:
        return [(k, value) for k, value in values if not (self.omit and math.isnan(value))]

    def _divisor(self, n: int, values: list[tuple[int, float]]) -> Any:
        size = self.number(0)
        for k, _ in self._used(values):
            size += self.weight[k][n]
        return size + self.number(EPSILON) if self.normalize else size

    def backward(self, row: list[float], aux: list[int], grad_y: list[float]) -> list[float]:
        """Readers of a node give to it by slot, then by output node."""
        total = [self.number(0)] * self.table.nin
        for k in range(self.table.k):
            for n, column in enumerate(self.columns):
                node = dict(column).get(k)
                if node is None or (self.mode != "max" and self.omit and math.isnan(row[node])):
                    continue
                share = self.number(grad_y[n])
                if self.mode == "max":
                    if aux[n] == k:
                        total[node] += share
                    continue
                values = [(slot, row[m]) for slot, m in column]
                if self.mode == "avg":
                    share = share / self._divisor(n, values)
                elif self.normalize and self.omit:  # each row has a divisor of its own
                    share = share / self._divisor(n, values) * self.weight[k][n]
                elif self.normalize:
                    share = share * (self.weight[k][n] / self._divisor(n, values))
                elif self.mode == "weighted":
                    share = share * self.weight[k][n]
                total[node] += share
        return [float(value) for value in total]

    def run(self, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``y``, winning slots and gradient of ``x`` ``[rows, Nin]``."""
        rows = x.shape[0]
        with np.errstate(all="ignore"):
            results = [self.forward(row) for row in x.double().tolist()]
            grads = [
                self.backward(row, aux, grad)
                for row, (_, aux), grad in zip(x.double().tolist(), results, grad_y.double().tolist(), strict=True)
            ]

        def tensor(values: list[list[Any]], nodes: int) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).reshape(rows, nodes)

        y = tensor([values for values, _ in results], self.table.nout).to(self.dtype)
        aux = tensor([slots for _, slots in results], self.table.nout).to(torch.uint8)
        return y, aux, tensor(grads, self.table.nin).to(self.dtype)


def check_against_plain(table: Table, dtype: torch.dtype, rows: int, seed: int, mode: str, **chosen: Any) -> None:
    x = adversarial_values(rows, table.nin, dtype, seed)
    grad_y = adversarial_values(rows, table.nout, dtype, seed + 1)
    y, aux, grad_x = Plain(table, dtype, mode, **chosen).run(x, grad_y)

    leaf = x.clone().requires_grad_()
    actual = pool_function(leaf, table.indices, mode, **chosen)
    actual.backward(grad_y)
    assert_same_bits(actual.detach(), y)
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, grad_x)

    meta = pool_meta_from_indices(table.indices, table.nin)
    actual, slots = pool_forward(meta, x, mode, **chosen)
    assert_same_bits(actual, y)
    if mode == "max":
        assert slots is not None
        assert_same_bits(slots, aux)
    else:
        assert slots is None
    chosen.pop("empty_value", None)
    assert_same_bits(pool_backward(meta, grad_y, slots, mode, x=x, **chosen), grad_x)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    k, nout, nin = draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 6))
    entries = draw(st.lists(st.integers(0, nin + 2), min_size=k * nout, max_size=k * nout))
    return Table("drawn", torch.tensor(entries, dtype=torch.int64).reshape(k, nout), nin)


@settings(deadline=None, max_examples=500)
@given(st.data())
def test_plain_loops(data: st.DataObject) -> None:
    """All modes, options and dtypes on small tables of any shape, with every special value; forward and backward."""
    table = data.draw(tables())
    mode = data.draw(st.sampled_from(MODES))
    chosen: dict[str, Any] = {
        "nan": data.draw(st.sampled_from([None, "omit", "propagate"])),
        "empty_value": data.draw(st.sampled_from([None, 0.0, -1.5, NAN, INF])),
    }
    if mode == "weighted":
        seed = data.draw(st.integers(0, 1000))
        weights = torch.randn(table.indices.shape, generator=torch.Generator().manual_seed(seed))
        weights *= data.draw(st.sampled_from([1.0, 1e-8, 0.0]))  # so small that what is added to their sum matters
        # Whatever stands at a pad is not read.
        chosen["weights"] = weights.masked_fill(table.indices >= table.nin, NAN)
        chosen["normalize_weights"] = data.draw(st.booleans())
    rows, seed = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 2**32))
    check_against_plain(table, data.draw(st.sampled_from(DTYPES)), rows, seed, mode, **chosen)


@any_mode
@pytest.mark.parametrize("nan", ["omit", "propagate"])
@pytest.mark.parametrize("table", [table for table in small_tables() if table.k < 255], ids=str)
def test_plain_loops_on_tables(table: Table, mode: str, nan: str) -> None:
    check_against_plain(table, torch.float32, 7, 0, mode, nan=nan, **options(mode, table.indices))


# Shapes, strides, dtypes.


@any_mode
@any_dtype
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3, 2), (0,), (2, 0, 3)], ids=str)
def test_any_leading_dimensions(mode: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    rows = math.prod(shape)
    x = adversarial_values(rows, NIN, dtype)
    grad_y = adversarial_values(rows, 4, dtype, seed=1)
    table = Table("table", INDICES, NIN)
    y, _, grad_x = Plain(table, dtype, mode, **options(mode)).run(x, grad_y)
    leaf = x.reshape(*shape, NIN).clone().requires_grad_()
    actual = pool_function(leaf, INDICES, mode, **options(mode))
    actual.backward(grad_y.reshape(*shape, 4))
    assert_same_bits(actual.detach(), y.reshape(*shape, 4))
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, grad_x.reshape(*shape, NIN))
    assert actual.is_contiguous()


@pytest.mark.parametrize(("k", "nout", "nin"), list(itertools.product([0, 2], [0, 3], [0, 4])))
def test_sizes_of_zero(k: int, nout: int, nin: int) -> None:
    table = torch.arange(k * nout).reshape(k, nout) % (nin + 1)
    for mode in MODES:
        x = torch.ones(2, nin, dtype=torch.float64, requires_grad=True)
        y = pool_function(x, table, mode, **options(mode, table))
        grad_y = torch.ones_like(y, requires_grad=True)
        (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
        (double,) = torch.autograd.grad(grad_x.sum(), grad_y, allow_unused=True, materialize_grads=True)
        assert (y.shape, grad_x.shape, double.shape) == ((2, nout), (2, nin), (2, nout))
        if k == 0 or nin == 0:
            empty = {"max": -INF, "avg": NAN, "sum": 0.0, "weighted": 0.0}[mode]
            assert_same_bits(y.detach(), torch.full((2, nout), empty, dtype=torch.float64))
            assert not grad_x.any()
            assert not double.any()


def layouts(values: Tensor) -> dict[str, Tensor]:
    """``values`` ``[2, 3, n]`` in other places in memory; the last two hold one of them only."""
    wide = torch.full((2, 3, 2 * values.shape[-1] + 1), 77.0).to(values.dtype)
    wide[..., 1::2] = values
    return {
        "transposed": values.transpose(0, 2).contiguous().transpose(0, 2),
        "strided": wide[..., 1::2],
        "offset": torch.cat([values[:1], values])[1:],
        "expanded": values[:1].expand(2, -1, -1),
        "one value": values[:1, :1, :1].expand(2, 3, values.shape[-1]),
    }


@any_mode
@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "expanded", "one value"])
def test_any_strides(mode: str, layout: str) -> None:
    x = layouts(adversarial_values(6, NIN, torch.float32).reshape(2, 3, NIN))[layout]
    grad_y = layouts(adversarial_values(6, 4, torch.float32, seed=1).reshape(2, 3, 4))[layout]
    before, state = x.clone(), (x._version, x.stride())
    table = Table("table", INDICES, NIN)
    y, _, grad_x = Plain(table, x.dtype, mode, **options(mode)).run(x.reshape(6, NIN), grad_y.reshape(6, 4))
    leaf = x.detach().requires_grad_()
    actual = pool_function(leaf, INDICES, mode, **options(mode))
    assert_same_bits(actual.detach(), y.reshape(2, 3, 4))
    (grad,) = torch.autograd.grad(actual, leaf, grad_y)
    assert_same_bits(grad, grad_x.reshape(2, 3, NIN))
    assert_same_bits(x, before)
    assert (x._version, x.stride()) == state


@any_mode
@any_dtype
def test_dtypes_stay(mode: str, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(INDICES, NIN)
    x = torch.randn(2, NIN).to(dtype)
    y, aux = pool_forward(meta, x, mode, **options(mode))
    assert y.dtype == dtype
    assert (None if aux is None else aux.dtype) == (torch.uint8 if mode == "max" else None)
    assert pool_backward(meta, y, aux, mode, **options(mode)).dtype == dtype


@pytest.mark.parametrize("k", [254, 255, 256, 300])
def test_slots_that_need_more_than_a_byte(k: int) -> None:
    """The last slot wins, and the other column is empty."""
    table = torch.zeros(k, 2, dtype=torch.int64)
    table[-1, 0], table[:, 1] = 1, 2
    meta = pool_meta_from_indices(table, 2)
    _, aux = pool_forward(meta, torch.tensor([0.0, 1.0]), "max")
    assert aux is not None
    none, dtype = (255, torch.uint8) if k <= 255 else (-1, torch.int16)
    assert aux.tolist() == [k - 1, none]
    assert aux.dtype == dtype
    assert pool_backward(meta, torch.tensor([3.0, 5.0]), aux, "max").tolist() == [0.0, 3.0]


@any_dtype
def test_need_aux(dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(INDICES, NIN)
    x = adversarial_values(9, NIN, dtype)
    y, aux = pool_forward(meta, x, "max", need_aux=True)
    assert aux is not None
    alone, none = pool_forward(meta, x, "max", need_aux=False)
    assert none is None
    assert_same_bits(alone, y)
    for mode in ("avg", "sum"):
        assert pool_forward(meta, x, mode, need_aux=True)[1] is None


@pytest.mark.parametrize("rs", [None, 1, 2, 4, 8])
def test_rs_changes_nothing(rs: int | None) -> None:
    meta = pool_meta_from_indices(INDICES, NIN)
    x = adversarial_values(9, NIN, torch.float32)
    y, aux = pool_forward(meta, x, "max", rs)
    assert_same_bits(y, pool_forward(meta, x, "max")[0])
    assert_same_bits(pool_backward(meta, y, aux, "max", rs), pool_backward(meta, y, aux, "max"))


@any_mode
@pytest.mark.parametrize("integers", [torch.uint8, torch.int16, torch.uint32, torch.int64], ids=str)
def test_tables_of_any_integers(mode: str, integers: torch.dtype) -> None:
    x = torch.randn(2, NIN)
    expected = pool_function(x, INDICES, mode, **options(mode))
    assert_same_bits(pool_function(x, INDICES.to(integers), mode, **options(mode)), expected)


# Gradients.


def distinct(rows: int, nin: int) -> Tensor:
    """Far enough apart that no small step changes a winner."""
    order = torch.randperm(rows * nin, generator=torch.Generator().manual_seed(0))
    return order.reshape(rows, nin).double().requires_grad_()


GRADCHECKED = [table for table in small_tables() if table.k < 33]


@any_mode
@pytest.mark.parametrize("table", GRADCHECKED, ids=str)
def test_gradcheck(table: Table, mode: str) -> None:
    """First and second derivatives; columns without neighbours give -inf or NaN and are left out."""
    columns = (table.indices < table.nin).any(0).nonzero().flatten()
    chosen = options(mode, table.indices)

    def function(x: Tensor) -> Tensor:
        return pool_function(x, table.indices, mode, **chosen)[..., columns]

    x = distinct(2, table.nin)
    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


@pytest.mark.parametrize(("mode", "normalize"), [*((mode, False) for mode in MODES), ("weighted", True)])
def test_gradcheck_around_nan(mode: str, normalize: bool) -> None:
    """What is left out gets no gradient, and what is left gets the right one."""
    x = distinct(3, NIN).detach()
    x[0, 1], x[1, 4], x[2, 0] = NAN, NAN, NAN
    real = ~x.isnan()
    chosen = options(mode) | ({"normalize_weights": True} if normalize else {})

    def function(values: Tensor) -> Tensor:
        filled = torch.full_like(x, NAN).masked_scatter(real, values)
        return pool_function(filled, INDICES, mode, nan="omit", empty_value=0.0, **chosen)

    values = x[real].requires_grad_()
    assert torch.autograd.gradcheck(function, (values,))
    assert torch.autograd.gradgradcheck(function, (values,))
    leaf = x.clone().requires_grad_()
    pool_function(leaf, INDICES, mode, nan="omit", **chosen).nansum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert not leaf.grad[~real].any()


@any_mode
@any_dtype
def test_autograd_is_pool_backward(mode: str, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(INDICES, NIN)
    x = adversarial_values(14, NIN, dtype).requires_grad_()
    grad_y = adversarial_values(14, 4, dtype, seed=1)
    y, aux = pool_forward(meta, x, mode, **options(mode))
    assert not y.requires_grad
    expected = pool_backward(meta, grad_y, aux, mode, **options(mode))
    (actual,) = torch.autograd.grad(pool_function(x, INDICES, mode, **options(mode)), x, grad_y)
    assert_same_bits(actual, expected)
    if mode != "weighted":
        for need_aux in [True] if mode == "max" else [True, False]:
            (actual,) = torch.autograd.grad(KNNPoolFunction.apply(x, meta, mode, need_aux), x, grad_y)
            assert_same_bits(actual, expected)


def test_double_backward_by_hand() -> None:
    """The gradient of ``sum(grad_x * v)`` with respect to ``grad_y`` is ``v`` pooled the same way."""
    x = torch.tensor([3.0, 1.0, 2.0, 7.0, 5.0], requires_grad=True)
    v = torch.tensor([1.0, 10.0, 100.0, 1000.0, 10000.0])
    weights = torch.tensor([[1.0, 2.0, NAN, 3.0], [NAN, 4.0, NAN, 5.0], [6.0, 7.0, NAN, 8.0]])
    expected = {
        "max": [10000.0, 1000.0, 0.0, 10000.0],
        "avg": [10001.0 / 2, 1200.0 / 3, 0.0, float(np.float32(10011.0) / np.float32(3))],
        "sum": [10001.0, 1200.0, 0.0, 10011.0],
        "weighted": [60001.0, 200.0 + 4000.0 + 700.0, 0.0, 30.0 + 50000.0 + 8.0],
    }
    for mode, wanted in expected.items():
        grad_y = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
        chosen = {"weights": weights} if mode == "weighted" else {}
        y = pool_function(x, INDICES, mode, **chosen)
        (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
        (actual,) = torch.autograd.grad((grad_x * v).sum(), grad_y, create_graph=True)
        assert actual.tolist() == wanted


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_third_derivatives(mode: str) -> None:
    """Of ``sum(y ** 4)`` on one column: 24 x for each neighbour that counts."""
    x = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
    table = torch.tensor([[0], [1]])
    y = pool_function(x, table, mode).sum()
    value, direction = y**4, torch.tensor([1.0, 1.0], dtype=torch.float64)
    for _ in range(3):
        (grad,) = torch.autograd.grad(value, x, create_graph=True)
        value = (grad * direction).sum()
    reach = {"max": 1, "avg": 1, "sum": 2}[mode]
    assert value.item() == pytest.approx(24 * y.item() * reach**3)


def test_without_aux_max_has_no_gradient() -> None:
    meta = pool_meta_from_indices(INDICES, NIN)
    x = torch.randn(2, NIN, requires_grad=True)
    y = KNNPoolFunction.apply(x, meta, "max", False)
    with pytest.raises(
        InvalidArgumentError, match=r"^the backward of 'max' needs the winning slots: apply with need_a"
    ):
        y.sum().backward()
    KNNPoolFunction.apply(x, meta, "max", True).sum().backward()
    assert x.grad is not None


def saved_by(function: Callable[[], Tensor]) -> list[Tensor]:
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function()
    return saved


def test_what_is_saved_for_backward() -> None:
    x = torch.randn(2, 3, NIN, requires_grad=True)
    (aux,) = saved_by(lambda: pool_function(x, INDICES, "max"))
    assert (aux.dtype, aux.shape) == (torch.uint8, (2, 3, 4))
    for mode in ("avg", "sum", "weighted"):
        assert saved_by(lambda mode=mode: pool_function(x, INDICES, mode, **options(mode))) == []
        (kept,) = saved_by(lambda mode=mode: pool_function(x, INDICES, mode, nan="omit", **options(mode)))
        assert kept.data_ptr() == x.data_ptr()


def test_winning_slots_are_found_only_for_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    original = pooling.reference_forward

    def watched(meta: Any, x: Any, reduction: Any, need_aux: bool) -> Any:
        asked.append(need_aux)
        return original(meta, x, reduction, need_aux)

    monkeypatch.setattr(pooling, "reference_forward", watched)
    x = torch.randn(2, NIN)
    pool_function(x, INDICES, "max")
    pool_function(x.clone().requires_grad_(), INDICES, "max")
    with torch.no_grad():
        pool_function(x.clone().requires_grad_(), INDICES, "max")
    assert asked == [False, True, False]


@any_mode
def test_no_graph_without_need(mode: str) -> None:
    plain = torch.randn(2, NIN)
    leaf = plain.clone().requires_grad_()
    expected = pool_function(plain, INDICES, mode, **options(mode))
    assert not expected.requires_grad
    assert saved_by(lambda: pool_function(plain, INDICES, mode, **options(mode))) == []
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = pool_function(leaf, INDICES, mode, **options(mode))
        assert not y.requires_grad
        assert_same_bits(y.clone(), expected)
    # What was made in there can be used out here.
    pool_function(leaf, INDICES, mode, **options(mode)).nansum().backward()


@any_mode
def test_tables_and_inputs_of_inference_mode(mode: str) -> None:
    with torch.inference_mode():
        table, x = INDICES.clone(), torch.ones(2, NIN)
        first = pool_function(x, table, mode, **options(mode)).clone()
    assert_same_bits(
        pool_function(torch.ones(2, NIN, requires_grad=True), table, mode, **options(mode)).detach(), first
    )
    assert_same_bits(pool_function(x, table, mode, **options(mode)), first)


@any_mode
@any_dtype
def test_autocast_leaves_the_dtype_alone(mode: str, dtype: torch.dtype) -> None:
    x = adversarial_values(9, NIN, dtype).requires_grad_()
    expected = pool_function(x, INDICES.clone(), mode, **options(mode))
    (expected_grad,) = torch.autograd.grad(expected.nansum(), x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = pool_function(x, INDICES.clone(), mode, **options(mode))
    assert_same_bits(y.detach(), expected.detach())
    (grad,) = torch.autograd.grad(y.nansum(), x)
    assert_same_bits(grad, expected_grad)


@any_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(mode: str, reentrant: bool) -> None:
    x = torch.randn(2, NIN, requires_grad=True)
    chosen = options(mode) | {"empty_value": 0.0}

    def block(x: Tensor) -> Tensor:
        return pool_function(x * 2, INDICES, mode, **chosen) ** 2

    checkpoint(block, x, use_reentrant=reentrant).sum().backward()
    (expected,) = torch.autograd.grad(block(x).sum(), x)
    assert x.grad is not None
    assert_same_bits(x.grad, expected)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@any_mode
@pytest.mark.usefixtures("deterministic")
def test_deterministic_algorithms(mode: str) -> None:
    x = torch.randn(3, NIN, requires_grad=True)
    y = pool_function(x, INDICES.clone(), mode, empty_value=0.0, **options(mode))
    (grad_x,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    grad_x.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_the_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    x = adversarial_values(9, NIN, torch.float32)
    expected = [pool_function(x, INDICES.clone(), mode, **options(mode)) for mode in MODES]
    torch.set_default_dtype(dtype)
    try:
        actual = [pool_function(x, INDICES.clone(), mode, **options(mode)) for mode in MODES]
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


# Tables and plans.


@any_mode
def test_a_table_changed_in_place_is_followed(mode: str) -> None:
    x = torch.tensor([1.0, 2.0, 4.0])
    table = torch.tensor([[0], [3]])
    chosen = {"weights": torch.ones(2, 1)} if mode == "weighted" else {}
    assert pool_function(x, table, mode, **chosen).tolist() == [1.0]
    table[0, 0] = 2
    assert pool_function(x, table, mode, **chosen).tolist() == [4.0]
    table.fill_(1)
    expected = 4.0 if mode in ("sum", "weighted") else 2.0
    assert pool_function(x, table, mode, **chosen).tolist() == [expected]


def test_a_change_of_the_table_leaves_the_backward_alone() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    table = torch.tensor([[0], [3]])
    y = pool_function(x, table, "sum")
    table.fill_(1)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 0.0, 0.0]


def test_weights_changed_in_place_are_followed() -> None:
    x, table, weights = torch.tensor([1.0, 2.0]), torch.tensor([[0], [1]]), torch.ones(2, 1)
    assert pool_function(x, table, "weighted", weights=weights).tolist() == [3.0]
    weights[1, 0] = 10.0
    assert pool_function(x, table, "weighted", weights=weights).tolist() == [21.0]


def test_clearing_the_cache_changes_no_result() -> None:
    x = torch.randn(2, NIN, requires_grad=True)
    y = pool_function(x, INDICES, "max")
    clear_pool_cache()
    y.sum().backward()
    assert_same_bits(pool_function(x, INDICES, "max").detach(), y.detach())


# Layers.


class Layer(nn.Module):
    """What fovi's KNNPoolingLayer shows of itself."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.register_buffer("knn_indices_pad_token", INDICES.clone())
        self.knn_pad_token_val = NIN
        if mode == "gaussian":
            self.register_buffer("gaussian_weights", options("weighted")["weights"].float())

    def forward(self, x: Tensor) -> Tensor:
        y = optimized_pool_forward(self, x)
        assert y is not None
        return y


LAYER_MODES = ("max", "avg", "sum", "gaussian")
any_layer = pytest.mark.parametrize("mode", LAYER_MODES)


def expected_of(layer: Layer, x: Tensor) -> Tensor:
    if layer.mode == "gaussian":
        weights = layer.gaussian_weights
        return pool_function(x, layer.knn_indices_pad_token, "weighted", weights=weights, normalize_weights=True)
    return pool_function(x, layer.knn_indices_pad_token, layer.mode)


@any_layer
def test_a_layer(mode: str) -> None:
    layer = Layer(mode)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    x = torch.randn(2, 3, NIN, requires_grad=True)
    y = layer(x)
    assert_same_bits(y.detach(), expected_of(layer, x).detach())
    (grad,) = torch.autograd.grad(y.nansum(), x)
    (expected,) = torch.autograd.grad(expected_of(layer, x).nansum(), x)
    assert_same_bits(grad, expected)
    after = layer.state_dict()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert_same_bits(after[name], tensor)
    plan = layer._knn_pool_cuda_meta
    layer(x)
    assert layer._knn_pool_cuda_meta is plan


@any_layer
def test_a_layer_without_gradients(mode: str) -> None:
    layer, x = Layer(mode), torch.randn(2, NIN)
    expected = layer(x)
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            assert_same_bits(layer(x).clone(), expected)


@any_layer
@pytest.mark.parametrize("used", [True, False])
def test_copies_and_files_of_a_layer(mode: str, used: bool) -> None:
    layer, x = Layer(mode), torch.randn(2, NIN)
    expected = Layer(mode)(x)
    if used:
        layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    twins = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)]
    for twin in twins:
        assert_same_bits(twin(x), expected)
        twin.knn_indices_pad_token.fill_(0)
        assert_same_bits(twin(x), expected_of(twin, x))
        assert_same_bits(layer(x), expected)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    fresh = Layer(mode)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert_same_bits(fresh(x), expected)


def test_what_is_derived_from_gaussian_weights_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from knnpool_gen.runtime import weights as module

    derived: list[Any] = []
    original = module._derive
    monkeypatch.setattr(module, "_derive", lambda *facts: derived.append(facts) or original(*facts))
    layer, x = Layer("gaussian"), torch.randn(2, NIN)
    for _ in range(3):
        layer(x)
    assert len(derived) == 1


def test_layers_that_must_find_another_way() -> None:
    x = torch.randn(2, NIN)
    assert optimized_pool_forward(Layer("median"), x) is None
    for unsupported in (x.to(torch.complex64), x.to(torch.int32), x.to(torch.float8_e4m3fn)):
        assert optimized_pool_forward(Layer("max"), unsupported) is None
    assert optimized_pool_forward(Layer("max"), x) is not None


def test_mistakes_on_layers_are_errors() -> None:
    x = torch.randn(2, NIN)
    layer = Layer("max")
    with pytest.raises(
        InvalidArgumentError, match=r"^x has shape \(2, 4\), its last dimension 4; the plan has Nin = 5$"
    ):
        optimized_pool_forward(layer, x[:, :4])
    layer.knn_indices_pad_token[1, 2] = -3
    with pytest.raises(InvalidArgumentError, match=r"^indices\[1, 2\] = -3 is negative"):
        optimized_pool_forward(layer, x)
    layer.knn_indices_pad_token = INDICES.float()
    with pytest.raises(UnsupportedTypeError, match=r"integer tensor, not torch\.float32$"):
        optimized_pool_forward(layer, x)
    del layer.knn_indices_pad_token
    with pytest.raises(UnsupportedTypeError, match=r"^Layer has no knn_indices_pad_token"):
        optimized_pool_forward(layer, x)
    layer = Layer("max")
    del layer.mode
    with pytest.raises(AttributeError, match="mode"):
        optimized_pool_forward(layer, x)


def test_a_layer_dies_with_its_plan() -> None:
    layer = Layer("max")
    layer(torch.randn(2, NIN))
    plan = weakref.ref(ensure_pool_metadata(layer, "cpu"))
    del layer
    gc.collect()
    assert plan() is None


def test_gradients_and_slots_that_are_not_dense_are_named() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 1], [2, 5]]), 4)
    _, aux = pool_forward(meta, torch.ones(3, 4), "max")
    assert aux is not None
    with pytest.raises(
        UnsupportedTypeError, match=r"^grad_y must be a strided tensor, not one of layout torch\.sparse_coo$"
    ):
        pool_backward(meta, torch.ones(3, 2).to_sparse(), aux, "max")
    with pytest.raises(
        UnsupportedTypeError, match=r"^aux must be a strided tensor, not one of layout torch\.sparse_coo$"
    ):
        pool_backward(meta, torch.ones(3, 2), aux.to_sparse(), "max")
