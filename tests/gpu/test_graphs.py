"""CUDA graphs, streams, and that no call waits for the device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import knnpool_gen
from formulas import NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import CaptureError, pool_function, prepare
from knnpool_gen.runtime import compile, execute, launch
from tables import assert_same_bits

# Of torch's own code, and of a way to multiply matrices.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:The AccumulateGrad node's stream:UserWarning",
    "ignore:Synchronization debug mode is a prototype:UserWarning",
    "ignore:The CUDA Graph is empty:UserWarning",  # that with which torch.compile begins
)


@pytest.fixture
def table() -> Tensor:
    return TABLE.cuda()


def on_cuda(chosen: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in chosen.items()}


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def expect(y: Tensor, x: Tensor, table: Tensor, mode: str, **chosen: Any) -> None:
    expected = pooled(x.detach().cpu(), table.cpu(), mode, **chosen)
    torch.testing.assert_close(y.detach().cpu(), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


class Net(nn.Module):
    """Something to learn, and a table in a buffer; ``pool`` is pooling or its formula."""

    def __init__(self, mode: str, pool: Callable[..., Tensor] = pool_function) -> None:
        super().__init__()
        self.mode, self.pool = mode, pool
        self.scale = nn.Parameter(values(NIN) + 3)
        self.register_buffer("indices", TABLE.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x * self.scale, self.indices, self.mode, empty_value=0.5) * 2


def losses(net: nn.Module, step: Callable[[Tensor], Tensor], steps: int = 4) -> list[Tensor]:
    """Train on a fresh batch at every step: the loss of each, and what was learnt."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    seen = []
    for seed in range(steps):
        optimizer.zero_grad(set_to_none=True)
        loss = (step(values(2, 3, NIN, seed=seed).to(next(net.parameters()).device)) ** 2).sum()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach().cpu())
    return [*seen, *(parameter.detach().cpu() for parameter in net.parameters())]


# Captures by hand.


