"""The public functions against their rules, each written once more as a loop over plain numbers.

On the CPU they run through the reference, the oracle of every kernel; nothing here is shared with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from knnpool_gen import pool_backward, pool_forward, pool_function, pool_meta_from_indices
from knnpool_gen.errors import InvalidArgumentError
from tables import DTYPES, Table, adversarial_values, assert_same_bits, small_tables, wide_tables

INF = float("inf")
NAN = float("nan")
MODES = ("max", "avg", "sum", "weighted")
NAN_RULES = ("omit", "propagate")
DEFAULTS = {"max": "omit", "avg": "propagate", "sum": "propagate", "weighted": "propagate"}

any_mode = pytest.mark.parametrize("mode", MODES)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_nan_rule = pytest.mark.parametrize("nan", NAN_RULES)


@dataclass(frozen=True)
class Rule:
    """A mode with its options, weights aside."""

    mode: str
    nan: str
    normalize: bool = False
    empty_value: float | None = None

    def __str__(self) -> str:
        return f"{self.mode}-{self.nan}" + "-normalized" * self.normalize

    @property
    def weighted(self) -> bool:
        return self.mode == "weighted"


RULES = [
    *(Rule(mode, nan) for mode in MODES for nan in NAN_RULES),
    *(Rule("weighted", nan, normalize=True) for nan in NAN_RULES),
]

any_rule = pytest.mark.parametrize("rule", RULES, ids=str)


# The rules as loops.


class Loop:
    """A table, and what its rules say for rows of values; ``weights`` is ``[K, Nout]`` or None."""

    def __init__(self, table: Table, rule: Rule, dtype: torch.dtype, weights: Tensor | None) -> None:
        self.table, self.rule, self.dtype = table, rule, dtype
        self.number: type[np.floating[Any]] = np.float64 if dtype is torch.float64 else np.float32
        self.columns: list[list[int]] = table.indices.T.tolist()
        self.weights = None if weights is None else [[self.number(w) for w in row] for row in weights.double().tolist()]
        few = 255 if table.k <= 255 else -1
        self.none = few
        self.aux_dtype = torch.uint8 if few == 255 else torch.int16 if table.k < 2**15 else torch.int32

    def weight(self, k: int, n: int) -> Any:
        return self.number(1) if self.weights is None else self.weights[k][n]

    def used(self, row: list[float], n: int) -> list[tuple[int, int]]:
        """Slot and node of what is added up in a column."""
        real = [(k, m) for k, m in enumerate(self.columns[n]) if m < self.table.nin]
        return [(k, m) for k, m in real if not (self.rule.nan == "omit" and np.isnan(row[m]))]

    def divisor(self, row: list[float], n: int) -> Any:
        if self.rule.mode == "avg":
            return self.number(len(self.used(row, n)))
        size = self.number(0)
        for k, _ in self.used(row, n):
            size += self.weight(k, n)
        return size + self.number(1e-8)

    def maximum(self, row: list[float], n: int) -> tuple[float, int]:
        real = [(k, row[m]) for k, m in enumerate(self.columns[n]) if m < self.table.nin]
        if not real:
            return -INF, self.none
        if self.rule.nan == "propagate":
            for k, value in real:
                if np.isnan(value):
                    return NAN, k
        best, winner = -INF, real[0][0]
        for k, value in real:
            if value > best:
                best, winner = value, k
        return best, winner

    def total(self, row: list[float], n: int) -> Any:
        total = self.number(0)
        for k, m in self.used(row, n):
            value = self.number(row[m])
            total += value if self.weights is None else self.weights[k][n] * value
        divided = self.rule.mode == "avg" or self.rule.normalize
        return total / self.divisor(row, n) if divided else total

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        shape = (x.shape[0], self.table.nout)
        y = np.zeros(shape, self.number)
        aux = np.zeros(shape, np.int64)
        for r, row in enumerate(x.double().tolist()):
            for n, column in enumerate(self.columns):
                if self.rule.mode == "max":
                    y[r, n], aux[r, n] = self.maximum(row, n)
                else:
                    y[r, n] = self.total(row, n)
                if self.rule.empty_value is not None and all(m >= self.table.nin for m in column):
                    y[r, n] = self.rule.empty_value
        slots = torch.from_numpy(aux).to(self.aux_dtype) if self.rule.mode == "max" else None
        return torch.from_numpy(y).to(self.dtype), slots

    def share(self, gradient: Any, divisor: Any, k: int, n: int) -> Any:
        """What slot k of column n gives to its node."""
        if self.rule.mode == "avg":
            return gradient / divisor
        if self.rule.normalize:
            return gradient * (self.weight(k, n) / divisor)
        return gradient if self.weights is None else self.weights[k][n] * gradient

    def backward(self, grad_y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient, and the sums of the absolute values of what was added up for it."""
        grad_x = np.zeros((x.shape[0], self.table.nin), self.number)
        absolute = np.zeros_like(grad_x)
        for r, (row, gradients) in enumerate(zip(x.double().tolist(), grad_y.double().tolist(), strict=True)):
            divisors = [self.divisor(row, n) for n in range(self.table.nout)]
            receivers = [(k, n, m) for n in range(self.table.nout) for k, m in self._receivers(row, n)]
            for k, n, m in sorted(receivers):
                share = self.share(self.number(gradients[n]), divisors[n], k, n)
                grad_x[r, m] += share
                absolute[r, m] += abs(share)
        return torch.from_numpy(grad_x).to(self.dtype), torch.from_numpy(absolute)

    def _receivers(self, row: list[float], n: int) -> list[tuple[int, int]]:
        if self.rule.mode != "max":
            return self.used(row, n)
        winner = self.maximum(row, n)[1]
        return [] if winner == self.none else [(winner, self.columns[n][winner])]


