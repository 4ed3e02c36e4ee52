"""Two GPUs in one process: the tensor's device decides, and the caller's current device and stream stay."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from knnpool_gen import KNNPool, pool_function

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

INDICES = torch.randint(0, 110, (9, 40), generator=torch.Generator().manual_seed(0))  # some of it padding
X = torch.randn(8, 4, 100, generator=torch.Generator().manual_seed(1))
MODES = ["max", "avg", "sum"]


def step(x: Tensor, indices: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Pooled values and gradient, on the CPU."""
    leaf = x.clone().requires_grad_()
    y = pool_function(leaf, indices, mode)
    y.nan_to_num().square().sum().backward()
    assert leaf.grad is not None
    return y.detach().cpu(), leaf.grad.cpu()


@pytest.fixture(autouse=True)
def nothing_changes_behind_the_caller() -> Iterator[None]:
    before = torch.cuda.current_device(), [torch.cuda.current_stream(i) for i in range(2)]
    yield
    assert (torch.cuda.current_device(), [torch.cuda.current_stream(i) for i in range(2)]) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("current", "device"), [(0, 1), (1, 0)])
def test_the_device_of_the_tensors_decides(current: int, device: int, mode: str) -> None:
    wanted = step(X, INDICES, mode)
    with torch.cuda.device(current):
        found = step(X.to(f"cuda:{device}"), INDICES.to(f"cuda:{device}"), mode)
        assert torch.cuda.current_device() == current
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def test_one_table_on_both_in_turn() -> None:
    wanted = step(X, INDICES, "max")
    for device in (0, 1, 0, 1):
        found = step(X.to(f"cuda:{device}"), INDICES, "max")  # a table on the CPU serves both
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_one_table_from_two_threads_at_once() -> None:
    wanted = step(X, INDICES, "avg")
    found: dict[int, list[tuple[Tensor, Tensor]]] = {0: [], 1: []}
    barrier = threading.Barrier(2)

    def work(device: int) -> None:
        barrier.wait()
        found[device] = [step(X.to(f"cuda:{device}"), INDICES, "avg") for _ in range(10)]

    threads = [threading.Thread(target=work, args=(device,)) for device in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for results in found.values():
        assert len(results) == 10
        for result in results:
            torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


def test_a_layer_that_moves_and_its_copy() -> None:
    layer = KNNPool(INDICES, 100, "max").to("cuda:0")
    wanted = pool_function(X, INDICES, "max")
    assert torch.equal(layer(X.to("cuda:0")).cpu(), wanted)
    twin = copy.deepcopy(layer).to("cuda:1")
    assert torch.equal(twin(X.to("cuda:1")).cpu(), wanted)
    assert torch.equal(layer.to("cuda:1")(X.to("cuda:1")).cpu(), wanted)


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(100, 100), KNNPool(INDICES, 100, "max"), torch.nn.Linear(40, 3))


def gradients(model: torch.nn.Module) -> list[Tensor]:
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_data_parallel() -> None:
    single = network().to("cuda:0")
    single(X.to("cuda:0")).square().sum().backward()
    model = network().to("cuda:0")
    torch.nn.DataParallel(model, [0, 1])(X.to("cuda:0")).square().sum().backward()
    assert len(gradients(model)) == 4
    torch.testing.assert_close(gradients(model), gradients(single), rtol=1e-4, atol=1e-4)


def _rank(rank: int, port: int, results: list[str]) -> None:
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=2)
    try:
        torch.cuda.set_device(rank)
        model = torch.nn.parallel.DistributedDataParallel(network().to(rank), [rank])
        model(X[4 * rank : 4 * rank + 4].to(rank)).square().sum().backward()
        if rank == 0:
            torch.save(gradients(model), results[0])
    finally:
        torch.distributed.destroy_process_group()


def test_distributed(tmp_path_factory: pytest.TempPathFactory, unused_port: int) -> None:
    path = str(tmp_path_factory.mktemp("ddp") / "gradients.pt")
    torch.multiprocessing.spawn(_rank, (unused_port, [path]), nprocs=2)
    single = network()
    single(X).square().sum().backward()
    mean = [gradient / 2 for gradient in gradients(single)]  # DDP averages over the ranks
    torch.testing.assert_close(torch.load(path), mean, rtol=1e-4, atol=1e-4)


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.mark.parametrize("device", [0, 1])
def test_a_graph_on_each(device: int) -> None:
    with torch.cuda.device(device):
        layer = KNNPool(INDICES, 100, "max").cuda()
        x = X.cuda()
        layer.prepare(dtype=x.dtype)
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        x.neg_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y.cpu(), pool_function(-X, INDICES, "max"))
