"""How training is timed in several processes, which run on the CPU here."""

from __future__ import annotations

import pytest
import torch

from knnpool_gen.bench.two_gpus import BATCH, NODES, measure_two_gpus, milliseconds, small_model
from knnpool_gen.errors import InvalidArgumentError, KernelError


def test_two_processes() -> None:
    assert milliseconds(2, "cpu", steps=1) > 0


def test_a_process_that_fails() -> None:
    with pytest.raises(KernelError, match=r"(?s)training in 1 process\(es\) failed: .*nowhere"):
        milliseconds(1, "nowhere")


def test_fewer_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InvalidArgumentError, match=r"measures on two CUDA devices; there is 1$"):
        measure_two_gpus()


def test_the_model_learns_from_all_of_its_input() -> None:
    model = small_model()
    y = model(torch.randn(BATCH, 3, NODES[0]))
    y.sum().backward()
    assert y.shape == (BATCH, 10)
    assert all(parameter.grad is not None for parameter in model.parameters())