def weights_for(table: Table, rule: Rule, seed: int = 0) -> Tensor | None:
    """Some are 0 or negative, unless they are to be divided by their sum; those of pads are NaN and inf."""
    if not rule.weighted:
        return None
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(table.k, table.nout, generator=generator) + 0.1
    if not rule.normalize:
        weights *= torch.randint(-1, 3, weights.shape, generator=generator)
    bad = torch.tensor([NAN, INF, -INF])[torch.arange(weights.numel()).reshape(weights.shape) % 3]
    return torch.where(table.indices < table.nin, weights, bad)


def check(table: Table, rule: Rule, dtype: torch.dtype, rows: int, seed: int) -> None:
    """Forward, backward and autograd on adversarial values."""
    weights = weights_for(table, rule, seed)
    loop = Loop(table, rule, dtype, weights)
    x = adversarial_values(rows, table.nin, dtype, seed)
    grad_y = adversarial_values(rows, table.nout, dtype, seed + 1)
    if rule.normalize:  # by how much one may be off is known for ordinary numbers only
        grad_y = torch.randn(rows, table.nout, generator=torch.Generator().manual_seed(seed)).to(dtype)
    with np.errstate(all="ignore"):
        expected, expected_aux = loop.forward(x)
        expected_grad, absolute = loop.backward(grad_y, x)

    meta = pool_meta_from_indices(table.indices, table.nin)
    options: dict[str, Any] = {"nan": rule.nan, "weights": weights, "normalize_weights": rule.normalize}
    y, aux = pool_forward(meta, x, rule.mode, empty_value=rule.empty_value, **options)
    assert_same_bits(y, expected)
    assert (aux is None) == (expected_aux is None)
    if aux is not None and expected_aux is not None:
        assert_same_bits(aux, expected_aux)
        none = pool_forward(meta, x, rule.mode, need_aux=False, empty_value=rule.empty_value, **options)
        assert none[1] is None
        assert_same_bits(none[0], expected)
    grad_x = pool_backward(meta, grad_y, aux, rule.mode, x=x, **options)
    if rule.normalize:
        terms = 2 * table.k * torch.finfo(absolute.dtype).eps * absolute
        rounding = torch.finfo(dtype).eps * expected_grad.abs() + torch.finfo(dtype).smallest_normal
        assert grad_x.dtype == dtype
        assert ((grad_x.double() - expected_grad.double()).abs() <= terms + rounding).all()
    else:
        assert_same_bits(grad_x, expected_grad)

    x.requires_grad_()
    y = pool_function(x, table.indices, rule.mode, empty_value=rule.empty_value, **options)
    assert_same_bits(y, expected)
    (again,) = torch.autograd.grad(y, x, grad_y)
    assert_same_bits(again, grad_x)