@any_case
def test_a_captured_forward_and_backward(table: Tensor, mode: str, nan: str, normalize: bool) -> None:
    chosen = on_cuda(options(mode, nan, normalize))
    x = values(2, 3, NIN).cuda().requires_grad_()
    grad_y = values(2, 3, 4, seed=1).cuda()
    prepare(x, table, mode, **chosen)

    def step() -> tuple[Tensor, Tensor]:
        y = pool_function(x, table, mode, **chosen)
        return y, torch.autograd.grad(y, x, grad_y)[0]

    graph, (y, grad_x) = captured(step)
    for seed in (2, 3):
        fresh = values(2, 3, NIN, seed=seed)
        if nan == "omit":
            fresh[0, 0, 1] = torch.nan
        with torch.no_grad():
            x.copy_(fresh)
        graph.replay()
        cpu_options = {name: v.cpu() if isinstance(v, Tensor) else v for name, v in chosen.items()}
        expect(y, fresh, table, mode, **cpu_options)
        leaf = fresh.clone().requires_grad_()
        (expected,) = torch.autograd.grad(pool_function(leaf, table.cpu(), mode, **cpu_options), leaf, grad_y.cpu())
        torch.testing.assert_close(grad_x.cpu(), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


@any_mode
def test_kernels_compile_and_load_inside_a_capture(
    table: Tensor, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Only the plan has to be there; a cubin that is not even on disk is compiled on the way."""
    knnpool_gen.clear_pool_cache()
    chosen = on_cuda(options(mode))
    x = values(2, 3, NIN).cuda().requires_grad_()
    prepare(x, table, mode, **chosen)
    execute.forget_prepared()
    launch.forget_kernels()
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path))
    compiled = []
    nvrtc = compile._nvrtc
    monkeypatch.setattr(compile, "_nvrtc", lambda *args: compiled.append(args[0].name) or nvrtc(*args))

    def step() -> tuple[Tensor, Tensor]:
        y = pool_function(x, table, mode, **chosen)
        return y, torch.autograd.grad(y, x, torch.ones_like(y))[0]

    graph, (y, grad_x) = captured(step)
    assert len(compiled) >= 2
    graph.replay()
    expect(y, x, table, mode, **options(mode))
    assert grad_x.isfinite().all()


def test_a_missing_plan_leaves_the_capture_unharmed(table: Tensor) -> None:
    knnpool_gen.clear_pool_cache()
    x = values(2, NIN).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match=r"call prepare\(x, indices, mode\) before the capture"):
            pool_function(x, table, "max")
        with pytest.raises(CaptureError, match="prepare waits for the device"):
            prepare(x, table, "max")
        doubled = x * 2
    graph.replay()
    assert torch.equal(doubled, x * 2)
    prepare(x, table, "max")
    graph, y = captured(lambda: pool_function(x, table, "max"))
    graph.replay()
    expect(y, x, table, "max")


def test_a_table_of_inference_mode_is_refused(table: Tensor) -> None:
    with torch.inference_mode():
        frozen = table.clone()
    x = values(2, NIN).cuda()
    prepare(x, frozen, "max")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CaptureError, match="made in inference mode"):
            pool_function(x, frozen, "max")
        doubled = x * 2
    graph.replay()
    assert torch.equal(doubled, x * 2)


@pytest.mark.parametrize("end", ["changed", "dead", "cleared"])
def test_a_graph_outlives_its_table(end: str) -> None:
    table, x = TABLE.cuda(), values(2, NIN).cuda()
    prepare(x, table, "max")
    graph, y = captured(lambda: pool_function(x, table, "max"))
    if end == "changed":
        table.fill_(0)
        pool_function(x, table, "max")
    elif end == "dead":
        del table
    else:
        knnpool_gen.clear_pool_cache()
    gc.collect()
    junk = [torch.full((size,), 3, device="cuda") for size in (4, 12, 15, 16, 64, 128) for _ in range(20)]
    graph.replay()
    expect(y, x, TABLE, "max")
    assert len(junk) == 120


def test_the_canary_stays_out_of_captures(table: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    x = values(2, NIN).cuda()
    prepare(x, table, "max")
    monkeypatch.setenv("KNNPOOL_CANARY", "always")
    graph, y = captured(lambda: pool_function(x, table, "max"))
    graph.replay()
    expect(y, x, table, "max")


def test_a_captured_training_step() -> None:
    """The whole step: forward, backward and optimizer, replayed."""
    expected = losses(formula := Net("max", pooled), formula)
    net = Net("max").cuda()
    prepare(values(2, 3, NIN).cuda(), net.indices, "max", empty_value=0.5)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.empty(2, 3, NIN, dtype=torch.float64, device="cuda")

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = (net(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what torch itself wants to have run before
        x.zero_()
        start = net.scale.detach().clone()
        step()
        with torch.no_grad():
            net.scale.copy_(start)
    torch.cuda.current_stream().wait_stream(side)
    graph, loss = captured(step)
    seen = []
    for seed in range(4):
        x.copy_(values(2, 3, NIN, seed=seed))
        graph.replay()
        seen.append(loss.cpu())
    torch.testing.assert_close([*seen, net.scale.detach().cpu()], expected)


def test_make_graphed_callables() -> None:
    expected = losses(formula := Net("avg", pooled), formula)
    net = Net("avg").cuda()
    graphed = torch.cuda.make_graphed_callables(net, (values(2, 3, NIN).cuda(),))
    torch.testing.assert_close(losses(net, graphed), expected)


# Captures by torch.compile.


@pytest.fixture
def nothing_skipped() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    skipped = counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()
    assert skipped == 0


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
def test_reduce_overhead_learns(mode: str, nothing_skipped: None) -> None:
    expected = losses(formula := Net(mode, pooled), formula, steps=8)
    net = Net(mode).cuda()
    fast = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    torch.testing.assert_close(losses(net, fast, steps=8), expected)


def test_reduce_overhead_infers(nothing_skipped: None) -> None:
    net = Net("max").cuda()
    fast = torch.compile(net, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(6):
            x = values(2, 3, NIN, seed=seed)
            torch.testing.assert_close(fast(x.cuda()).cpu(), Net("max", pooled)(x))


def test_reduce_overhead_never_uses_a_wrong_table(table: Tensor) -> None:
    """A table that is no buffer is copied before it is captured; its copy has no plan, and that is said."""
    torch._dynamo.reset()
    fast = torch.compile(lambda x, t: pool_function(x, t, "max"), mode="reduce-overhead", fullgraph=True)
    for seed, t in enumerate([table, table, table, table.flip(1).contiguous(), table]):
        x = values(2, 3, NIN, seed=seed).cuda()
        try:
            y = fast(x, t).clone()
        except CaptureError:
            break
        expect(y, x, t, "max")
    torch._dynamo.reset()
    expect(pool_function(x, table, "max"), x, table, "max")


# Streams, and waiting.


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@any_case
def test_no_call_waits_for_the_device(table: Tensor, mode: str, nan: str, normalize: bool) -> None:
    chosen = on_cuda(options(mode, nan, normalize))
    x = values(2, 3, NIN).cuda().requires_grad_()
    grad_y = torch.ones(2, 3, 4, dtype=torch.float64, device="cuda", requires_grad=True)

    def every_way() -> None:
        for empty_value in (None, 0.0):
            y = pool_function(x, table, mode, empty_value=empty_value, **chosen)
            (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
            torch.autograd.grad(grad_x, grad_y, torch.ones_like(grad_x))
            with torch.no_grad():
                pool_function(x, table, mode, empty_value=empty_value, **chosen)

    every_way()
    with no_waiting():
        every_way()


def test_compiled_calls_do_not_wait_either() -> None:
    torch._dynamo.reset()
    net = Net("max").cuda()
    fast = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = values(2, 3, NIN).cuda()
    fast(x).sum().backward()
    with no_waiting():
        fast(x).sum().backward()
    torch._dynamo.reset()


@any_mode
def test_side_streams(mode: str) -> None:
    """Plan, forward and backward on a stream that lags behind; the gradient is used on another."""
    knnpool_gen.clear_pool_cache()
    chosen = on_cuda(options(mode))
    side = torch.cuda.Stream()
    source = values(64, NIN).cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        table = TABLE.cuda()
        x = (source + 0).requires_grad_()
        y = pool_function(x, table, mode, empty_value=0.0, **chosen)
        torch.cuda._sleep(50_000_000)
        y.sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    assert x.grad is not None
    leaf = values(64, NIN).requires_grad_()
    expected = pooled(leaf, TABLE, mode, empty_value=0.0, **options(mode))
    torch.testing.assert_close(y.detach().cpu(), expected.detach())
    torch.testing.assert_close(x.grad.cpu(), torch.autograd.grad(expected.sum(), leaf)[0])


def test_memory_used_on_another_stream_is_not_given_away() -> None:
    side = torch.cuda.Stream()
    table = TABLE.cuda()
    prepare(values(4096, NIN).cuda(), table, "max")
    x = values(4096, NIN).cuda()
    expected = pooled(values(4096, NIN), TABLE, "max")
    for _ in range(20):
        y = pool_function(x, table, "max")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)
            copy = y.clone()
        y.record_stream(side)
        del y
        for _ in range(4):
            pool_function(x * 0, table, "max")
        side.synchronize()
        assert_same_bits(copy.cpu(), expected)
