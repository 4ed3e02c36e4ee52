"""How training spreads over two GPUs: a small model under ``DistributedDataParallel``, a process for each GPU."""

from __future__ import annotations

import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.parallel import DistributedDataParallel

from knnpool_gen.bench.record import TwoGpus
from knnpool_gen.bench.tables import made_table
from knnpool_gen.errors import InvalidArgumentError, KernelError
from knnpool_gen.module import KNNPool

BATCH = 64
"""Of each process."""
NODES = (964, 230, 60)
CHANNELS = 64
WARM_UP = 10
STEPS = 100


def measure_two_gpus() -> TwoGpus:
    """A step of one process alone, and of two with a batch each.

    Raises:
        InvalidArgumentError: there are fewer GPUs.
        KernelError: such a process failed.
    """
    found = torch.cuda.device_count()
    if found < 2:
        raise InvalidArgumentError(f"--two-gpus measures on two CUDA devices; there is {found}")
    return TwoGpus(one=milliseconds(1, "cuda"), two=milliseconds(2, "cuda"))


def milliseconds(processes: int, kind: str, steps: int = STEPS) -> float:
    """The time of a step, in the process that takes longest; ``kind`` is cpu or cuda.

    Raises:
        KernelError: a process failed.
    """
    with tempfile.TemporaryDirectory(prefix="knnpool-bench-") as folder:
        try:
            spawn(train, (processes, folder, kind, steps), nprocs=processes)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise KernelError(f"training in {processes} process(es) failed: {str(error).strip()[-500:]}") from error
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(processes))


def train(rank: int, processes: int, folder: str, kind: str, steps: int) -> None:
    """One of the processes: leaves its milliseconds a step in ``folder``."""
    cuda = kind == "cuda"
    device = torch.device(kind, rank) if cuda else torch.device(kind)
    if cuda:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes
    )
    model = DistributedDataParallel(small_model().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, 3, NODES[0], device=device)

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        if cuda:
            torch.cuda.synchronize(device)

    run(WARM_UP)
    start = time.perf_counter()
    run(steps)
    (Path(folder) / str(rank)).write_text(repr(1e3 * (time.perf_counter() - start) / steps))
    distributed.destroy_process_group()


def small_model() -> nn.Sequential:
    """Two poolings among layers that learn, on ``[B, 3, NODES[0]]``."""
    tables = [made_table("made", nin, nout, 9) for nin, nout in pairwise(NODES)]
    return nn.Sequential(
        nn.Conv1d(3, CHANNELS, 1),
        KNNPool(tables[0].indices, NODES[0], "max"),
        nn.GELU(),
        nn.Conv1d(CHANNELS, CHANNELS, 1),
        KNNPool(tables[1].indices, NODES[1], "avg"),
        nn.Flatten(),
        nn.Linear(CHANNELS * NODES[2], 10),
    )