@pytest.mark.parametrize("table", small_tables(), ids=str)
@any_rule
def test_small_tables(table: Table, rule: Rule) -> None:
    for dtype in DTYPES:
        check(table, rule, dtype, rows=7, seed=0)


@pytest.mark.parametrize("table", wide_tables(), ids=str)
@any_rule
def test_wide_tables(table: Table, rule: Rule) -> None:
    dtype = DTYPES[table.k % 4]  # each of them with some K
    check(table, rule, dtype, rows=1 if table.nin > 1000 else 3, seed=1)


@pytest.mark.parametrize("k", [0, 1, 2, 127, 128, 129, 254, 255, 256, 257, 300, 1000])
@any_rule
def test_global_pooling(k: int, rule: Rule) -> None:
    generator = torch.Generator().manual_seed(k)
    table = Table(f"k{k}", torch.randint(70, (k, 1), generator=generator), 60)
    check(table, rule, torch.float32, rows=4, seed=2)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    k, nout, nin = draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 6))
    entry = st.integers(0, nin + 2) | st.sampled_from([2**31, 2**32, 2**32 + 3, 2**63 - 1])
    entries = draw(st.lists(entry, min_size=k * nout, max_size=k * nout))
    return Table("drawn", torch.tensor(entries, dtype=torch.int64).reshape(k, nout), nin)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    rule = draw(st.sampled_from(RULES))
    empty_value = draw(st.none() | st.sampled_from([0.0, -0.0, -1.5, NAN, INF, -INF]))
    return Rule(rule.mode, rule.nan, rule.normalize, empty_value)


@settings(deadline=None, derandomize=True, max_examples=600)
@given(tables(), rules(), st.sampled_from(DTYPES), st.integers(0, 8), st.integers(0, 2**32))
def test_drawn_tables(table: Table, rule: Rule, dtype: torch.dtype, rows: int, seed: int) -> None:
    check(table, rule, dtype, rows, seed)


SPECIAL = [NAN, INF, -INF, 0.0, -0.0, 1e-40, 1.0, -1.0, 3e38]


@settings(deadline=None, derandomize=True, max_examples=400)
@given(st.data(), tables(), rules())
def test_drawn_values(data: st.DataObject, table: Table, rule: Rule) -> None:
    """Mostly special values, which shrink to the one that matters; forward only."""
    values = st.sampled_from(SPECIAL) | st.floats(width=32)
    x = torch.tensor(data.draw(st.lists(values, min_size=table.nin, max_size=table.nin))).reshape(1, table.nin)
    weights = weights_for(table, rule)
    with np.errstate(all="ignore"):
        expected, _ = Loop(table, rule, torch.float32, weights).forward(x)
    meta = pool_meta_from_indices(table.indices, table.nin)
    y, _ = pool_forward(
        meta,
        x,
        rule.mode,
        nan=rule.nan,
        empty_value=rule.empty_value,
        weights=weights,
        normalize_weights=rule.normalize,
    )
    assert_same_bits(y, expected)


# The rules by hand.


