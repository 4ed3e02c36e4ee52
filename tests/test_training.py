"""Layers in training on a CPU, and in the processes that go with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import multiprocessing, nn
from torch.utils.data import DataLoader

from formulas import pooled
from knnpool_gen import KNNPool
from training import CHECKS, Formula, batch, expected, gradients, loss, network, table
from workers import Collate, Pooled, train_a_share

# Of torch's own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", CHECKS)
def test_training(name: str) -> None:
    CHECKS[name]("cpu")


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_in_the_workers_of_a_loader(start: str) -> None:
    """With its plan built before they are forked, and after they are."""
    data, collate = Pooled(), Collate()
    data.pool(data.values)
    batches = list(DataLoader(data, batch_size=2, num_workers=2, collate_fn=collate, multiprocessing_context=start))
    rows, processes = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert len(processes.unique()) == 2
    assert os.getpid() not in processes.tolist()
    torch.testing.assert_close(rows, pooled(pooled(data.values, table(40, 20), "max"), table(20, 8), "avg"))


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """Gradients are averaged over the processes, and buffers, the table among them, sent from the first."""
    multiprocessing.spawn(train_a_share, (2, str(tmp_path)), nprocs=2)
    *parameters, grad_x = expected("cpu")
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for *of_parameters, _ in shares:
        torch.testing.assert_close(of_parameters, [grad / 2 for grad in parameters])
    torch.testing.assert_close(torch.cat([share[-1] for share in shares]), grad_x)


def trained(pool: type[nn.Module], steps: int) -> list[float]:
    model = network(pool)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = (model(batch()) - 1).square().mean()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_training_runs_as_with_the_formula() -> None:
    losses = trained(KNNPool, 30)
    assert losses == pytest.approx(trained(Formula, 30), rel=1e-9)
    assert losses[-1] < losses[0] / 10


def test_a_model_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Model and optimiser through a file, into a model that was made with other tables."""
    model: Any = network(KNNPool)
    loss(model(batch())).backward()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again: Any = network(KNNPool)
    again[1].indices.zero_()
    again[0].weight.data.zero_()
    again.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = batch()
    loss(again(x)).backward()
    torch.testing.assert_close(gradients(again, x), expected("cpu"))
