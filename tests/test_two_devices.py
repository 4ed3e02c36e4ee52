"""Two devices in one process, with a driver that writes down what was current when it was asked for something.

The tensors are on the CPU and only say that they are on a device; their addresses are as good as any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import knnpool_gen
from knnpool_gen.errors import InvalidArgumentError, KernelError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.reduction import Reduction, make_reduction
from knnpool_gen.runtime import canary, capture, compile, cuda, execute, launch
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import Configuration, DeviceFacts
from knnpool_gen.vocabulary import Direction, Mode, Staging
from launch_description import LaunchDescription

KERNEL = KERNELS[KernelKey(Direction.FORWARD, Mode.MAX, "float32", Staging.SHARED, 1)]
CONFIGURATION = Configuration(KERNEL, (("KNNPOOL_K", 9),), 33, 128, 100_000, 33)
VALUES = {name: 0x1000 * i for i, name in enumerate(KERNEL.arguments)}
INDICES = torch.tensor([[0, 2, 5, 1], [1, 5, 5, 3]])
CONTEXT, STREAM = 0x100, 0x500
"""Handles of device 0; those of device 1 are one more."""

both_ways = pytest.mark.parametrize(("here", "there"), [(0, 1), (1, 0)])


class Thread(threading.local):
    """What CUDA and torch keep for each thread."""

    context: int | None = None
    """The device whose context is current in the driver, if any is."""
    wanted: int | None = None
    """The device that torch will make current when there is something to do on it."""

    @property
    def device(self) -> int:
        """The current device, as the runtime says."""
        return self.context or 0


@dataclass(frozen=True)
class Event:
    what: str
    device: int
    """That is current for torch."""
    context: int | None
    """The device whose context is current in the driver."""
    on: int
    """The device of the module, the stream or the memory that it is about."""


@dataclass
class Machine:
    """Looks like ``cupy.cuda.driver`` and ``cupy.cuda.runtime``, and changes devices as torch does."""

    thread: Thread = field(default_factory=Thread)
    in_use: set[int] = field(default_factory=set)
    events: list[Event] = field(default_factory=list)
    functions: list[int] = field(default_factory=list)
    """The device of each function."""
    binaries: list[tuple[int, bytes]] = field(default_factory=list)
    captured: set[int] = field(default_factory=set)
    """The devices whose current stream is being captured."""
    fails: str = ""
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def note(self, what: str, on: int) -> None:
        self.events.append(Event(what, self.current_device(), self.thread.context, on))
        if what == self.fails:
            raise RuntimeError(f"CUDA_ERROR in {what}")

    def noted(self, what: str) -> list[Event]:
        return [event for event in self.events if event.what == what]

    # torch

    def current_device(self) -> int:
        return self.thread.device if self.thread.wanted is None else self.thread.wanted

    @contextmanager
    def guard(self, device: Any) -> Iterator[None]:
        index = device if isinstance(device, int) else device.index
        before = self.current_device()
        if self.thread.wanted is not None or index != before:
            self.setDevice(index)
        self.thread.wanted = None
        try:
            yield
        finally:
            if before in self.in_use:
                self.setDevice(before)
            elif before != self.thread.device:  # no context is made just to go back
                self.thread.wanted = before

    # The runtime

    def setDevice(self, index: int) -> None:  # noqa: N802
        self.thread.context = index
        self.in_use.add(index)

    # The driver

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return 0 if self.thread.context is None else CONTEXT + self.thread.context

    def ctxGetDevice(self) -> int:  # noqa: N802
        assert self.thread.context is not None, "CUDA_ERROR_INVALID_CONTEXT"
        return self.thread.context

    def moduleLoadData(self, binary: bytes) -> int:  # noqa: N802
        assert self.thread.context is not None, "CUDA_ERROR_INVALID_CONTEXT"
        self.note("load", self.thread.context)
        self.binaries.append((self.thread.context, binary))
        self.functions.append(self.thread.context)
        return len(self.functions) - 1

    def moduleGetFunction(self, module: int, name: str) -> int:  # noqa: N802
        return module

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self.note("attribute", self.functions[function])

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:  # noqa: N802
        self.note("occupancy", self.functions[function])
        return 4

    def launchKernel(self, function: int, *facts: int) -> None:  # noqa: N802
        self.note("launch", self.functions[function])
        self.note("stream", facts[7] - STREAM)

    def launch_kernel_ex(self, description: int, function: int, parameters: int, extra: None) -> int:
        self.note("launch", self.functions[function])
        self.note("stream", LaunchDescription.at(description).stream - STREAM)
        return 0


class Placed(Tensor):
    """On a device, by its own account."""

    place = -1

    def get_device(self) -> int:
        return self.place


KINDS = [type(f"Placed{index}", (Placed,), {"place": index}) for index in range(2)]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine()

    def new_empty(tensor: Placed, *size: Any, **options: Any) -> Tensor:
        machine.note("allocation", tensor.place)
        return Tensor.new_empty(tensor, *size, **options)

    monkeypatch.setattr(Placed, "new_empty", new_empty)
    monkeypatch.setattr(cuda, "driver", lambda: machine)
    monkeypatch.setattr(cuda, "runtime", lambda: machine)
    monkeypatch.setattr(cuda, "capture_mode_exchange", lambda: lambda mode: 0)
    monkeypatch.setattr(cuda, "launch_kernel_ex", lambda: machine.launch_kernel_ex)
    monkeypatch.setattr(compile, "cubin", lambda kernel, arch, macros: f"{kernel.name} {arch} {macros}".encode())
    monkeypatch.setattr(torch.cuda, "device", machine.guard)
    monkeypatch.setattr(torch.cuda, "current_device", machine.current_device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.current_device() in machine.captured)
    monkeypatch.setattr(launch, "_current_stream", lambda index: STREAM + index)
    monkeypatch.setattr(execute, "device_facts", lambda index: DeviceFacts(132, 227 * 1024, 228 * 1024, 2048))
    monkeypatch.setattr(launch, "_facts", dict.fromkeys(range(2), execute.device_facts(0)))
    monkeypatch.setattr(capture, "_held", {})
    monkeypatch.setenv("KNNPOOL_CANARY", "off")
    knnpool_gen.clear_pool_cache()
    yield machine
    knnpool_gen.clear_pool_cache()


def plan_on(device: int) -> PoolMeta:
    plan = pool_meta_from_indices(INDICES, 5)
    for name, value in vars(plan).items():
        if isinstance(value, Tensor):
            object.__setattr__(plan, name, value.as_subclass(KINDS[device]))
    return plan


def values_on(device: int, *shape: int) -> Tensor:
    return torch.ones(shape).as_subclass(KINDS[device])


def everything_on(device: int, *whats: str) -> list[Event]:
    return [Event(what, device, device, device) for what in whats]


def at_once(*calls: Callable[[], object]) -> None:
    """Run ``calls`` in new threads, and raise what one of them raised."""
    barrier, errors = threading.Barrier(len(calls)), []

    def run(call: Callable[[], object]) -> None:
        barrier.wait()
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# Configurations to launches.


def test_loaded_once_on_each_device(machine: Machine) -> None:
    for device in (0, 1, 1, 0, 1):
        launch.launch(CONFIGURATION, device, VALUES)
    binary = f"{KERNEL.name} sm_90 {CONFIGURATION.macros}".encode()
    assert machine.binaries == [(0, binary), (1, binary)]
    assert machine.noted("load") == [Event("load", 0, 0, 0), Event("load", 1, 1, 1)]
    assert [event.on for event in machine.noted("launch")] == [0, 1, 1, 0, 1]


@both_ways
def test_on_another_device_than_the_current_one(machine: Machine, here: int, there: int) -> None:
    machine.setDevice(here)
    for steps in (("load", "attribute", "occupancy", "launch", "stream"), ("occupancy", "launch", "stream")):
        machine.events.clear()
        launch.launch(CONFIGURATION, there, VALUES)
        assert machine.events == everything_on(there, *steps)
        assert machine.current_device() == machine.thread.context == here


@both_ways
@pytest.mark.parametrize("what", ["load", "attribute", "launch"])
def test_the_current_device_after_a_failure(machine: Machine, here: int, there: int, what: str) -> None:
    machine.setDevice(here)
    machine.fails = what
    with pytest.raises(RuntimeError, match=f"CUDA_ERROR in {what}"):
        launch.launch(CONFIGURATION, there, VALUES)
    assert machine.current_device() == machine.thread.context == here
    machine.fails = ""
    launch.launch(CONFIGURATION, here, VALUES)
    launch.launch(CONFIGURATION, there, VALUES)
    assert machine.noted("launch")[-2:] == [*everything_on(here, "launch"), *everything_on(there, "launch")]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("loaded", [False, True])
def test_a_thread_without_a_context(machine: Machine, device: int, loaded: bool) -> None:
    if loaded:
        launch.launch(CONFIGURATION, device, VALUES)
        machine.events.clear()
    after: list[int] = []

    def call() -> None:
        assert machine.ctxGetCurrent() == 0
        launch.launch(CONFIGURATION, device, VALUES)
        after.append(machine.current_device())

    at_once(call)
    steps = ("occupancy", "launch", "stream") if loaded else ("load", "attribute", "occupancy", "launch", "stream")
    assert machine.events == everything_on(device, *steps)
    assert after == [0]


@pytest.mark.parametrize("loaded", [False, True])
def test_back_on_a_device_that_was_not_in_use(machine: Machine, loaded: bool) -> None:
    """torch says 0 and the driver still has the context of 1."""
    launch.launch(CONFIGURATION, 1, VALUES)
    assert (machine.current_device(), machine.thread.context) == (0, 1)
    if loaded:
        at_once(lambda: launch.launch(CONFIGURATION, 0, VALUES))
    machine.events.clear()
    launch.launch(CONFIGURATION, 0, VALUES)
    steps = ("occupancy", "launch", "stream") if loaded else ("load", "attribute", "occupancy", "launch", "stream")
    assert machine.events == everything_on(0, *steps)
    assert machine.current_device() == 0


# From tensors to launches.


def reduction_on(plan: PoolMeta, device: int, mode: str) -> Reduction:
    weights = torch.ones(2, 4) if mode == "weighted" else None
    reduction = make_reduction(plan, torch.float32, mode, weights=weights)
    if reduction.weights is not None:
        for name, value in vars(reduction.weights).items():
            object.__setattr__(reduction.weights, name, value.as_subclass(KINDS[device]))
    return reduction


@both_ways
@pytest.mark.parametrize("mode", ["max", "avg", "weighted"])
def test_forward_and_backward(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, here: int, there: int, mode: str
) -> None:
    """On the device of the values, with its tables, in turns with the other one."""
    passed: list[tuple[int, list[int]]] = []
    start = launch.start
    monkeypatch.setattr(execute, "start", lambda *args: passed.append((args[2], args[3])) or start(*args))
    machine.setDevice(here)
    plans = [plan_on(device) for device in range(2)]
    reductions = [reduction_on(plan, device, mode) for device, plan in enumerate(plans)]
    tables = [
        {tensor.data_ptr() for tensor in (*vars(plan).values(), *vars(reduction.weights or plan).values())
         if isinstance(tensor, Tensor)}
        for plan, reduction in zip(plans, reductions, strict=True)
    ]  # fmt: skip
    for turn in range(3):
        for device in (there, here):
            machine.events.clear()
            passed.clear()
            x = values_on(device, 6, 5)
            y, aux = execute.forward(plans[device], x, reductions[device], need_aux=True, rs=None)
            assert machine.current_device() == machine.thread.context == here
            grad_x = execute.backward(plans[device], y, aux, reductions[device], rs=None)
            assert machine.current_device() == machine.thread.context == here
            assert type(y) is type(grad_x) is KINDS[device]
            assert {event.on for event in machine.events} == {device}
            in_driver = [event for event in machine.events if event.what != "allocation"]
            assert {(event.device, event.context) for event in in_driver} == {(device, device)}
            assert len(machine.noted("load")) == (2 if turn == 0 else 0)
            assert [event.device for event in machine.noted("allocation")] == [here] * (3 if mode == "max" else 2)
            for launched_on, addresses in passed:
                assert launched_on == device
                assert tables[device] & set(addresses)
                assert not tables[1 - device] & set(addresses)


@both_ways
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("mode", ["max", "weighted"])
def test_tables_of_one_device_serve_no_other(
    machine: Machine, here: int, there: int, prepared: bool, mode: str
) -> None:
    plan = plan_on(here)
    reduction = reduction_on(plan, here, mode)
    if prepared:
        execute.forward(plan, values_on(here, 6, 5), reduction, need_aux=False, rs=None)
    machine.events.clear()
    with pytest.raises(InvalidArgumentError, match=rf"is on cpu, the values on cuda:{there}"):
        execute.forward(plan, values_on(there, 6, 5), reduction, need_aux=False, rs=None)
    assert machine.noted("launch") == []


def test_weights_of_one_device_serve_no_other(machine: Machine) -> None:
    reduction = reduction_on(plan_on(0), 0, "weighted")
    with pytest.raises(InvalidArgumentError, match=r"^weights is on cpu, the values on cuda:1$"):
        execute.forward(plan_on(1), values_on(1, 6, 5), reduction, need_aux=False, rs=None)


@both_ways
def test_the_canary_looks_where_the_outputs_are(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, here: int, there: int
) -> None:
    """These kernels write nothing: it says so, and the current device is what it was."""
    monkeypatch.setenv("KNNPOOL_CANARY", "first")
    machine.setDevice(here)
    devices: list[int] = []
    look = canary._bytes
    monkeypatch.setattr(canary, "_bytes", lambda output: devices.append(machine.current_device()) or look(output))
    plan = plan_on(there)
    with pytest.raises(KernelError, match="unwritten"):
        execute.forward(plan, values_on(there, 6, 5), make_reduction(plan, torch.float32, "avg"), False, None)
    assert set(devices) == {there}
    assert machine.noted("launch") == 2 * everything_on(there, "launch")
    assert machine.current_device() == machine.thread.context == here


@pytest.mark.parametrize("own_device", [False, True])
def test_threads_on_both_devices_at_once(machine: Machine, own_device: bool) -> None:
    """Each thread makes its device the current one, or leaves that to the call."""
    plans = [plan_on(device) for device in range(2)]
    turns = 20

    def call(device: int) -> None:
        plan = plans[device]
        reduction = make_reduction(plan, torch.float32, "max")
        if own_device:
            machine.setDevice(device)
        for _ in range(turns):
            execute.forward(plan, values_on(device, 6, 5), reduction, need_aux=False, rs=None)
            assert machine.current_device() == (device if own_device else 0)

    at_once(*(lambda device=device: call(device) for device in (0, 1) * 3))
    in_driver = [event for event in machine.events if event.what != "allocation"]
    assert all(event.device == event.context == event.on for event in in_driver)
    assert sorted(event.on for event in machine.noted("load")) == [0, 1]
    assert sorted(event.on for event in machine.noted("launch")) == [0] * 3 * turns + [1] * 3 * turns


# Captures, and how tables are built.


@both_ways
def test_the_capture_that_counts_is_that_of_the_values(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, here: int, there: int
) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", "first")  # inside a capture it must not look
    machine.setDevice(here)
    plan = plan_on(there)
    reduction = make_reduction(plan, torch.float32, "avg")
    machine.captured = {there}
    execute.forward(plan, values_on(there, 6, 5), reduction, need_aux=False, rs=None)
    assert plan in capture._held.values()
    capture._held.clear()
    monkeypatch.setenv("KNNPOOL_CANARY", "off")
    machine.captured = {here}
    execute.forward(plan, values_on(there, 6, 5), reduction, need_aux=False, rs=None)
    assert not capture._held


@pytest.fixture
def streams(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The current stream of each device; a new thread begins on the default ones."""
    streams = [SimpleNamespace(cuda_stream=0, device=torch.device("cuda", index)) for index in range(2)]

    def current_stream(device: int | None = None) -> Any:
        return streams[machine.current_device() if device is None else device]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return streams