def pooled(
    indices: list[list[int]],
    x: list[float],
    mode: str,
    grad_y: list[float] | None = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[list[str], list[str]]:
    """What comes out, and the gradient for ``grad_y`` (ones), as text, so that NaN is NaN and -0 is not 0."""
    table = torch.tensor(indices)
    if mode == "weighted":
        options.setdefault("weights", torch.ones(table.shape))
    values = torch.tensor(x, dtype=dtype, requires_grad=True)
    y = pool_function(values, table, mode, **options)
    gradient = torch.ones_like(y) if grad_y is None else torch.tensor(grad_y, dtype=dtype)
    (grad_x,) = torch.autograd.grad(y, values, gradient)
    return [str(v) for v in y.tolist()], [str(v) for v in grad_x.tolist()]


@any_mode
def test_the_default_nan_rule(mode: str) -> None:
    x, indices = [NAN, 1.0, 5.0], [[0, 1], [1, 2]]
    default = pooled(indices, x, mode)
    assert default == pooled(indices, x, mode, nan=DEFAULTS[mode])
    (other,) = set(NAN_RULES) - {DEFAULTS[mode]}
    assert default != pooled(indices, x, mode, nan=other)


def test_sum() -> None:
    assert pooled([[0, 1], [2, 3], [0, 3]], [1.0, 2.0, 4.0], "sum", [1.0, 10.0]) == (
        ["6.0", "2.0"],
        ["2.0", "10.0", "1.0"],
    )


def test_weighted() -> None:
    weights = torch.tensor([[0.5, 2.0], [3.0, NAN], [0.25, INF]])
    indices, x = [[0, 1], [2, 3], [0, 3]], [1.0, 2.0, 4.0]
    assert pooled(indices, x, "weighted", [1.0, 10.0], weights=weights) == (
        ["12.75", "4.0"],
        ["0.75", "20.0", "3.0"],
    )
    eps = 1e-8
    y, grad_x = pooled(
        indices, x, "weighted", [1.0, 10.0], torch.float64, weights=weights.double(), normalize_weights=True
    )
    assert [float(v) for v in y] == pytest.approx([12.75 / (3.75 + eps), 4 / (2 + eps)], rel=1e-15)
    assert [float(v) for v in grad_x] == pytest.approx(
        [0.75 / (3.75 + eps), 20 / (2 + eps), 3 / (3.75 + eps)], rel=1e-15
    )


def test_weights_that_sum_to_nothing() -> None:
    y, grad_x = pooled([[0]], [3.0], "weighted", dtype=torch.float64, weights=torch.zeros(1, 1), normalize_weights=True)
    assert (y, grad_x) == (["0.0"], ["0.0"])


def test_average_without_nan_divides_by_what_is_left() -> None:
    indices = [[0, 0, 0], [1, 0, 2], [2, 3, 2]]
    assert pooled(indices, [NAN, 2.0, 6.0], "avg", [1.0, 1.0, 8.0], nan="omit") == (
        ["4.0", "nan", "6.0"],
        ["0.0", "0.5", "8.5"],
    )


def test_sum_without_nan() -> None:
    assert pooled([[0, 0], [1, 0]], [NAN, 2.0], "sum", [3.0, 5.0], nan="omit") == (["2.0", "0.0"], ["0.0", "3.0"])


def test_normalized_weights_without_nan_leave_its_weight_out() -> None:
    weights = torch.tensor([[100.0, 7.0], [1.0, 7.0], [3.0, 7.0]])
    indices, x = [[0, 0], [1, 0], [2, 3]], [NAN, 4.0, 8.0]
    options: dict[str, Any] = {"nan": "omit", "weights": weights, "normalize_weights": True, "dtype": torch.float64}
    y, grad_x = pooled(indices, x, "weighted", [1.0, 1.0], **options)
    assert [float(v) for v in y] == pytest.approx([7.0, 0.0], rel=1e-8)
    assert [float(v) for v in grad_x] == pytest.approx([0.0, 0.25, 0.75], rel=1e-8)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_weight_left_out_may_be_anything(bad: float) -> None:
    weights = torch.tensor([[bad], [1.0]])
    for normalize in (False, True):
        options: dict[str, Any] = {"nan": "omit", "weights": weights, "normalize_weights": normalize}
        assert pooled([[0], [1]], [NAN, 4.0], "weighted", **options) == (["4.0"], ["0.0", "1.0"])


def test_the_first_nan_wins_if_it_propagates() -> None:
    indices = [[2, 2], [0, 2], [1, 2], [3, 3]]
    assert pooled(indices, [NAN, NAN, 9.0], "max", [5.0, 7.0], nan="propagate") == (
        ["nan", "9.0"],
        ["5.0", "0.0", "7.0"],
    )
    meta = pool_meta_from_indices(torch.tensor(indices), 3)
    _, aux = pool_forward(meta, torch.tensor([NAN, NAN, 9.0]), "max", nan="propagate")
    assert aux is not None
    assert aux.tolist() == [1, 0]


@any_nan_rule
def test_nothing_but_minus_inf(nan: str) -> None:
    indices = [[9, 9], [1, 9], [0, 9]]
    assert pooled(indices, [-INF, -INF], "max", nan=nan) == (["-inf", "-inf"], ["0.0", "1.0"])
    assert pooled(indices, [-INF, -INF], "sum", nan=nan) == (["-inf", "0.0"], ["1.0", "1.0"])


def test_nothing_but_nan() -> None:
    indices = [[9], [0], [1]]
    assert pooled(indices, [NAN, NAN], "max", nan="omit") == (["-inf"], ["1.0", "0.0"])
    assert pooled(indices, [NAN, NAN], "avg", nan="omit") == (["nan"], ["0.0", "0.0"])
    assert pooled(indices, [NAN, NAN], "sum", nan="omit") == (["0.0"], ["0.0", "0.0"])
    assert pooled(indices, [NAN, NAN], "weighted", nan="omit") == (["0.0"], ["0.0", "0.0"])
    for mode in MODES:
        assert pooled(indices, [NAN, NAN], mode, nan="propagate")[0] == ["nan"]


@any_nan_rule
@any_dtype
def test_the_first_of_equals_wins(nan: str, dtype: torch.dtype) -> None:
    y, grad_x = pooled([[0, 2], [1, 1], [2, 0]], [0.0, -0.0, -0.0], "max", [1.0, 2.0], dtype, nan=nan)
    assert (y, grad_x) == (["0.0", "-0.0"], ["1.0", "0.0", "2.0"])


@any_mode
@any_nan_rule
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_gradient_reaches_its_owners_only(mode: str, nan: str, bad: float) -> None:
    """Column 1 reads nodes 1 and 2, and 2 is the larger; column 2 is empty."""
    indices, x = [[0, 1, 9], [0, 2, 9]], [1.0, 2.0, 3.0, NAN]
    _, grad_x = pooled(indices, x, mode, [1.0, bad, bad], nan=nan)
    expected = {"max": ["1.0", "0.0", str(bad)], "avg": ["1.0", str(bad), str(bad)]}
    assert grad_x == [*expected.get(mode, ["2.0", str(bad), str(bad)]), "0.0"]


@pytest.mark.parametrize(("mode", "empty"), [("max", -INF), ("avg", NAN), ("sum", 0.0), ("weighted", 0.0)])
@any_nan_rule
def test_empty_columns(mode: str, empty: float, nan: str) -> None:
    for indices in ([[1, 0], [2, 9]], [[2**40, 0], [1, 0]]):
        y, grad_x = pooled(indices, [3.0], mode, [NAN, 1.0], nan=nan)
        assert y[0] == str(empty)
        assert y[1] == ("6.0" if (mode in ("sum", "weighted") and indices[1][1] == 0) else "3.0")
        assert "nan" not in grad_x


@any_mode
@any_nan_rule
@any_dtype
@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, NAN, INF, -INF, 7])
def test_empty_value(mode: str, nan: str, dtype: torch.dtype, value: float) -> None:
    table = torch.tensor([[5, 0, 9, 1, 6], [7, 3, 5, 1, 5]])
    empty = torch.tensor([True, False, True, False, True])
    options: dict[str, Any] = {"nan": nan, "weights": torch.ones(2, 5) if mode == "weighted" else None}
    x = adversarial_values(7, 5, dtype)
    meta = pool_meta_from_indices(table, 5)
    plain, plain_aux = pool_forward(meta, x, mode, **options)
    y, aux = pool_forward(meta, x, mode, empty_value=value, **options)
    assert_same_bits(y[:, ~empty], plain[:, ~empty])
    assert_same_bits(y[:, empty], torch.full((7, 3), float(value)).to(dtype))
    if aux is not None and plain_aux is not None:
        assert_same_bits(aux, plain_aux)

    x.requires_grad_()
    grad_y = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    grads = []
    for gradient in (grad_y, grad_y.masked_fill(empty, NAN)):
        y = pool_function(x, table, mode, empty_value=value, **options)
        grads += torch.autograd.grad(y, x, gradient)
    y = pool_function(x, table, mode, **options)
    grads += torch.autograd.grad(y, x, grad_y)
    assert_same_bits(grads[0], grads[1])
    assert_same_bits(grads[0], grads[2])


