"""The first use of tables, in this process and in new ones, on the CPU."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from knnpool_gen.bench import first_use
from knnpool_gen.bench.first_use import Process, measure_first_use, measure_here
from knnpool_gen.bench.record import FirstUse
from knnpool_gen.errors import KernelError
from measurements import FakeClock


def test_what_is_used_when(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(first_use, "_use", lambda table, device: used.append(table.name))
    monkeypatch.setattr(first_use, "clear_pool_cache", lambda: used.append("forget"))
    measured = measure_here(torch.device("cpu"), lambda: used.append("|"), FakeClock())
    assert used == [
        *("|", "first", "|"),
        *("|", "second", "|"),
        *("|", "|"),
        *("|", "forget", "second", "|"),
        *("|", *(f"other{i}" for i in range(20)), "|"),
    ]
    assert measured == Process(1000, 1000, 1000, 1000, 1000)


def test_tables_are_really_used() -> None:
    measured = measure_here(torch.device("cpu"), lambda: None)
    assert all(milliseconds > 0 for milliseconds in asdict(measured).values())


def test_two_processes_with_one_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[str] = []
    processes = iter([Process(900, 300, 3, 20, 5000), Process(600, 15, 2.5, 8, 250)])

    def run(command: Sequence[str], env: dict[str, str], **_: Any) -> SimpleNamespace:
        assert command[1:] == ["-m", "knnpool_gen.bench.first_use"]
        caches.append(env["KNNPOOL_CACHE_DIR"])
        return SimpleNamespace(returncode=0, stdout="a warning\n" + json.dumps(asdict(next(processes))) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert measure_first_use() == FirstUse(
        process_cold=900, process_warm=600, cold=300, warm=15, plan=2.5, again=8, twenty_cold=5000, twenty_warm=250
    )
    assert len(set(caches)) == 1


def test_a_process_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(returncode=1, stdout="", stderr="no device\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(KernelError, match=r"^measuring the first use of a table failed: no device$"):
        measure_first_use()
