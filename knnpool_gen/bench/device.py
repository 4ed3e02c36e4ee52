"""The CUDA device as a stopwatch, and what is known of it and of the software on it."""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from knnpool_gen.bench.measure import Contender, Window
from knnpool_gen.errors import InvalidArgumentError, KNNPoolError
from knnpool_gen.runtime import cuda
from knnpool_gen.runtime.tuned import device_label

SLEEP_CYCLES = 2_000_000
"""For how long the device is kept busy while launches queue up: about a millisecond."""
MAX_SLEEP_CYCLES = 16 * SLEEP_CYCLES
PACKAGES = ("knnpool-gen", "torch", "triton", "numpy", "fovi")


@dataclass(frozen=True)
class Machine:
    """Where something was measured."""

    device: str
    """Name and architecture."""
    multiprocessors: int
    l2_bytes: int
    memory_bytes: int
    system: str


def require_device() -> None:
    """Raise InvalidArgumentError unless there is a CUDA device."""
    if not torch.cuda.is_available():
        raise InvalidArgumentError(
            "there is no CUDA device to measure on; `knnpool-gen bench --report FILE` shows another machine's times"
        )


def machine() -> Machine:
    """The current CUDA device and the system it is in."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return Machine(
        device=device_label(properties.name, (properties.major, properties.minor)),
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        memory_bytes=properties.total_memory,
        system=f"{platform.system()} {platform.machine()}",
    )


def versions() -> dict[str, str | None]:
    """Versions of what takes part in a measurement; None for what is missing."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    try:
        found["nvrtc"] = ".".join(map(str, cuda.nvrtc().getVersion()))
    except KNNPoolError:
        found["nvrtc"] = None
    return found


class CudaTimer:
    """Two events around launches that were all queued before the first of them began."""

    def __init__(self) -> None:
        """Time on the current stream of the current device."""
        self._start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        # Weakly, since contenders hold their buffers.
        self._cycles: WeakKeyDictionary[Contender, int] = WeakKeyDictionary()

    def window(self, contender: Contender, launches: int) -> Window:
        """Time ``launches`` launches; the device sleeps longer for contenders that take the host long."""
        while True:
            cycles = self._cycles.get(contender, SLEEP_CYCLES)
            torch.cuda.synchronize()
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            self._start.record()
            for _ in range(launches):
                contender.launch()
            self._end.record()
            queued = not self._start.query()  # the device still slept when the last launch was queued
            self._end.synchronize()
            if queued or cycles >= MAX_SLEEP_CYCLES:
                return Window(1e3 * float(self._start.elapsed_time(self._end)) / launches, queued)
            self._cycles[contender] = 2 * cycles