def test_a_capture_on_any_device_is_noticed(machine: Machine, streams: list[Any]) -> None:
    machine.setDevice(0)
    assert not capture.capturing()
    assert machine.in_use == {0}  # a device that nobody uses is left alone
    streams[1].cuda_stream = STREAM + 1
    assert not capture.capturing()
    machine.captured = {1}
    assert capture.capturing()
    assert machine.current_device() == machine.thread.context == 0
    with pytest.raises(knnpool_gen.CaptureError):
        pool_meta_from_indices(INDICES, 5)
    machine.captured = {0}
    assert capture.capturing()


@both_ways
@pytest.mark.parametrize("side", [[], [0], [1], [0, 1]])
def test_tables_are_built_on_the_callers_streams(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, streams: list[Any], here: int, there: int, side: list[int]
) -> None:
    """Those of all devices: the plan may be for another one than the current."""
    machine.setDevice(here)
    for device in side:
        streams[device].cuda_stream = STREAM + device
    on: dict[int, int] = {}

    def set_stream(stream: Any) -> None:
        machine.setDevice(stream.device.index)
        on[stream.device.index] = stream.cuda_stream

    monkeypatch.setattr(torch.cuda, "set_stream", set_stream)

    @capture.built_apart
    def build() -> int:
        return machine.current_device()

    assert build() == here
    assert {device: handle for device, handle in on.items() if handle} == {device: STREAM + device for device in side}
    assert machine.in_use == {here, *side}
    assert machine.current_device() == here
