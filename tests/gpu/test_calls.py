"""Ordinary ways to call pooling on a device."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import knnpool_gen
from knnpool_gen import KernelError, pool_backward, pool_forward, pool_function, pool_meta_from_indices
from knnpool_gen.runtime import compile, execute
from knnpool_gen.verification import difference
from knnpool_gen.verification.tables import adversarial_values
from knnpool_gen.vocabulary import Mode
from oracle import reference_forward

NIN = 50


@pytest.fixture
def indices() -> torch.Tensor:
    return torch.randint(0, NIN + 5, (7, 30), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 6, NIN, generator=torch.Generator().manual_seed(4))


def on_cpu(x: torch.Tensor, indices: torch.Tensor, mode: str, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().cpu().clone().requires_grad_()
    y = pool_function(x, indices.cpu(), mode)
    y.backward(grad.cpu())
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("mode", ["max", "avg"])
@pytest.mark.parametrize("table_device", ["cpu", "cuda"])
@pytest.mark.parametrize("table_dtype", [torch.int16, torch.int32, torch.int64, torch.uint8])
def test_tables_of_any_integer_dtype_on_any_device(x, indices, mode, table_device, table_dtype) -> None:
    grad = torch.randn(4, 6, 30)
    expected = on_cpu(x, indices, mode, grad)
    leaf = x.cuda().requires_grad_()

    y = pool_function(leaf, indices.to(table_device, table_dtype), mode)
    y.backward(grad.cuda())

    assert difference(y, expected[0]) is None
    assert difference(leaf.grad, expected[1]) is None


@pytest.mark.parametrize("mode", ["max", "avg"])
def test_strided_and_expanded_inputs_and_gradients(x, indices, mode) -> None:
    layouts = {
        "transposed": (x.permute(1, 0, 2), lambda t: t.permute(1, 0, 2)),
        "every other": (torch.stack([x, x], -1).flatten(-2)[..., ::2], lambda t: t),
        "offset": (torch.cat([x[:1], x])[1:], lambda t: t),
    }
    for name, (view, _) in layouts.items():
        grad = torch.randn(30).expand(*view.shape[:-1], 30)
        expected = on_cpu(view, indices, mode, grad)
        leaf = view.cuda().detach().requires_grad_()
        y = pool_function(leaf, indices, mode)
        y.backward(grad.cuda())
        assert difference(y, expected[0]) is None, name
        assert difference(leaf.grad, expected[1]) is None, name
    expanded = x[:, :1].expand(4, 6, NIN)
    assert difference(pool_function(expanded.cuda(), indices, mode), pool_function(expanded, indices, mode)) is None
    leaf = x.cuda().requires_grad_()
    pool_function(leaf, indices, mode).sum().backward()  # its gradient is one number, expanded
    assert difference(leaf.grad, on_cpu(x, indices, mode, torch.ones(4, 6, 30))[1]) is None


def test_runs_on_the_current_stream(indices) -> None:
    meta = pool_meta_from_indices(indices, NIN, "cuda")
    source = torch.randn(2000, 64, NIN)
    pool_forward(meta, source.cuda(), "max")
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            # The pooling may only start when the values before it on the same stream are there.
            torch.cuda._sleep(20_000_000)
            values = (source + i).to("cuda", non_blocking=False) if i == 0 else source.cuda() + i
            results.append(pool_forward(meta, values, "max"))
    torch.cuda.synchronize()

    cpu_meta = pool_meta_from_indices(indices, NIN)
    for i, (y, aux) in enumerate(results):
        expected_y, expected_aux = reference_forward(cpu_meta, source + i, Mode.MAX)
        assert difference(y, expected_y) is None
        assert difference(aux, expected_aux) is None


def test_second_call_compiles_nothing(indices, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path))
    knnpool_gen.clear_pool_cache()
    compiled = []
    original = compile._nvrtc
    monkeypatch.setattr(compile, "_nvrtc", lambda *args: compiled.append(args[0].name) or original(*args))
    x = torch.randn(3, 5, NIN, device="cuda", requires_grad=True)

    pool_function(x, indices, "max").sum().backward()
    assert len(compiled) == 2
    pool_function(x, indices, "max").sum().backward()
    assert len(compiled) == 2
    knnpool_gen.clear_pool_cache()  # loads again, from disk
    pool_function(x, indices, "max").sum().backward()
    assert len(compiled) == 2
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_damaged_cubin_is_replaced(indices, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path))
    x = torch.randn(3, 5, NIN, device="cuda")
    knnpool_gen.clear_pool_cache()
    expected = pool_function(x, indices, "avg")
    (cubin,) = tmp_path.glob("*.cubin")
    whole = cubin.read_bytes()
    cubin.write_bytes(whole[:1000] + b"\0" + whole[1001:])
    knnpool_gen.clear_pool_cache()

    assert difference(pool_function(x, indices, "avg"), expected) is None
    assert cubin.read_bytes() == whole


def test_canary_finds_a_kernel_that_writes_nothing(indices, monkeypatch) -> None:
    meta = pool_meta_from_indices(indices, NIN, "cuda")
    x = torch.randn(3, 5, NIN, device="cuda")
    knnpool_gen.clear_pool_cache()
    with monkeypatch.context() as patch:
        patch.setattr(execute, "start", lambda *args: None)
        with pytest.raises(KernelError, match="unwritten"):
            pool_forward(meta, x, "max")
    y, _ = pool_forward(meta, x, "max")
    assert difference(y, reference_forward(pool_meta_from_indices(indices, NIN), x.cpu(), Mode.MAX)[0]) is None


def test_canary_is_not_tripped_by_nan_and_inf(monkeypatch) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", "always")
    indices = torch.randint(0, NIN, (3, 40))
    meta = pool_meta_from_indices(indices, NIN, "cuda")
    x = adversarial_values(70, NIN, torch.float16)
    y, _ = pool_forward(meta, x.cuda(), "avg")
    assert y.isnan().any()
    assert difference(y, reference_forward(pool_meta_from_indices(indices, NIN), x, Mode.AVG)[0]) is None


def test_threads_call_at_once(indices, x) -> None:
    knnpool_gen.clear_pool_cache()
    device_x = x.cuda()
    expected = pool_function(x, indices, "max")
    results: list[torch.Tensor] = []

    def call() -> None:
        for _ in range(50):
            results.append(pool_function(device_x, indices, "max"))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 400
    assert all(difference(y, expected) is None for y in results)


def test_gradients_of_gradients(indices) -> None:
    x = torch.randn(2, 3, NIN, device="cuda", requires_grad=True)
    for mode in ("max", "avg"):
        weights = torch.randn(2, 3, 30, device="cuda", requires_grad=True)
        (grad_x,) = torch.autograd.grad((pool_function(x, indices, mode) * weights).nansum(), x, create_graph=True)
        (grad_w,) = torch.autograd.grad((grad_x * x.detach()).sum(), weights)
        expected = pool_function(x.detach(), indices, mode)
        empty = (indices >= NIN).all(0).cuda()
        torch.testing.assert_close(grad_w, expected.masked_fill(empty, 0.0))


def test_wrong_devices_are_named(indices, x) -> None:
    meta = pool_meta_from_indices(indices, NIN)
    with pytest.raises(ValueError, match="x is on cuda:0, the plan on cpu"):
        pool_forward(meta, x.cuda(), "max")
    device_meta = pool_meta_from_indices(indices, NIN, "cuda")
    y, aux = pool_forward(device_meta, x.cuda(), "max")
    assert aux is not None
    with pytest.raises(ValueError, match="aux is on cpu, grad_y on cuda:0"):
        pool_backward(device_meta, y, aux.cpu(), "max")


def test_other_dtypes_say_what_is_supported(indices, x) -> None:
    with pytest.raises(TypeError, match=r"float8.*supported: float16, bfloat16, float32, float64"):
        pool_function(x.to(torch.float8_e4m3fn).cuda(), indices, "max")
    pool_function(x.cuda(), indices, "max")


def test_cupy_imported_first() -> None:
    code = (
        "import cupy, torch, knnpool_gen\n"
        "x = torch.randn(2, 3, 8, device='cuda')\n"
        "t = torch.arange(8).view(2, 4)\n"
        "y = knnpool_gen.pool_function(x, t, 'max')\n"
        "assert torch.equal(y.cpu(), knnpool_gen.pool_function(x.cpu(), t, 'max'))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
