"""Two GPUs in one process, and in two."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, multiprocessing, nn

import knnpool_gen
from formulas import NIN, TABLE, any_mode, options, pooled, values
from knnpool_gen import CaptureError, InvalidArgumentError, KNNPool, pool_forward, pool_function, prepare
from knnpool_gen.runtime import plan
from knnpool_gen.runtime.plan import plan_for
from tables import assert_same_bits
from training import assert_as_expected, batch, expected, loss, network, table
from workers import train_a_share

pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    # Of torch's own code.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The AccumulateGrad node's stream:UserWarning"
    ),
]

both_ways = pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0)])


def state() -> tuple[Any, ...]:
    """The current device and the current stream of each."""
    return torch.cuda.current_device(), *(torch.cuda.current_stream(device) for device in range(2))


@contextmanager
def unchanged() -> Iterator[None]:
    before = state()
    yield
    assert state() == before


def step(x: Tensor, indices: Tensor, mode: str, **chosen: Any) -> tuple[Tensor, Tensor]:
    """Values and gradients, with nothing left behind."""
    leaf = x.detach().requires_grad_()
    with unchanged():
        y = pool_function(leaf, indices, mode, empty_value=0.5, **chosen)
    with unchanged():
        (grad_x,) = torch.autograd.grad((y**2).sum(), leaf)
    assert y.device == grad_x.device == x.device
    return y.detach().cpu(), grad_x.cpu()


def by_formula(x: Tensor, mode: str, **chosen: Any) -> tuple[Tensor, Tensor]:
    leaf = x.detach().cpu().requires_grad_()
    y = pooled(leaf, TABLE, mode, empty_value=0.5, **chosen)
    return y.detach(), torch.autograd.grad((y**2).sum(), leaf)[0]


def close(actual: Any, wanted: Any) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@both_ways
@any_mode
@pytest.mark.parametrize("canary", ["first", "always", "off"])
def test_on_another_device_than_the_current_one(
    here: int, there: int, mode: str, canary: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", canary)
    knnpool_gen.clear_pool_cache()
    x = values(2, 3, NIN)
    wanted = by_formula(x, mode, **options(mode))
    with torch.cuda.device(here):
        for indices in (TABLE, TABLE.to(f"cuda:{here}"), TABLE.to(f"cuda:{there}")):
            for _ in range(2):
                close(step(x.to(f"cuda:{there}"), indices, mode, **options(mode)), wanted)


@both_ways
def test_what_fails_leaves_the_device_alone(here: int, there: int) -> None:
    x = values(2, NIN).to(f"cuda:{there}")
    with torch.cuda.device(here):
        meta = knnpool_gen.pool_meta_from_indices(TABLE, NIN, f"cuda:{here}")
        with unchanged(), pytest.raises(InvalidArgumentError, match=f"x is on cuda:{there}, the plan on cuda:{here}"):
            pool_forward(meta, x, "max")
        with unchanged(), pytest.raises(InvalidArgumentError, match="negative"):
            pool_function(x, TABLE - 1, "max")


@both_ways
def test_on_the_current_stream_of_the_device_of_the_values(here: int, there: int) -> None:
    """Which is not that of the current device, nor the default one."""
    old, new = values(2, 3, NIN), values(2, 3, NIN, seed=1)
    indices = TABLE.to(f"cuda:{there}")
    x, fresh = old.to(f"cuda:{there}"), new.to(f"cuda:{there}")
    prepare(x, indices, "max")
    torch.cuda.synchronize(there)
    side = torch.cuda.Stream(there)
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.copy_(fresh)
        with torch.cuda.device(here), unchanged():
            y = pool_function(x, indices, "max")
    side.synchronize()
    close(y.cpu(), pooled(new, TABLE, "max"))


@any_mode
def test_one_table_on_both_in_turn(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    knnpool_gen.clear_pool_cache()
    built: list[Any] = []
    build = plan.pool_meta_from_indices
    monkeypatch.setattr(plan, "pool_meta_from_indices", lambda *args: built.append(args[2]) or build(*args))
    indices, chosen = TABLE.clone(), options(mode)
    for seed in range(4):
        x = values(2, 3, NIN, seed=seed)
        for device in ("cuda:0", "cuda:1"):
            close(step(x.to(device), indices, mode, **chosen), by_formula(x, mode, **chosen))
    assert built == [torch.device("cuda:0"), torch.device("cuda:1")]


@pytest.mark.parametrize("own_device", [False, True])
@pytest.mark.parametrize("table_device", ["cpu", "cuda:0", "cuda:1"])
@any_mode
def test_one_table_on_both_at_once(mode: str, table_device: str, own_device: bool) -> None:
    """Nothing is built or loaded when the threads begin; each makes its device the current one, or does not."""
    knnpool_gen.clear_pool_cache()
    indices, chosen = TABLE.to(table_device), options(mode)
    x = values(2, 3, NIN)
    wanted = by_formula(x, mode, **chosen)
    barrier = threading.Barrier(4)
    results: list[tuple[Tensor, Tensor]] = []
    states: list[bool] = []

    def train(device: int) -> None:
        if own_device:
            torch.cuda.set_device(device)
        there, before = x.to(f"cuda:{device}"), state()
        barrier.wait()
        for _ in range(20):
            results.append(step(there, indices, mode, **chosen))
        states.append(state() == before)

    threads = [threading.Thread(target=train, args=(device,)) for device in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states == [True] * 4
    assert len(results) == 80
    for result in results:
        close(result, wanted)


def test_back_on_a_device_that_was_not_in_use() -> None:
    """This thread leaves device 1 for a device 0 without a context, which another thread then makes."""
    code = (
        "import threading, torch, knnpool_gen\n"
        "t = torch.arange(8).view(2, 4)\n"
        "x = torch.randn(2, 3, 8)\n"
        "y = knnpool_gen.pool_function(x, t, 'max')\n"
        "assert torch.equal(knnpool_gen.pool_function(x.to('cuda:1'), t, 'max').cpu(), y)\n"
        "assert torch.cuda.current_device() == 0\n"
        "there = []\n"
        "thread = threading.Thread(target=lambda: there.append((x.to('cuda:0'), t.to('cuda:0'))))\n"
        "thread.start(); thread.join()\n"
        "for x0, t0 in there * 2:\n"
        "    assert torch.equal(knnpool_gen.pool_function(x0, t0, 'max').cpu(), y)\n"
        "    assert torch.cuda.current_device() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Layers.


@pytest.mark.parametrize("mode", ["max", "avg", "weighted"])
def test_a_layer_that_moves(mode: str) -> None:
    weights = options("weighted", dtype=torch.float32)["weights"] if mode == "weighted" else None
    pool = KNNPool(TABLE, NIN, mode, weights=weights, empty_value=0.5)
    x = values(2, 3, NIN, dtype=torch.float32)
    wanted = pool(x)
    torch.testing.assert_close(wanted, pooled(x, TABLE, mode, weights=weights, empty_value=0.5))
    for device in ("cuda:0", "cuda:1", "cuda:0", "cpu", "cuda:1"):
        twin = copy.deepcopy(pool)
        with unchanged():
            pool = pool.to(device)
        assert pool.indices.device == torch.device(device)
        for place in ("cuda:0", "cuda:1", "cpu"):  # also for values that lie elsewhere than the table
            for layer in (pool, copy.deepcopy(pool), twin):
                with unchanged():
                    y = layer(x.to(place))
                assert y.device == torch.device(place)
                assert_same_bits(y.cpu(), wanted)


def test_the_nodes_of_a_layer_elsewhere() -> None:
    pool = KNNPool(table(40, 20), 40, "max", return_indices=True)
    x = batch().detach()
    y, nodes = pool(x)
    pool = pool.to("cuda:1")
    for device in ("cuda:0", "cuda:1"):
        there_y, there_nodes = pool(x.to(device))
        assert there_y.device == there_nodes.device == torch.device(device)
        assert_same_bits(there_y.cpu(), y)
        assert torch.equal(there_nodes.cpu(), nodes)


@both_ways
def test_a_model_in_two_parts(here: int, there: int) -> None:
    """The first pooling on one device, the second on the other: one backward goes through both."""
    model = network(KNNPool, f"cuda:{here}")
    model[3:].to(f"cuda:{there}")
    x = batch(f"cuda:{here}")
    with unchanged():
        loss(model[3:](model[:3](x).to(f"cuda:{there}"))).backward()
    actual = [tensor.grad.cpu() for tensor in (*model.parameters(), x)]
    torch.testing.assert_close(actual, expected("cpu"))


@pytest.mark.parametrize("devices", [[0, 1], [1, 0]])
def test_data_parallel(devices: list[int]) -> None:
    device = f"cuda:{devices[0]}"
    model, x = network(KNNPool, device), batch(device)
    parallel = nn.DataParallel(model, devices)
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        with unchanged():
            y = parallel(x)
        with unchanged():
            loss(y).backward()
        assert_as_expected(device, model, x)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Gradients are averaged over the processes, and buffers, the table among them, sent from the first."""
    multiprocessing.spawn(train_a_share, (2, str(tmp_path), "cuda"), nprocs=2)
    model, x = network(KNNPool, "cuda:0"), batch("cuda:0")
    loss(model(x)).backward()
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    on_one = [tensor.grad.cpu() for tensor in (*model.parameters(), x)]
    for *parameters, grad_x in (on_one, expected("cpu")):
        for *of_parameters, _ in shares:
            torch.testing.assert_close(of_parameters, [grad / 2 for grad in parameters])
        torch.testing.assert_close(torch.cat([share[-1] for share in shares]), grad_x)


