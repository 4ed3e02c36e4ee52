"""How long a call keeps the host: small inputs, thousands of calls, wall clock to the last synchronise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnpool_gen.bench.peers import UnavailableError, fovi_kernels
from knnpool_gen.bench.record import HostResult
from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.functional import pool_function
from knnpool_gen.pooling import pool_forward
from knnpool_gen.runtime.plan import pool_meta_from_indices
from knnpool_gen.vocabulary import Mode

BATCH, CHANNELS = 1, 8
CALLS = 1000
REPEATS = 7

PLAIN = "forward, plan in hand"
NO_GRAD = "forward"
GRAD = "forward with gradients"
BOTH = "forward and backward"


@dataclass(frozen=True)
class HostCall:
    """A call to be timed."""

    call: str
    peer: str
    run: Callable[[], object]


def time_calls(
    calls: Sequence[HostCall],
    synchronize: Callable[[], object],
    count: int = CALLS,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[HostResult]:
    """Run each call ``count`` times in a row, all calls in turn, ``repeats`` times; ``clock`` gives seconds."""
    times: dict[HostCall, list[float]] = {call: [] for call in calls}
    for call in calls:
        for _ in range(max(1, count // 10)):
            call.run()
    for _ in range(repeats):
        for call in calls:
            synchronize()
            start = clock()
            for _ in range(count):
                call.run()
            synchronize()
            times[call].append((clock() - start) / count * 1e6)
    return [
        HostResult(call.call, call.peer, statistics.median(measured), min(measured), count)
        for call, measured in times.items()
    ]


def host_calls(table: BenchTable, say: Callable[[str], None], device: str = "cuda") -> list[HostCall]:
    """Ours, fovi's and some of torch's own calls on a float16 input ``[1, 8, Nin]``; ``say`` is told who is missing."""
    x = torch.randn(BATCH, CHANNELS, table.nin, device=device).half()
    indices = table.indices.to(device)
    calls = list(_our_calls(x, indices, table.nin))
    try:
        calls += _fovi_calls(x, indices, table.nin)
    except UnavailableError as error:
        say(f"fovi left out: {error}")
    return [*calls, *_torch_calls(x)]


def _our_calls(x: Tensor, indices: Tensor, nin: int) -> Iterator[HostCall]:
    mode = Mode.MAX.value
    meta = pool_meta_from_indices(indices, nin)
    leaf = x.clone().requires_grad_()
    yield HostCall(PLAIN, "ours", lambda: pool_forward(meta, x, mode))
    yield HostCall(NO_GRAD, "ours", lambda: pool_function(x, indices, mode))
    yield HostCall(GRAD, "ours", lambda: pool_function(leaf, indices, mode))
    yield HostCall(BOTH, "ours", _both(lambda: pool_function(leaf, indices, mode), leaf))


def _fovi_calls(x: Tensor, indices: Tensor, nin: int) -> Iterator[HostCall]:
    fovi = fovi_kernels()
    mode = Mode.MAX.value
    leaf = x.clone().requires_grad_()
    meta = fovi.pool_meta_from_indices(indices, nin)
    offered: Mapping[str, Callable[[], object]] = {
        PLAIN: lambda: fovi.pool_forward(meta, x, mode),
        NO_GRAD: lambda: fovi.pool_function(x, indices, mode),
        GRAD: lambda: fovi.KNNPoolFunction.apply(leaf, meta, mode, True),
        BOTH: _both(lambda: fovi.KNNPoolFunction.apply(leaf, meta, mode, True), leaf),
    }
    for call, run in offered.items():
        try:
            run()
        except Exception:  # whatever another's code may raise
            continue
        yield HostCall(call, "fovi", run)


def _torch_calls(x: Tensor) -> Iterator[HostCall]:
    grid = torch.randn(BATCH, CHANNELS, 32, 32, device=x.device, dtype=x.dtype)
    grid_leaf = grid.clone().requires_grad_()
    pool: Callable[[Tensor, int, int], Tensor] = torch.nn.functional.max_pool2d
    yield HostCall(NO_GRAD, "max_pool2d", lambda: pool(grid, 3, 2))
    yield HostCall(GRAD, "max_pool2d", lambda: pool(grid_leaf, 3, 2))
    yield HostCall(BOTH, "max_pool2d", _both(lambda: pool(grid_leaf, 3, 2), grid_leaf))
    yield HostCall(NO_GRAD, "torch.add", lambda: torch.add(x, x))


def _both(forward: Callable[[], Tensor], leaf: Tensor) -> Callable[[], object]:
    grad = torch.ones_like(forward())
    return lambda: torch.autograd.grad(forward(), leaf, grad)
