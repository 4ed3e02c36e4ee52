"""Sizes at which something changes: what fits shared memory, 32-bit offsets, one byte of slot."""

from __future__ import annotations

import pytest
import torch

from knnpool_gen import pool_backward, pool_forward, pool_function, pool_meta_from_indices
from knnpool_gen.runtime.execute import dtype_name
from knnpool_gen.vocabulary import Mode
from oracle import reference_backward, reference_forward
from tables import DTYPES, assert_same_bits

MORE_THAN_31_BITS = 2**31 + 2**20


def local_table(k: int, nout: int, nin: int) -> torch.Tensor:
    """Neighbours near each other, as in real tables, and some pads."""
    generator = torch.Generator().manual_seed(k + nout)
    centres = torch.arange(nout) * (nin - 1) // max(1, nout - 1)
    near = (centres + torch.randint(-50, 51, (k, nout), generator=generator)).clamp(0, nin - 1)
    return near.masked_fill(torch.rand(k, nout, generator=generator) < 0.05, nin)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("mode", [Mode.MAX, Mode.AVG, Mode.SUM], ids=lambda mode: mode.value)
@pytest.mark.parametrize(
    ("k", "nout", "nin"),
    [
        (9, 3068, 12402),
        (9, 18413, 166716),
        (4, 200_000, 1_000_000),
        (1000, 1, 1000),
        (230, 1, 230),
        (1000, 40, 50_000),
        (9, 12, 1_000_000),
    ],
)
def test_large_tables(k: int, nout: int, nin: int, mode: Mode, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(local_table(k, nout, nin), nin, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(2, 3, nin, device="cuda", generator=generator).to(dtype)
    grad_y = torch.randn(2, 3, nout, device="cuda", generator=generator).to(dtype)

    y, aux = pool_forward(meta, x, mode.value)
    grad_x = pool_backward(meta, grad_y, aux, mode.value)

    expected_y, expected_aux = reference_forward(meta, x, mode)
    assert_same_bits(y, expected_y)
    assert aux is None or expected_aux is not None
    if aux is not None and expected_aux is not None:
        assert_same_bits(aux, expected_aux)
    assert_same_bits(grad_x, reference_backward(meta, grad_y, expected_aux, mode))


@pytest.mark.parametrize("mode", [Mode.MAX, Mode.AVG], ids=lambda mode: mode.value)
@pytest.mark.parametrize(("k", "nout", "nin"), [(9, 230, 964), (2, 4000, 1000), (3, 60_000, 150_000)])
def test_more_than_31_bits_of_elements(k: int, nout: int, nin: int, mode: Mode) -> None:
    rows = -(-MORE_THAN_31_BITS // max(nin, nout))
    meta = pool_meta_from_indices(local_table(k, nout, nin), nin, "cuda")
    x = torch.empty(rows, nin, dtype=torch.float16, device="cuda").normal_()
    grad_y = torch.empty(rows, nout, dtype=torch.float16, device="cuda").normal_()
    assert max(x.numel(), grad_y.numel()) > 2**31

    y, aux = pool_forward(meta, x, mode.value)
    grad_x = pool_backward(meta, grad_y, aux, mode.value)

    for part in (slice(0, 50), slice(rows // 2, rows // 2 + 50), slice(rows - 50, rows)):
        expected_y, expected_aux = reference_forward(meta, x[part], mode)
        assert_same_bits(y[part], expected_y)
        if aux is not None and expected_aux is not None:
            assert_same_bits(aux[part], expected_aux)
        assert_same_bits(grad_x[part], reference_backward(meta, grad_y[part], expected_aux, mode))


def test_more_tiles_than_a_grid_dimension_of_16_bits() -> None:
    indices = torch.tensor([[0, 1], [2, 3]])
    x = torch.randn(3_000_000, 4, device="cuda")
    assert_same_bits(pool_function(x, indices, "max"), torch.maximum(x[:, :2], x[:, 2:]))


@pytest.mark.parametrize("k", [127, 128, 129, 254, 255, 256, 257, 40_000])
def test_slots_of_every_width(k: int) -> None:
    indices = torch.randint(0, 500, (k, 3), generator=torch.Generator().manual_seed(k))
    meta = pool_meta_from_indices(indices, 500, "cuda")
    x = torch.randn(70, 500, device="cuda").half()
    y, aux = pool_forward(meta, x, "max")
    expected_y, expected_aux = reference_forward(meta, x, Mode.MAX)
    assert aux is not None
    assert expected_aux is not None
    assert_same_bits(y, expected_y)
    assert_same_bits(aux, expected_aux)
    assert_same_bits(pool_backward(meta, y, aux, "max"), reference_backward(meta, y, aux, Mode.MAX))


@pytest.mark.parametrize("nin", [65534, 65535, 65536, 65537])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=dtype_name)
def test_indices_of_every_width(nin: int, dtype: torch.dtype) -> None:
    indices = torch.randint(0, nin + 2, (5, 30), generator=torch.Generator().manual_seed(nin))
    indices[0, :3] = torch.tensor([nin - 1, nin, nin + 1])
    meta = pool_meta_from_indices(indices, nin, "cuda")
    x = torch.randn(9, nin, device="cuda").to(dtype)
    for rs in (None, 1):
        y, aux = pool_forward(meta, x, "max", rs)
        expected_y, expected_aux = reference_forward(meta, x, Mode.MAX)
        assert_same_bits(y, expected_y)
        assert_same_bits(pool_backward(meta, y, aux, "max", rs), reference_backward(meta, y, expected_aux, Mode.MAX))