def test_empty_value_is_rounded_as_any_other() -> None:
    table = torch.tensor([[2, 0]])
    for value, expected in ((-1e9, -INF), (65519.0, 65504.0), (65520.0, INF), (0.1, torch.tensor(0.1).half().item())):
        y = pool_function(torch.ones(2, dtype=torch.float16), table, "sum", empty_value=value)
        assert y.tolist() == [expected, 1.0]
    assert pool_function(torch.ones(2), table, "sum", empty_value=1e300).tolist() == [INF, 1.0]
    assert pool_function(torch.ones(2).double(), table, "sum", empty_value=1e300).tolist() == [1e300, 1.0]
    assert pool_function(torch.ones(2), table, "sum", empty_value=torch.tensor(3)).tolist() == [3.0, 1.0]  # type: ignore[arg-type]


def test_an_empty_value_beyond_float64() -> None:
    def pool(x: Tensor) -> Tensor:
        return pool_function(x, torch.tensor([[2, 0]]), "sum", empty_value=10**400)

    for call in (pool, torch.func.vmap(pool)):
        with pytest.raises(InvalidArgumentError, match="empty_value is a whole number that float64 does not reach"):
            call(torch.ones(2, 2))


@any_mode
def test_denormals_are_kept(mode: str) -> None:
    tiny = torch.tensor(1e-40).item()
    y, grad_x = pooled([[0], [1]], [0.0, tiny], mode, [tiny])
    half = str(torch.tensor(tiny / 2).item())
    expected = {"max": (tiny, "0.0", str(tiny)), "avg": (half, half, half)}
    value, *gradient = expected.get(mode, (tiny, str(tiny), str(tiny)))
    assert (y, grad_x) == ([str(value)], gradient)


