"""What the first use of a table takes, in new processes: with an empty cache of kernels, and with a filled one.

``python -m knnpool_gen.bench.first_use`` measures in the process that it starts and prints JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch

from knnpool_gen import clear_pool_cache, pool_backward, pool_forward, pool_meta_from_indices
from knnpool_gen.bench.record import FirstUse
from knnpool_gen.bench.tables import BenchTable, made_table
from knnpool_gen.errors import KernelError
from knnpool_gen.vocabulary import Mode

TABLES = 20


@dataclass(frozen=True)
class Process:
    """Milliseconds in one process, in this order."""

    first: float
    """A table, with all that is loaded then."""
    table: float
    """Another one."""
    plan: float
    """What its plan takes of that."""
    again: float
    """The same after everything kept in memory was forgotten."""
    twenty: float
    """Twenty more tables."""


def measure_first_use() -> FirstUse:
    """Two processes with one folder for compiled kernels, empty for the first.

    Raises:
        KernelError: such a process failed; the message is the end of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="knnpool-bench-") as folder:
        cold, warm = _process(folder), _process(folder)
    return FirstUse(
        process_cold=cold.first,
        process_warm=warm.first,
        cold=cold.table,
        warm=warm.table,
        plan=warm.plan,
        again=warm.again,
        twenty_cold=cold.twenty,
        twenty_warm=warm.twenty,
    )


def measure_here(
    device: torch.device,
    synchronize: Callable[[], object],
    clock: Callable[[], float] = time.perf_counter,
) -> Process:
    """Use tables for the first time in this process; ``clock`` gives seconds."""

    def timed(use: Callable[[], object]) -> float:
        synchronize()
        start = clock()
        use()
        synchronize()
        return 1e3 * (clock() - start)

    first, second = made_table("first", 700, 180, 9), made_table("second", 964, 230, 9)
    others = [made_table(f"other{i}", 1000 + i, 250 + i, 9) for i in range(TABLES)]
    torch.zeros(1, device=device).add_(1)  # the context is no part of it

    def after_forgetting() -> None:
        clear_pool_cache()
        _use(second, device)

    def use_others() -> None:
        for table in others:
            _use(table, device)

    return Process(
        first=timed(partial(_use, first, device)),
        table=timed(partial(_use, second, device)),
        plan=timed(lambda: pool_meta_from_indices(second.indices, second.nin, device)),
        again=timed(after_forgetting),
        twenty=timed(use_others),
    )


def _use(table: BenchTable, device: torch.device) -> None:
    """Pool once each way."""
    x = torch.ones(8, 16, table.nin, dtype=torch.float16, device=device)
    meta = pool_meta_from_indices(table.indices, table.nin, device)
    y, aux = pool_forward(meta, x, Mode.MAX.value)
    pool_backward(meta, y, aux, Mode.MAX.value)


def _process(cache: str) -> Process:
    """Measure in a new process."""
    ended = subprocess.run(
        [sys.executable, "-m", "knnpool_gen.bench.first_use"],
        capture_output=True,
        text=True,
        env={**os.environ, "KNNPOOL_CACHE_DIR": cache},
    )
    if ended.returncode != 0:
        raise KernelError(f"measuring the first use of a table failed: {ended.stderr.strip()[-500:]}")
    return Process(**json.loads(ended.stdout.splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(torch.device("cuda", 0), torch.cuda.synchronize))))
