"""What other processes run; those that are spawned import it from here."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, get_worker_info

from knnpool_gen import KNNPool
from training import batch, gradients, loss, network, table


class Pooled(Dataset[Tensor]):
    """Rows that the workers pool; each says which process made it."""

    def __init__(self) -> None:
        self.pool = KNNPool(table(40, 20), 40, "max")
        self.values = batch(size=8).detach()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        assert get_worker_info() is not None
        return self.pool(self.values[row]), os.getpid()


class Collate:
    """Pools what is stacked."""

    def __init__(self) -> None:
        self.pool = KNNPool(table(20, 8), 20, "avg")

    def __call__(self, items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        rows, processes = zip(*items, strict=True)
        return self.pool(torch.stack(rows)), torch.tensor(processes)


def train_a_share(rank: int, processes: int, folder: str, kind: str = "cpu") -> None:
    """One process of several, each on its own device if ``kind`` is cuda: its share of the batch, and the gradients
    that they have in common.
    """
    torch.set_num_threads(1)
    device = kind
    if kind == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    model = DistributedDataParallel(network(KNNPool, device))
    share = batch().detach().chunk(processes)[rank].to(device).requires_grad_()
    loss(model(share)).backward()
    torch.save([grad.cpu() for grad in gradients(model, share)], Path(folder) / f"{rank}.pt")
    distributed.destroy_process_group()