# Graphs. Their stream is named: the one that torch takes otherwise is that of the first device captured on.


@both_ways
@any_mode
def test_a_graph_on_each(here: int, there: int, mode: str) -> None:
    knnpool_gen.clear_pool_cache()
    indices, chosen = TABLE.clone(), options(mode)
    captured = []
    with torch.cuda.device(here):
        for device in (here, there):
            x = values(2, 3, NIN).to(f"cuda:{device}").requires_grad_()
            with unchanged():
                prepare(x, indices, mode, **chosen, empty_value=0.5)
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with unchanged(), torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                y = pool_function(x, indices, mode, empty_value=0.5, **chosen)
                (grad_x,) = torch.autograd.grad((y**2).sum(), x)
            captured.append((graph, x, y, grad_x))
        for seed in range(3):
            for graph, x, y, grad_x in captured:
                fresh = values(2, 3, NIN, seed=seed)
                with torch.no_grad():
                    x.copy_(fresh)
                with unchanged():
                    graph.replay()
                close((y.detach().cpu(), grad_x.cpu()), by_formula(fresh, mode, **chosen))


@both_ways
def test_captured_while_another_device_is_current(here: int, there: int) -> None:
    """What the graph reads is kept, and what would wait for the device is refused."""
    knnpool_gen.clear_pool_cache()
    indices = TABLE.clone()
    x = values(2, 3, NIN).to(f"cuda:{there}")
    prepare(x, indices, "avg", empty_value=0.5)
    used = weakref.ref(plan_for(indices, NIN, x.device))
    torch.cuda.synchronize(there)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph, stream=torch.cuda.Stream(there)),
        torch.cuda.device(here),
        unchanged(),
    ):
        with pytest.raises(CaptureError, match="the plan of this table is not there yet"):
            pool_function(x, TABLE.clone(), "avg")
        y = pool_function(x, indices, "avg", empty_value=0.5)
    del indices
    knnpool_gen.clear_pool_cache()
    gc.collect()
    assert used() is not None
    fresh = values(2, 3, NIN, seed=1)
    x.copy_(fresh)
    graph.replay()
    close(y.cpu(), by_formula(fresh, "avg")[0])
