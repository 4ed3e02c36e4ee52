"""The reference against its rules, each written once more as a loop over plain numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime.plan import pool_meta_from_indices
from knnpool_gen.vocabulary import Mode
from oracle import reference_backward, reference_forward
from tables import DTYPES, Table, adversarial_values, assert_same_bits, small_tables

MODES = (Mode.MAX, Mode.AVG)
INF = float("inf")
NAN = float("nan")

any_table = pytest.mark.parametrize("table", small_tables(), ids=str)
any_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
any_mode = pytest.mark.parametrize("mode", MODES)


def plain_forward(table: Table, x: Tensor, mode: Mode) -> tuple[Tensor, Tensor | None]:
    """The rules of the forward, value by value; ``x`` is ``[rows, Nin]``."""
    number = scalar_type(x.dtype)
    columns = table.indices.T.tolist()
    y: list[list[Any]] = []
    aux: list[list[int]] = []
    for row in x.double().tolist():
        y.append([])
        aux.append([])
        for column in columns:
            real = [(k, row[m]) for k, m in enumerate(column) if m < table.nin]
            best, winner = -INF, real[0][0] if real else 255
            total = number(0)
            for k, value in real:
                if value > best:
                    best, winner = value, k
                total += number(value)
            y[-1].append(best if mode is Mode.MAX else float(total / number(len(real))))
            aux[-1].append(winner)
    shape = (x.shape[0], table.nout)
    values = torch.tensor(y, dtype=torch.float64).reshape(shape).to(x.dtype)
    return values, torch.tensor(aux, dtype=torch.uint8).reshape(shape) if mode is Mode.MAX else None


def plain_backward(table: Table, grad_y: Tensor, aux: Tensor | None, mode: Mode) -> Tensor:
    """The rules of the backward, value by value; ``grad_y`` is ``[rows, Nout]``."""
    number = scalar_type(grad_y.dtype)
    entries = table.indices.tolist()
    counts = (table.indices < table.nin).sum(0).tolist()
    grad_x = []
    for r, row in enumerate(grad_y.double().tolist()):
        sums = [number(0)] * table.nin
        for k in range(table.k):
            for n in range(table.nout):
                if (m := entries[k][n]) >= table.nin:
                    continue
                if mode is Mode.AVG:
                    sums[m] += number(row[n]) / number(counts[n])
                elif aux is not None and aux[r, n] == k:
                    sums[m] += number(row[n])
        grad_x.append([float(value) for value in sums])
    return torch.tensor(grad_x, dtype=torch.float64).reshape(grad_y.shape[0], table.nin).to(grad_y.dtype)


def scalar_type(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype is torch.float64 else np.float32


def check_against_plain(table: Table, dtype: torch.dtype, mode: Mode, rows: int, seed: int) -> None:
    meta = pool_meta_from_indices(table.indices, table.nin)
    x = adversarial_values(rows, table.nin, dtype, seed)
    grad_y = adversarial_values(rows, table.nout, dtype, seed + 1)
    with np.errstate(all="ignore"):
        y, aux = plain_forward(table, x, mode)
        grad_x = plain_backward(table, grad_y, aux, mode)

    actual_y, actual_aux = reference_forward(meta, x, mode)
    assert_same_bits(actual_y, y)
    if aux is None:
        assert actual_aux is None
    else:
        assert actual_aux is not None
        assert_same_bits(actual_aux, aux)
    assert_same_bits(reference_backward(meta, grad_y, actual_aux, mode), grad_x)


@any_table
@any_dtype
@any_mode
def test_plain_loop(table: Table, dtype: torch.dtype, mode: Mode) -> None:
    check_against_plain(table, dtype, mode, rows=7, seed=0)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    k, nout, nin = draw(st.integers(0, 6)), draw(st.integers(0, 5)), draw(st.integers(0, 6))
    entries = draw(st.lists(st.integers(0, nin + 2), min_size=k * nout, max_size=k * nout))
    return Table("drawn", torch.tensor(entries, dtype=torch.int64).reshape(k, nout), nin)


@settings(deadline=None, max_examples=300)
@given(tables(), st.sampled_from(DTYPES), st.sampled_from(MODES), st.integers(0, 8), st.integers(0, 2**32))
def test_plain_loop_drawn(table: Table, dtype: torch.dtype, mode: Mode, rows: int, seed: int) -> None:
    check_against_plain(table, dtype, mode, rows, seed)


def forward(
    indices: list[list[int]], x: list[float], mode: Mode, dtype: torch.dtype = torch.float32
) -> tuple[list[float], list[int] | None]:
    y, aux = reference_forward(
        pool_meta_from_indices(torch.tensor(indices), len(x)), torch.tensor(x, dtype=dtype), mode
    )
    return y.tolist(), None if aux is None else aux.tolist()


def backward(indices: list[list[int]], nin: int, grad_y: list[float], aux: list[int] | None, mode: Mode) -> list[float]:
    winners = None if aux is None else torch.tensor(aux, dtype=torch.uint8)
    meta = pool_meta_from_indices(torch.tensor(indices), nin)
    return reference_backward(meta, torch.tensor(grad_y), winners, mode).tolist()


def test_first_of_equals_wins() -> None:
    assert forward([[2], [0], [1]], [5.0, 5.0, 1.0], Mode.MAX) == ([5.0], [1])


def test_zeros_of_both_signs_tie() -> None:
    y, aux = forward([[0, 1], [1, 0]], [0.0, -0.0], Mode.MAX)
    assert [str(value) for value in y] == ["0.0", "-0.0"]
    assert aux == [0, 0]


def test_average_of_negative_zeros_starts_from_positive_zero() -> None:
    y, _ = forward([[0], [0]], [-0.0], Mode.AVG)
    assert str(y[0]) == "0.0"


def test_nan_never_wins() -> None:
    assert forward([[0, 0, 0], [1, 0, 2]], [NAN, -7.0, -INF], Mode.MAX) == ([-7.0, -INF, -INF], [1, 0, 0])


def test_nothing_above_minus_inf_is_won_by_the_first_real_slot() -> None:
    assert forward([[9, 9], [0, 9], [0, 9]], [-INF], Mode.MAX) == ([-INF, -INF], [1, 255])


def test_nan_and_inf_average_as_arithmetic() -> None:
    y, _ = forward([[0, 1, 1, 3], [3, 1, 2, 4]], [NAN, INF, -INF, 1.0], Mode.AVG)
    assert [str(value) for value in y] == ["nan", "inf", "nan", "1.0"]


def test_empty_column_averages_to_nan() -> None:
    y, _ = forward([[1]], [3.0], Mode.AVG)
    assert str(y[0]) == "nan"


def test_denormals_are_kept() -> None:
    tiny = torch.tensor(1e-40).item()
    assert tiny > 0
    assert forward([[0], [1]], [0.0, tiny], Mode.MAX) == ([tiny], [1])
    assert forward([[1], [1]], [0.0, tiny], Mode.AVG) == ([tiny], None)
    assert backward([[0], [0]], 1, [tiny], None, Mode.AVG) == [tiny]


def test_half_precision_sums_in_float32_and_rounds_once() -> None:
    """In float16 2048 + 1 is 2048, and 3 times 60000 is no number."""
    assert forward([[0], [1], [1], [1]], [2048.0, 1.0], Mode.AVG, torch.float16) == ([513.0], None)
    assert forward([[0], [0], [0]], [60000.0], Mode.AVG, torch.float16) == ([60000.0], None)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_bad_gradient_reaches_its_owners_only(bad: float) -> None:
    indices = [[0, 1], [1, 2]]
    assert backward(indices, 4, [1.0, 1.0], [1, 0], Mode.MAX) == [0.0, 2.0, 0.0, 0.0]
    # Column 1 is won by node 2; node 1 reads it too and must not hear of it.
    assert [str(v) for v in backward(indices, 4, [1.0, bad], [1, 1], Mode.MAX)] == [
        "0.0",
        "1.0",
        str(bad),
        "0.0",
    ]
    assert [str(v) for v in backward(indices, 4, [1.0, bad], None, Mode.AVG)] == [
        "0.5",
        str(bad),
        str(bad),
        "0.0",
    ]


def test_empty_columns_give_no_gradient() -> None:
    assert backward([[2, 0], [2, 2]], 2, [NAN, 1.0], [255, 0], Mode.MAX) == [1.0, 0.0]
    assert backward([[2, 0], [2, 2]], 2, [NAN, 1.0], None, Mode.AVG) == [1.0, 0.0]


def test_gradient_counts_duplicates() -> None:
    assert backward([[0], [0], [1]], 2, [3.0], None, Mode.AVG) == [2.0, 1.0]
    assert backward([[0], [0], [1]], 2, [3.0], [1], Mode.MAX) == [3.0, 0.0]


def test_gradient_is_summed_in_order_of_slot_then_column() -> None:
    """1 + 2**-24 + 2**-24 is 1 from the left and more than 1 from the right."""
    half_ulp = 2.0**-24
    assert backward([[0, 0, 0]], 1, [1.0, half_ulp, half_ulp], [0, 0, 0], Mode.MAX) == [1.0]
    assert backward([[0, 0, 0]], 1, [half_ulp, half_ulp, 1.0], [0, 0, 0], Mode.MAX) == [1.0 + 2 * half_ulp]
    # The second column reads node 0 in its first slot, so it comes first.
    indices = [[1, 0, 0], [0, 1, 1]]
    assert backward(indices, 2, [1.0, half_ulp, half_ulp], [1, 0, 0], Mode.MAX)[0] == 1.0 + 2 * half_ulp


@any_mode
@any_dtype
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3), (0,), (2, 0)], ids=str)
def test_leading_dimensions(mode: Mode, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    indices = torch.tensor([[0, 2, 5], [1, 5, 5]])
    meta = pool_meta_from_indices(indices, 4)
    x = torch.randn(*shape, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).to(dtype)
    y, aux = reference_forward(meta, x, mode)
    grad = reference_backward(meta, y, aux, mode)
    flat_y, flat_aux = reference_forward(meta, x.reshape(x.numel() // 4, 4), mode)
    assert_same_bits(y, flat_y.reshape(*shape, 3))
    assert_same_bits(grad, reference_backward(meta, flat_y, flat_aux, mode).reshape(*shape, 4))
    assert y.is_contiguous()
    assert grad.is_contiguous()
    assert aux is None or (aux.is_contiguous() and aux.shape == y.shape)


def views(x: Tensor) -> dict[str, Tensor]:
    """The values of ``x`` ``[2, 3, n]`` in other places in memory."""
    wide = torch.full((2, 3, 2 * x.shape[-1] + 1), 77.0).to(x.dtype)
    wide[..., 1::2] = x
    return {
        "transposed": x.transpose(0, 2).contiguous().transpose(0, 2),
        "permuted": x.permute(1, 2, 0).contiguous().permute(2, 0, 1),
        "strided": wide[..., 1::2],
        "expanded": x[:1].expand(2, -1, -1),
        "one_value": x[:1, :1, :1].expand(2, 3, x.shape[-1]),
    }


@any_mode
@pytest.mark.parametrize("view", ["transposed", "permuted", "strided", "expanded", "one_value"])
def test_any_strides(mode: Mode, view: str) -> None:
    indices = torch.tensor([[0, 2, 5, 1], [1, 5, 5, 3], [3, 3, 0, 1]])
    meta = pool_meta_from_indices(indices, 5)
    x = views(adversarial_values(6, 5, torch.float32).reshape(2, 3, 5))[view]
    y, aux = reference_forward(meta, x, mode)
    expected_y, expected_aux = reference_forward(meta, x.clone(memory_format=torch.contiguous_format), mode)
    assert_same_bits(y, expected_y)
    assert y.is_contiguous()

    grad_y = views(adversarial_values(6, 4, torch.float32, seed=1).reshape(2, 3, 4))[view]
    grad = reference_backward(meta, grad_y, aux, mode)
    plain_grad_y = grad_y.clone(memory_format=torch.contiguous_format)
    assert_same_bits(grad, reference_backward(meta, plain_grad_y, expected_aux, mode))
    assert grad.is_contiguous()


@any_mode
def test_inputs_are_left_alone(mode: Mode) -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 2], [1, 3]]), 3)
    x, grad_y = adversarial_values(7, 3, torch.float32), adversarial_values(7, 2, torch.float32)
    _, aux = reference_forward(meta, x, mode)
    reference_backward(meta, grad_y, aux, mode)
    assert_same_bits(x, adversarial_values(7, 3, torch.float32))
    assert_same_bits(grad_y, adversarial_values(7, 2, torch.float32))
    assert (x._version, grad_y._version) == (0, 0)


@any_mode
def test_no_graph_is_recorded(mode: Mode) -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 2], [1, 3]]), 3)
    x = torch.ones(3, requires_grad=True)
    y, aux = reference_forward(meta, x, mode)
    assert not y.requires_grad
    assert not reference_backward(meta, torch.ones(2, requires_grad=True), aux, mode).requires_grad


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=str)
def test_results_are_memory_of_their_own(k: int, shape: tuple[int, ...]) -> None:
    meta = pool_meta_from_indices(torch.full((k, 5), 4), 4)
    y, aux = reference_forward(meta, torch.ones(*shape, 4), Mode.MAX)
    assert aux is not None
    assert y.is_contiguous()
    assert aux.is_contiguous()
    aux.fill_(7)
    assert meta.first_slot.tolist() == [255] * 5


@any_dtype
def test_without_aux_the_values_are_the_same(dtype: torch.dtype) -> None:
    table = small_tables()[3]
    meta = pool_meta_from_indices(table.indices, table.nin)
    x = adversarial_values(7, table.nin, dtype)
    y, aux = reference_forward(meta, x, Mode.MAX, need_aux=False)
    assert aux is None
    assert_same_bits(y, reference_forward(meta, x, Mode.MAX)[0])


class LargestFloat(TorchDispatchMode):
    """Watches the size of every floating-point tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.numel = max(self.numel, result.numel())
        return result


@any_mode
def test_nothing_of_size_k_is_made(mode: Mode) -> None:
    rows, nin, nout = 6, 50, 40
    meta = pool_meta_from_indices(torch.arange(200 * nout).reshape(200, nout) % (nin + 5), nin)
    x = torch.ones(rows, nin)
    with LargestFloat() as largest:
        y, aux = reference_forward(meta, x, mode)
        reference_backward(meta, y, aux, mode)
    assert largest.numel == rows * nin


def test_max_without_aux_has_no_backward() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0]]), 1)
    with pytest.raises(InvalidArgumentError, match="'max' needs the aux"):
        reference_backward(meta, torch.ones(1), None, Mode.MAX)
