"""Two devices in one process, with a driver that writes down on which one everything happens."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.runtime import compile, cuda, launch
from knnpool_gen.runtime.select import Configuration
from knnpool_gen.vocabulary import Direction, Mode, Staging

KERNEL = KERNELS[KernelKey(Direction.FORWARD, Mode.MAX, "float32", Staging.SHARED, 1)]
CONFIGURATION = Configuration(KERNEL, (("KNNPOOL_K", 9),), 33, 128, 64 * 1024)
VALUES = {name: 0x7F00_0000_0000 + 0x1000 * i for i, name in enumerate(KERNEL.arguments)}


class Thread(threading.local):
    """What CUDA keeps for every thread."""

    device: int = 0
    context: int | None = None


@dataclass
class Machine:
    """Two devices, each with a primary context of the same number."""

    thread: Thread = field(default_factory=Thread)
    events: list[tuple[str, int | None]] = field(default_factory=list)
    """What the driver was asked to do, and the context that was current."""
    owners: dict[int, int | None] = field(default_factory=dict)
    """Of modules and functions: the context they belong to."""
    streams: list[int] = field(default_factory=list)
    fails: str | None = None

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def set_device(self, index: int) -> None:
        self.thread.device = self.thread.context = index

    @contextlib.contextmanager
    def guard(self, index: int) -> Iterator[None]:
        before = self.thread.device
        self.set_device(index)
        try:
            yield
        finally:
            self.set_device(before)

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return 0 if self.thread.context is None else 100 + self.thread.context

    def _happens(self, what: str) -> None:
        assert self.thread.context is not None, "no context is current"
        self.events.append((what, self.thread.context))
        if self.fails == what:
            raise RuntimeError(f"{what} failed")

    def moduleLoadData(self, binary: bytes) -> int:  # noqa: N802
        self._happens("load")
        handle = 1000 + len(self.owners)
        self.owners[handle] = self.thread.context
        return handle

    def moduleGetFunction(self, module: int, name: str) -> int:  # noqa: N802
        assert self.owners[module] == self.thread.context
        handle = 2000 + len(self.owners)
        self.owners[handle] = self.thread.context
        return handle

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        assert self.owners[function] == self.thread.context
        self._happens("attribute")

    def launchKernel(self, function: int, *facts: int) -> None:  # noqa: N802
        assert self.owners[function] == self.thread.context, "a function of another context"
        self.streams.append(facts[7])
        self._happens("launch")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()
    machine.set_device(0)
    monkeypatch.setattr(cuda, "driver", lambda: machine)
    monkeypatch.setattr(cuda, "runtime", lambda: SimpleNamespace(setDevice=machine.set_device))
    monkeypatch.setattr(cuda, "capture_mode_exchange", lambda: lambda mode: 0)
    monkeypatch.setattr(compile, "cubin", lambda kernel, arch, macros: arch.encode())
    monkeypatch.setattr(torch.cuda, "device", machine.guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.thread.device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(launch, "_current_stream", lambda index: 70 + index)
    launch.forget_kernels()
    yield machine
    launch.forget_kernels()


FIRST_CALL = ["load", "attribute", "launch"]


@pytest.mark.parametrize(("current", "wanted"), [(0, 1), (1, 0), (0, 0), (1, 1)])
def test_the_device_of_the_tensors_decides(machine: Machine, current: int, wanted: int) -> None:
    """Whichever is current; and it is current again afterwards."""
    machine.set_device(current)
    launch.launch(CONFIGURATION, wanted, VALUES)
    assert machine.events == [(what, wanted) for what in FIRST_CALL]
    assert machine.streams == [70 + wanted]
    assert (machine.thread.device, machine.thread.context) == (current, current)


def test_each_device_has_its_own_kernel(machine: Machine) -> None:
    for device in (0, 1, 0, 1):
        launch.launch(CONFIGURATION, device, VALUES)
    assert [context for what, context in machine.events if what == "load"] == [0, 1]
    assert [context for what, context in machine.events if what == "launch"] == [0, 1, 0, 1]
    assert machine.streams == [70, 71, 70, 71]


@pytest.mark.parametrize("step", FIRST_CALL)
def test_a_failure_leaves_the_current_device_alone(machine: Machine, step: str) -> None:
    machine.fails = step
    with pytest.raises(RuntimeError, match=f"{step} failed"):
        launch.launch(CONFIGURATION, 1, VALUES)
    assert (machine.thread.device, machine.thread.context) == (0, 0)
    machine.fails = None
    launch.launch(CONFIGURATION, 1, VALUES)
    assert machine.events[-1] == ("launch", 1)


def test_threads_on_a_device_each(machine: Machine) -> None:
    """New threads, which have no context yet, calling at once: each kernel is loaded once for each device."""
    barrier = threading.Barrier(6)
    after: list[tuple[int, int]] = []

    def call(device: int) -> None:
        barrier.wait()
        for _ in range(5):
            launch.launch(CONFIGURATION, device, VALUES)
        after.append((device, machine.thread.device))

    threads = [threading.Thread(target=call, args=(i % 2,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(after) == [(0, 0)] * 3 + [(1, 0)] * 3
    assert sorted(str(context) for what, context in machine.events if what == "load") == ["0", "1"]
    assert sorted(machine.streams) == [70] * 15 + [71] * 15
