"""The generated kernels on the device, bit for bit against the reference on the CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from knnpool_gen import pool_backward, pool_forward, pool_meta_from_indices
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.runtime.execute import dtype_name
from knnpool_gen.verification import DeviceBackend, calls, difference, verify_kernel
from knnpool_gen.verification.tables import Table, adversarial_values
from knnpool_gen.vocabulary import Mode
from oracle import reference_backward, reference_forward
from tables import DTYPES, real_tables, small_tables

VARIED = {"pads", "empty_columns", "k33", "hub", "odd_sizes"}


@pytest.mark.parametrize("key", KERNELS, ids=lambda key: KERNELS[key].name)
def test_equals_the_reference_on_small_tables(key: KernelKey) -> None:
    # Every table shape and set of options is compiled here, so there are fewer than in emulation.
    tables = [table for table in small_tables() if table.name in VARIED]

    verdict = verify_kernel(key, KERNELS[key], DeviceBackend(), list(calls(key, tables, rows=[2 * key.rows + 1])))

    assert verdict.faults == ()
    assert verdict.cases >= len(VARIED)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("table", real_tables(), ids=str)
def test_the_chosen_variant_equals_the_reference(table: Table, mode: Mode, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(table.indices, table.nin)
    device_meta = pool_meta_from_indices(table.indices, table.nin, "cuda")
    x = adversarial_values(77, table.nin, dtype)
    grad_y = adversarial_values(77, table.nout, dtype, seed=1)
    for options in ({"nan": "omit"}, {"nan": "propagate"}):
        if mode is Mode.WEIGHTED:
            weights = torch.rand(table.indices.shape, generator=torch.Generator().manual_seed(5))
            options |= {"weights": weights, "normalize_weights": options["nan"] == "omit"}

        y, aux = pool_forward(device_meta, x.cuda(), mode.value, **options)
        grad_x = pool_backward(device_meta, grad_y.cuda(), aux, mode.value, x=x.cuda(), **options)

        expected_y, expected_aux = pool_forward(meta, x, mode.value, **options)
        assert difference(y, expected_y) is None
        assert aux is None or difference(aux, expected_aux) is None
        expected = pool_backward(meta, grad_y, expected_aux, mode.value, x=x, **options)
        assert difference(grad_x, expected) is None


def alexp0() -> tuple[torch.Tensor, int]:
    (table,) = [table for table in real_tables() if table.name.startswith("alexnet64_pool0")]
    return table.indices, table.nin


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_alexp0_at_full_size_equals_the_reference(mode: str) -> None:
    indices, nin = alexp0()
    meta = pool_meta_from_indices(indices, nin, "cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(512, 96, nin, device="cuda", generator=generator).half()
    grad_y = torch.randn(512, 96, meta.nout, device="cuda", generator=generator).half()

    y, aux = pool_forward(meta, x, mode)
    grad_x = pool_backward(meta, grad_y, aux, mode)

    expected_y, expected_aux = reference_forward(meta, x, Mode(mode))
    assert difference(y, expected_y) is None
    assert aux is None or difference(aux, expected_aux) is None
    assert difference(grad_x, reference_backward(meta, grad_y, expected_aux, Mode(mode))) is None


@pytest.mark.filterwarnings("ignore:ExternalStream:DeprecationWarning")
@pytest.mark.skipif(importlib.util.find_spec("fovi") is None, reason="fovi is not installed")
@pytest.mark.parametrize("mode", ["max", "avg"])
def test_alexp0_at_full_size_equals_fovi(mode: str) -> None:
    from fovi.arch import knn_pool_cuda as fovi

    indices, nin = alexp0()
    meta = pool_meta_from_indices(indices, nin, "cuda")
    theirs = fovi.pool_meta_from_indices(indices.cuda(), nin)
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(512, 96, nin, device="cuda", generator=generator).half()
    grad_y = torch.randn(512, 96, meta.nout, device="cuda", generator=generator).half()

    y, aux = pool_forward(meta, x, mode)
    their_y, their_aux = fovi.pool_forward(theirs, x, mode)

    assert difference(y, their_y) is None
    assert (aux is None) == (their_aux is None)
    assert aux is None or difference(aux, their_aux) is None
    grad_x = pool_backward(meta, grad_y, aux, mode)
    their_grad_x = fovi.pool_backward(theirs, grad_y, their_aux, mode)
    if mode == "max":
        assert difference(grad_x, their_grad_x) is None
    else:  # 0.04 % of theirs differ by one unit in the last place: not from an IEEE division, as the rules ask for
        torch.testing.assert_close(grad_x, their_grad_x, rtol=2**-10, atol=2**-20)