@pytest.mark.parametrize("mode", ["avg", "sum", "weighted"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_summed_in_float32_and_rounded_once(mode: str, dtype: torch.dtype) -> None:
    """1 added 64 times to 1024 is nothing in either dtype if each sum is rounded (bfloat16: to 8 bits)."""
    table = [[0], *[[1]] * 64]
    scale = 65 if mode == "avg" else 1
    y, grad_x = pooled(table, [1024.0, 1.0], mode, dtype=dtype)
    assert float(y[0]) == torch.tensor(1088.0 / scale).to(dtype).item()
    assert float(grad_x[1]) == torch.tensor(64.0 / scale).to(dtype).item()


@pytest.mark.parametrize("mode", ["avg", "sum", "weighted"])
def test_float64_is_summed_in_float64(mode: str) -> None:
    """2**-40 is lost beside 1 in float32."""
    small = 2.0**-40
    y, _ = pooled([[0], [1]], [1.0, small], mode, dtype=torch.float64)
    assert float(y[0]) == (1 + small) / (2 if mode == "avg" else 1)
    _, grad_x = pooled([[0, 0]], [1.0], mode, [1.0, small], dtype=torch.float64)
    assert float(grad_x[0]) == 1 + small


def test_weights_are_read_in_the_precision_of_the_sum() -> None:
    weight = torch.tensor([[1 + 2.0**-40]], dtype=torch.float64)
    assert pooled([[0]], [1.0], "weighted", dtype=torch.float64, weights=weight)[0] == [str(weight.item())]
    assert pooled([[0]], [1.0], "weighted", weights=weight)[0] == ["1.0"]


@any_mode
@any_nan_rule
def test_pads_have_no_value_and_no_weight(mode: str, nan: str) -> None:
    """Whatever is written in the weights of pads, nothing changes by a bit."""
    table = torch.tensor([[0, 7, 9], [8, 1, 7], [2, 2**40, 9]])
    x, grad_y = adversarial_values(7, 7, torch.float32), adversarial_values(7, 3, torch.float32, seed=1)
    meta = pool_meta_from_indices(table, 7)
    results = []
    for filling in (0.0, NAN, INF, -INF):
        weights = torch.linspace(0.5, 2, 9).reshape(3, 3).masked_fill(table >= 7, filling)
        options: dict[str, Any] = {"nan": nan}
        if mode == "weighted":
            options |= {"weights": weights, "normalize_weights": True}
        y, aux = pool_forward(meta, x, mode, **options)
        results.append((y, pool_backward(meta, grad_y, aux, mode, x=x, **options)))
    for y, grad_x in results[1:]:
        assert_same_bits(y, results[0][0])
        assert_same_bits(grad_x, results[0][1])
    assert (results[0][1][:, [3, 4, 5, 6]] == 0).all()  # nodes that nobody reads


@any_mode
@any_dtype
def test_dtypes_and_shapes(mode: str, dtype: torch.dtype) -> None:
    """The gradient has the dtype of ``grad_y``, whatever the input had."""
    meta = pool_meta_from_indices(torch.tensor([[0, 1, 9], [2, 9, 9]]), 3)
    for shape in ((), (2,), (2, 3), (0, 2)):
        x = torch.ones(*shape, 3, dtype=dtype)
        for nan in NAN_RULES:
            options: dict[str, Any] = {"nan": nan, "weights": torch.ones(2, 3) if mode == "weighted" else None}
            y, aux = pool_forward(meta, x, mode, **options)
            assert (y.dtype, y.shape) == (dtype, (*shape, 3))
            for other in DTYPES:
                grad_x = pool_backward(meta, y.to(other), aux, mode, x=x, **options)
                assert (grad_x.dtype, grad_x.shape) == (other, (*shape, 3))


# Slots, indices and entries of every width.


@pytest.mark.parametrize("k", [128, 129, 130, 254, 255, 256, 257, 300, 1000])
@pytest.mark.parametrize("nan", NAN_RULES)
def test_every_slot_can_win(k: int, nan: str) -> None:
    """Row r has its maximum at slot r; each slot has a node of its own, one for each of two columns."""
    nodes = torch.arange(2 * k).reshape(k, 2)
    meta = pool_meta_from_indices(nodes, 2 * k)
    x = torch.zeros(k, 2 * k).scatter_(1, nodes, 1.0)
    y, aux = pool_forward(meta, x, "max", nan=nan)
    assert aux is not None
    assert aux.dtype == (torch.uint8 if k <= 255 else torch.int16)
    assert torch.equal(y, torch.ones(k, 2))
    assert torch.equal(aux.long(), torch.arange(k)[:, None].expand(k, 2))
    assert torch.equal(pool_backward(meta, torch.full((k, 2), 3.0), aux, "max", nan=nan), 3 * x)


@pytest.mark.parametrize(
    ("k", "dtype", "none"),
    [(0, torch.uint8, 255), (255, torch.uint8, 255), (256, torch.int16, -1), (1000, torch.int16, -1)],
)
def test_aux_of_an_empty_column(k: int, dtype: torch.dtype, none: int) -> None:
    meta = pool_meta_from_indices(torch.full((k, 2), 4), 4)
    y, aux = pool_forward(meta, torch.ones(3, 4), "max")
    assert aux is not None
    assert aux.dtype == dtype
    assert aux.tolist() == [[none, none]] * 3
    assert y.tolist() == [[-INF, -INF]] * 3
    assert torch.equal(pool_backward(meta, torch.full((3, 2), NAN), aux, "max"), torch.zeros(3, 4))


@pytest.mark.parametrize(("k", "slots"), [(2, [2, 3, 128, 254, 255]), (300, [300, 32767, -1, -32768, -2])])
def test_a_slot_that_holds_nothing_gives_no_gradient(k: int, slots: list[int]) -> None:
    """A pad, a slot that the table does not have, and none at all: nobody's, so nobody gets it."""
    table = torch.zeros(k, len(slots) + 2, dtype=torch.int64)
    table[1:] = 3
    meta = pool_meta_from_indices(table, 3)
    _, aux = pool_forward(meta, torch.ones(3), "max")
    assert aux is not None
    forged = torch.tensor([0, 1, *slots], dtype=aux.dtype)
    assert pool_backward(meta, torch.arange(1.0, len(forged) + 1), forged, "max").tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(("k", "dtype"), [(32767, torch.int16), (32768, torch.int32), (40000, torch.int32)])
def test_slots_of_large_k(k: int, dtype: torch.dtype) -> None:
    """All but the ends of a column are pads; column 1 is empty."""
    table = torch.full((k, 3), 9, dtype=torch.uint8)
    table[[0, -2, -1], 0] = torch.tensor([0, 1, 2], dtype=torch.uint8)
    table[-1, 2] = 3
    meta = pool_meta_from_indices(table, 4)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, NAN, -INF], [5.0, 5.0, 5.0, NAN]])
    y, aux = pool_forward(meta, x, "max")
    assert aux is not None
    assert aux.dtype == dtype
    assert aux.tolist() == [[k - 1, -1, k - 1], [k - 2, -1, k - 1], [0, -1, k - 1]]
    assert y.tolist() == [[3.0, -INF, 4.0], [2.0, -INF, -INF], [5.0, -INF, -INF]]
    grad_x = pool_backward(meta, torch.tensor([[1.0, NAN, 2.0]] * 3), aux, "max")
    assert grad_x.tolist() == [[0.0, 0.0, 1.0, 2.0], [0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 0.0, 2.0]]
    assert pool_backward(meta, torch.tensor([1.0, NAN, 2.0]), None, "sum").tolist() == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("k", [256, 257])
