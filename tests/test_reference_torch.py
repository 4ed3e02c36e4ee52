"""The reference against what torch and scipy offer: image pooling, gathers, scatters, matrices, gradients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812  its usual name
from scipy import sparse
from torch import Tensor

from knnpool_gen import pool_function
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.vocabulary import Mode
from oracle import reference_backward, reference_forward
from tables import DTYPES, Table, adversarial_values, assert_same_bits, real_tables, small_tables

MODES = (Mode.MAX, Mode.AVG)

any_mode = pytest.mark.parametrize("mode", MODES)


class Pool(torch.autograd.Function):
    """The reference as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meta: PoolMeta, mode: Mode) -> Tensor:
        y, aux = reference_forward(meta, x, mode)
        ctx.meta, ctx.mode = meta, mode
        ctx.save_for_backward(aux)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return reference_backward(ctx.meta, grads[0], *ctx.saved_tensors, ctx.mode), None, None


def values_and_gradient(function: Any, x: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(grad_y.reshape(y.shape).to(y.dtype))
    assert x.grad is not None
    return y.detach(), x.grad


class Window(NamedTuple):
    """A pooling of images, as torch's functions take it."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    ceil_mode: bool = False

    def table(self, height: int, width: int) -> Table:
        """The same as a neighbour table over the pixels in row-major order, the pads where it hangs over."""
        probe = F.max_pool2d(torch.zeros(1, 1, height, width), **self._asdict_for_max())
        out_height, out_width = probe.shape[-2:]
        nin = height * width
        slots = [
            [self._pixel(oy, ox, ky, kx, height, width) for oy in range(out_height) for ox in range(out_width)]
            for ky in range(self.kernel[0])
            for kx in range(self.kernel[1])
        ]
        return Table("image", torch.tensor(slots), nin)

    def _pixel(self, oy: int, ox: int, ky: int, kx: int, height: int, width: int) -> int:
        iy = oy * self.stride[0] - self.padding[0] + ky * self.dilation[0]
        ix = ox * self.stride[1] - self.padding[1] + kx * self.dilation[1]
        return iy * width + ix if 0 <= iy < height and 0 <= ix < width else height * width

    def _asdict_for_max(self) -> dict[str, Any]:
        return {**self._asdict_for_avg(), "dilation": self.dilation}

    def _asdict_for_avg(self) -> dict[str, Any]:
        return {
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "ceil_mode": self.ceil_mode,
        }

    def max(self, images: Tensor) -> Tensor:
        return F.max_pool2d(images, **self._asdict_for_max())

    def avg(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(images, **self._asdict_for_avg(), count_include_pad=False)

    def sum(self, images: Tensor) -> Tensor:
        return F.avg_pool2d(images, **self._asdict_for_avg(), divisor_override=1)


WINDOWS = [
    Window((2, 2), (2, 2)),
    Window((3, 3), (2, 2), (1, 1)),
    Window((3, 3), (1, 1), (1, 1)),
    Window((3, 2), (2, 3), (1, 0), ceil_mode=True),
    Window((1, 4), (1, 2), (0, 2), ceil_mode=True),
]
DILATED = [Window((3, 3), (2, 1), (1, 1), (2, 2)), Window((2, 3), (1, 1), (0, 1), (3, 2), ceil_mode=True)]


def images_of(dtype: torch.dtype, ties: bool) -> Tensor:
    """``[2, 3, 7, 9]``; with ties, four whole numbers and -inf, so that windows agree and sums are exact."""
    generator = torch.Generator().manual_seed(0)
    if ties:
        choices = torch.tensor([-torch.inf, -1.0, 0.0, -0.0, 2.0])
        return choices[torch.randint(5, (2, 3, 7, 9), generator=generator)].to(dtype)
    return torch.randn(2, 3, 7, 9, generator=generator).to(dtype)


@pytest.mark.parametrize("window", WINDOWS + DILATED, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["normals", "ties"])
def test_max_pool2d(window: Window, dtype: torch.dtype, ties: bool) -> None:
    images = images_of(dtype, ties)
    table = window.table(7, 9)
    meta = pool_meta_from_indices(table.indices, table.nin)
    # Whole numbers: sums are exact in any order, and torch's is another.
    grad_y = torch.randint(-9, 9, (2, 3, table.nout), generator=torch.Generator().manual_seed(1))

    expected_y, expected_grad = values_and_gradient(window.max, images, grad_y)
    y, grad = values_and_gradient(lambda x: Pool.apply(x, meta, Mode.MAX), images.flatten(-2), grad_y)
    assert_same_bits(y.reshape(expected_y.shape), expected_y)
    assert torch.equal(grad.reshape(expected_grad.shape), expected_grad)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("ties", [False, True], ids=["normals", "ties"])
def test_avg_pool2d(window: Window, dtype: torch.dtype, ties: bool) -> None:
    images = images_of(dtype, ties)
    table = window.table(7, 9)
    meta = pool_meta_from_indices(table.indices, table.nin)
    grad_y = torch.randn(2, 3, table.nout, generator=torch.Generator().manual_seed(1))

    expected_y, expected_grad = values_and_gradient(window.avg, images, grad_y)
    y, grad = values_and_gradient(lambda x: Pool.apply(x, meta, Mode.AVG), images.flatten(-2), grad_y)
    assert_same_bits(y.reshape(expected_y.shape), expected_y)
    torch.testing.assert_close(grad.reshape(expected_grad.shape), expected_grad)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sum_pool2d(window: Window, dtype: torch.dtype) -> None:
    images = images_of(dtype, ties=False)
    table = window.table(7, 9)
    grad_y = torch.randn(2, 3, table.nout, generator=torch.Generator().manual_seed(1))
    expected_y, expected_grad = values_and_gradient(window.sum, images, grad_y)
    y, grad = values_and_gradient(lambda x: pool_function(x, table.indices, "sum"), images.flatten(-2), grad_y)
    assert_same_bits(y.reshape(expected_y.shape), expected_y)
    torch.testing.assert_close(grad.reshape(expected_grad.shape), expected_grad)


def gathered(table: Table, x: Tensor) -> Tensor:
    """``[..., K, Nout]``: what a layer without kernels makes of ``x``, pads as NaN."""
    padded = torch.cat([x, x.new_full((*x.shape[:-1], 1), math.nan)], dim=-1)
    return padded[..., table.indices.clamp(max=table.nin)]


def gather_max(table: Table, x: Tensor) -> Tensor:
    values = gathered(table, x)
    # max, not amax: its gradient goes to one place.
    return values.masked_fill(values.isnan(), -torch.inf).max(dim=-2).values


def gather_avg(table: Table, x: Tensor) -> Tensor:
    return gathered(table, x).nanmean(dim=-2)


GATHERS = {Mode.MAX: gather_max, Mode.AVG: gather_avg}


@any_mode
@pytest.mark.parametrize(
    "table", [t for t in small_tables() + real_tables() if t.k and t.nout and t.nout < 1000], ids=str
)
def test_gather(table: Table, mode: Mode) -> None:
    meta = pool_meta_from_indices(table.indices, table.nin)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, table.nin, dtype=torch.float64, generator=generator)
    grad_y = torch.randn(2, 3, table.nout, dtype=torch.float64, generator=generator)
    y, grad = values_and_gradient(lambda x: Pool.apply(x, meta, mode), x, grad_y)
    expected_y, expected_grad = values_and_gradient(lambda x: GATHERS[mode](table, x), x, grad_y)
    torch.testing.assert_close(y, expected_y, equal_nan=True)
    # Nothing comes from an empty column; the NaN that autograd makes of 0 / 0 stays in the padding.
    torch.testing.assert_close(grad, expected_grad)


SOME_TABLES = [t for t in small_tables() + real_tables() if t.k and t.nout and t.nout < 1000]
any_table = pytest.mark.parametrize("table", SOME_TABLES, ids=str)


@any_table
@pytest.mark.parametrize("mode", ["avg", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_nanmean_and_nansum(table: Table, mode: str, dtype: torch.dtype) -> None:
    """NaN is left out of sum, count and gradient, as torch leaves it out of the gathered values."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, table.nin, dtype=dtype, generator=generator)
    x[torch.rand(x.shape, generator=generator) < 0.4] = math.nan
    grad_y = torch.randn(2, 3, table.nout, dtype=dtype, generator=generator)
    function = torch.nanmean if mode == "avg" else torch.nansum
    expected_y, expected_grad = values_and_gradient(lambda x: function(gathered(table, x), dim=-2), x, grad_y)
    y, grad = values_and_gradient(lambda x: pool_function(x, table.indices, mode, nan="omit"), x, grad_y)
    torch.testing.assert_close(y, expected_y, equal_nan=True)
    assert (grad[x.isnan()] == 0).all()
    # torch divides 0 by 0 for a NaN of which there is nothing else in its column.
    torch.testing.assert_close(grad, expected_grad.masked_fill(x.isnan(), 0))


def entries_of(table: Table) -> tuple[Tensor, Tensor]:
    """Input and output node of all that is no pad, slot by slot."""
    slots, columns = (table.indices < table.nin).nonzero(as_tuple=True)
    return table.indices[slots, columns], columns


def scatter_max(table: Table, x: Tensor) -> Tensor:
    nodes, columns = entries_of(table)
    empty = x.new_full((table.nout,), -torch.inf)
    return empty.scatter_reduce(-1, columns, x[nodes], "amax", include_self=False)


@any_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_reduce_amax(table: Table, dtype: torch.dtype) -> None:
    """No NaN, which wins there; of zeros of both signs either may."""
    for row in adversarial_values(7, table.nin, dtype):
        x = row.masked_fill(row.isnan(), -torch.inf)
        assert torch.equal(pool_function(x, table.indices, "max"), scatter_max(table, x))


@any_table
def test_gradient_of_scatter_reduce_amax(table: Table) -> None:
    """No ties, which share the gradient there."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randperm(table.nin, generator=generator).double()
    grad_y = torch.randn(table.nout, dtype=torch.float64, generator=generator)
    _, expected = values_and_gradient(lambda x: scatter_max(table, x), x, grad_y)
    _, grad = values_and_gradient(lambda x: pool_function(x, table.indices, "max"), x, grad_y)
    torch.testing.assert_close(grad, expected)


@any_table
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_index_add(table: Table, dtype: torch.dtype) -> None:
    """It adds one by one in the order it is given, so the bits agree both ways."""
    nodes, columns = entries_of(table)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(table.nin, dtype=dtype, generator=generator)
    grad_y = torch.randn(table.nout, dtype=dtype, generator=generator)
    y, grad = values_and_gradient(lambda x: pool_function(x, table.indices, "sum"), x, grad_y)
    assert_same_bits(y, torch.zeros_like(grad_y).index_add_(0, columns, x[nodes]))
    assert_same_bits(grad, torch.zeros_like(x).index_add_(0, nodes, grad_y[columns]))


def matrix_of(table: Table, weights: Tensor, normalize: bool) -> sparse.csr_matrix:
    """Weighted pooling as a matrix, ``[Nout, Nin]``."""
    nodes, columns = entries_of(table)
    values = weights.double()[table.indices < table.nin].numpy()
    matrix = sparse.csr_matrix((values, (columns.numpy(), nodes.numpy())), shape=(table.nout, table.nin))
    if not normalize:
        return matrix
    sums = np.asarray(matrix.sum(1)).ravel()
    return sparse.diags(1 / (sums + 1e-8)) @ matrix


def with_weights() -> list[tuple[Table, Tensor]]:
    """Random weights, NaN at pads; the large table comes with its own."""
    pairs = []
    for table in SOME_TABLES:
        weights = torch.rand(table.indices.shape, generator=torch.Generator().manual_seed(2)) + 0.1
        pairs.append((table, weights.masked_fill(table.indices >= table.nin, math.nan)))
    with np.load(Path(__file__).parent / "data" / "fovi_tables.npz") as arrays:
        weights = torch.from_numpy(arrays["sampler64__weights"])
    return [*pairs, *((t, weights) for t in real_tables() if t.name.startswith("sampler64"))]


@pytest.mark.parametrize(("table", "weights"), [pytest.param(*pair, id=str(pair[0])) for pair in with_weights()])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_sparse_matrix(table: Table, weights: Tensor, normalize: bool, dtype: torch.dtype) -> None:
    """Forward the matrix, backward its transpose; within a bound on the sum of the absolute terms."""
    matrix = matrix_of(table, weights, normalize)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, table.nin, dtype=torch.float64, generator=generator).to(dtype)
    grad_y = torch.randn(3, table.nout, dtype=torch.float64, generator=generator).to(dtype)
    y, grad = values_and_gradient(
        lambda x: pool_function(x, table.indices, "weighted", weights=weights, normalize_weights=normalize), x, grad_y
    )
    readers = int(entries_of(table)[0].bincount(minlength=1).max())
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for actual, factor, given, terms in ((y, matrix, x, table.k), (grad, matrix.T, grad_y, readers)):
        expected = torch.from_numpy((factor @ given.double().numpy().T).T.copy())
        absolute = torch.from_numpy((abs(factor) @ given.double().abs().numpy().T).T.copy())
        # The weights, the products, their sum, the sum of the weights; then the final rounding.
        bound = 2 * (terms + table.k) * eps * absolute + torch.finfo(dtype).eps * expected.abs()
        assert ((actual.double() - expected).abs() <= bound + torch.finfo(dtype).smallest_normal).all()


@pytest.mark.parametrize("table", real_tables(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_max_of_real_tables(table: Table, dtype: torch.dtype) -> None:
    """Bit for bit, NaNs, ties and infinities included, also where the maximum stands."""
    meta = pool_meta_from_indices(table.indices, table.nin)
    x = adversarial_values(7, table.nin, dtype)
    y, aux = reference_forward(meta, x, Mode.MAX)
    values = gathered(table, x)
    values = values.masked_fill(values.isnan(), -torch.inf)
    assert torch.equal(y, values.amax(dim=-2))
    assert aux is not None
    assert (meta.count > 0).all()
    winners = values.gather(-2, aux.long()[..., None, :]).squeeze(-2)
    assert_same_bits(y, winners)
    slots = torch.arange(table.k)[:, None]
    before = slots < aux[..., None, :]
    assert not (before & (values == y[..., None, :]) & (y > -torch.inf)[..., None, :]).any()


@any_mode
@pytest.mark.parametrize("table", [t for t in small_tables() if t.k < 33], ids=str)
def test_gradcheck(table: Table, mode: Mode) -> None:
    meta = pool_meta_from_indices(table.indices, table.nin)
    columns = torch.where(meta.count > 0)[0]
    # Far enough apart that no small step changes the winner.
    order = torch.randperm(2 * table.nin, generator=torch.Generator().manual_seed(0))
    x = order.reshape(2, table.nin).double().requires_grad_()
    # Differences of -inf or NaN, as empty columns give, tell nothing.
    assert torch.autograd.gradcheck(lambda x: Pool.apply(x, meta, mode)[..., columns], (x,))