@any_mode
def test_entries_of_the_last_slots(k: int, mode: str) -> None:
    """The last slot of the second column is the only one that reads node 1."""
    table = torch.zeros(k, 2, dtype=torch.int64)
    table[-1, 1] = 1
    y, grad_x = pooled(table.tolist(), [0.0, 1.0], mode, [0.0, 4.0])
    assert float(y[1]) == (torch.tensor(1.0 / k).item() if mode == "avg" else 1.0)
    assert float(grad_x[1]) == (torch.tensor(4.0 / k).item() if mode == "avg" else 4.0)


@pytest.mark.parametrize("nout", [2**24, 2**24 + 1])
def test_entries_of_many_columns(nout: int) -> None:
    table = torch.full((1, nout), 2, dtype=torch.uint8)
    table[0, [0, -2, -1]] = torch.tensor([0, 0, 1], dtype=torch.uint8)
    meta = pool_meta_from_indices(table, 2)
    y, aux = pool_forward(meta, torch.tensor([3.0, 5.0]), "max")
    assert aux is not None
    assert y[[0, 1, -2, -1]].tolist() == [3.0, -INF, 3.0, 5.0]
    assert aux[[0, 1, -2, -1]].tolist() == [0, 255, 0, 0]
    grad_y = torch.ones(1).expand(nout)
    assert pool_backward(meta, grad_y, aux, "max").tolist() == [2.0, 1.0]
    assert pool_backward(meta, grad_y, None, "avg").tolist() == [2.0, 1.0]


@pytest.mark.parametrize("nin", [65534, 65535, 65536, 65537])
@any_mode
def test_indices_about_the_width_of_16_bits(nin: int, mode: str) -> None:
    """The last node, and the pads just above it."""
    x = torch.zeros(nin)
    x[-1], x[0] = 2.0, 5.0
    table = [[nin - 1, nin, nin, 32768], [nin, nin, nin + 1, 32767]]
    y, grad_x = pooled(table, x.tolist(), mode, [1.0, NAN, NAN, 8.0])
    empty = {"max": "-inf", "avg": "nan"}.get(mode, "0.0")
    assert y == ["2.0", empty, empty, "0.0"]
    assert grad_x[nin - 1] == "1.0"
    assert sum(map(float, grad_x)) == {"max": 9.0, "avg": 9.0}.get(mode, 17.0)
