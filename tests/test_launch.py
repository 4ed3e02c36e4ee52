"""Launches and the canary, with a driver that writes down what it is asked to do."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import knnpool_gen
from knnpool_gen.errors import CompileError, InvalidArgumentError, KernelError, MissingDependencyError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.reduction import Reduction, make_reduction
from knnpool_gen.runtime import canary, capture, compile, cuda, execute, launch
from knnpool_gen.runtime.aux_layout import AuxLayout
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import Configuration, DeviceFacts, Problem, select
from knnpool_gen.vocabulary import Direction, Mode, Staging
from launch_description import LaunchDescription

STREAM = 77
H200 = DeviceFacts(132, 227 * 1024, 228 * 1024, 2048)
KEY = KernelKey(Direction.FORWARD, Mode.MAX, "float32", Staging.SHARED, 1)
KERNEL = KERNELS[KEY]


def configuration(shared_bytes: int = 1000, **macros: int) -> Configuration:
    return Configuration(KERNEL, tuple(macros.items()) or (("KNNPOOL_K", 9),), 33, 128, shared_bytes, 33)


VALUES = {name: 0x7F00_0000_0000 + 0x1000 * i for i, name in enumerate(KERNEL.arguments)} | {"rows": 2**33 + 5}


@dataclass
class Driver:
    """Looks like ``cupy.cuda.driver``; modules and functions are numbers."""

    context: int = 2
    modules: list[bytes] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    attributes: list[tuple[int, int, int]] = field(default_factory=list)
    launches: list[SimpleNamespace] = field(default_factory=list)
    fails: bool = False
    resident: int = 4
    """Blocks of whatever kernel that a multiprocessor holds."""
    status: int = 0
    """What ``cuLaunchKernelEx`` returns."""
    work: Callable[[list[int]], object] = lambda arguments: None
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def ctxGetCurrent(self) -> int:  # noqa: N802
        return self.context

    def ctxGetDevice(self) -> int:  # noqa: N802
        return self.context - 2

    def moduleLoadData(self, binary: bytes) -> int:  # noqa: N802
        assert self.context, "no context is current"
        if self.fails:
            raise RuntimeError("CUDA_ERROR_OUT_OF_MEMORY")
        time.sleep(0.01)
        self.modules.append(binary)
        return 100 + len(self.modules)

    def moduleGetFunction(self, module: int, name: str) -> int:  # noqa: N802
        self.functions.append(name)
        return 1000 + module

    def funcSetAttribute(self, function: int, attribute: int, value: int) -> None:  # noqa: N802
        self.attributes.append((function, attribute, value))

    def occupancyMaxActiveBlocksPerMultiprocessor(self, function: int, threads: int, shared: int) -> int:  # noqa: N802
        return self.resident

    def launchKernel(self, function: int, *facts: int) -> None:  # noqa: N802
        gx, gy, gz, bx, by, bz, shared, stream, parameters, extra = facts
        count = len(KERNELS_BY_NAME[self.functions[function - 1101]].arguments)
        pointers = (ctypes.c_void_p * count).from_address(parameters)
        arguments = [ctypes.c_uint64.from_address(pointer or 0).value for pointer in pointers]
        self.launches.append(
            SimpleNamespace(
                function=function, grid=(gx, gy, gz), block=(bx, by, bz), shared=shared, stream=stream,
                arguments=arguments, extra=extra, attributes=(),
            )
        )  # fmt: skip
        self.work(arguments)

    def launch_kernel_ex(self, address: int, function: int, parameters: int, extra: None) -> int:
        if self.status:
            return self.status
        found = LaunchDescription.at(address)
        self.launchKernel(function, *found.grid, *found.block, found.shared_bytes, found.stream, parameters, 0)
        self.launches[-1].attributes = found.attributes
        return 0

    def CUDADriverError(self, status: int) -> RuntimeError:  # noqa: N802
        return RuntimeError(f"CUDA driver error {status}")


KERNELS_BY_NAME = {kernel.name: kernel for kernel in KERNELS.values()}


@dataclass
class Machine:
    """What the test can look at: the driver, and what was compiled and made current."""

    driver: Driver
    compiled: list[tuple[str, str, Any]] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    devices_set: list[int] = field(default_factory=list)
    capture_mode: int = 0
    current: int = 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(Driver())

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        machine.entered.append(index)
        before = machine.current, machine.driver.context
        machine.current, machine.driver.context = index, 2 + index
        try:
            yield
        finally:
            machine.current, machine.driver.context = before

    def set_device(index: int) -> None:
        machine.devices_set.append(index)
        machine.driver.context = 2 + index

    def cubin(kernel: Any, arch: str, macros: Any) -> bytes:
        machine.compiled.append((kernel.name, arch, macros))
        return f"{kernel.name} {arch} {macros}".encode()

    def exchange(mode: Any) -> int:
        machine.capture_mode, mode._obj.value = mode._obj.value, machine.capture_mode
        return 0

    monkeypatch.setattr(cuda, "driver", lambda: machine.driver)
    monkeypatch.setattr(cuda, "capture_mode_exchange", lambda: exchange)
    monkeypatch.setattr(cuda, "launch_kernel_ex", lambda: machine.driver.launch_kernel_ex)
    monkeypatch.setattr(cuda, "runtime", lambda: SimpleNamespace(setDevice=set_device))
    monkeypatch.setattr(compile, "cubin", cubin)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    monkeypatch.setattr(launch, "_current_stream", lambda index: STREAM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("KNNPOOL_CANARY", raising=False)
    monkeypatch.setattr(launch, "_facts", dict.fromkeys(range(-1, 4), H200))
    knnpool_gen.clear_pool_cache()
    yield machine
    knnpool_gen.clear_pool_cache()


def test_what_is_launched(machine: Machine) -> None:
    launch.launch(configuration(), 3, VALUES | {"more": 5})
    assert machine.compiled == [(KERNEL.name, "sm_93", (("KNNPOOL_K", 9),))]
    assert machine.driver.modules == [f"{KERNEL.name} sm_93 (('KNNPOOL_K', 9),)".encode()]
    assert machine.driver.functions == [KERNEL.name]
    (launched,) = machine.driver.launches
    assert launched.grid == (33, 1, 1)
    assert launched.block == (128, 1, 1)
    assert (launched.shared, launched.stream, launched.extra) == (1000, STREAM, 0)
    assert launched.arguments == [VALUES[name] for name in KERNEL.arguments]
    assert launched.arguments[KERNEL.arguments.index("rows")] == 2**33 + 5
    assert machine.entered == [3]


@pytest.mark.parametrize(("shared_bytes", "asks"), [(0, False), (48 * 1024, False), (48 * 1024 + 1, True)])
def test_much_shared_memory_is_asked_for(machine: Machine, shared_bytes: int, asks: bool) -> None:
    for _ in range(2):
        launch.launch(configuration(shared_bytes), 0, VALUES)
    assert machine.driver.attributes == [(1101, 8, shared_bytes)] * asks
    assert [launched.shared for launched in machine.driver.launches] == [shared_bytes] * 2


def test_loaded_once_for_kernel_macros_and_device(machine: Machine) -> None:
    other = replace(configuration(), kernel=KERNELS[KEY._replace(rows=2)])
    for _ in range(3):
        launch.launch(configuration(), 0, VALUES)
        launch.launch(configuration(KNNPOOL_K=10), 0, VALUES)
        launch.launch(configuration(), 1, VALUES)
        launch.launch(other, 0, VALUES)
        # Grid and threads are no part of what is loaded.
        launch.launch(replace(configuration(), grid=1, threads=64), 0, VALUES)
    assert len(machine.driver.modules) == len(set(machine.driver.modules)) == 4
    assert [launched.function for launched in machine.driver.launches] == 3 * [1101, 1102, 1103, 1104, 1101]


def test_forgotten_kernels_are_loaded_again(machine: Machine) -> None:
    launch.launch(configuration(), 0, VALUES)
    launch.forget_kernels()
    launch.launch(configuration(), 0, VALUES)
    assert len(machine.driver.modules) == 2
    knnpool_gen.clear_pool_cache()
    launch.launch(configuration(), 0, VALUES)
    assert len(machine.driver.modules) == 3


def test_a_context_is_entered_where_there_is_none(machine: Machine) -> None:
    launch.launch(configuration(), 2, VALUES)
    assert machine.devices_set == []
    machine.current, machine.driver.context = 2, 0
    launch.launch(configuration(), 2, VALUES)  # loaded already, and yet launched in a context
    assert machine.devices_set == [2]
    machine.current, machine.driver.context = 1, 0
    launch.forget_kernels()
    launch.launch(configuration(), 1, VALUES)
    assert machine.devices_set == [2, 1]


def test_threads_load_once(machine: Machine) -> None:
    barrier = threading.Barrier(6)

    def call() -> None:
        barrier.wait()
        launch.launch(configuration(), 0, VALUES)

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(machine.driver.launches) == 6
    assert len(machine.driver.modules) == len(machine.compiled) == 1


def test_what_fails_to_load_is_tried_again(machine: Machine) -> None:
    machine.driver.fails = True
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        launch.launch(configuration(), 0, VALUES)
    machine.driver.fails = False
    launch.launch(configuration(), 0, VALUES)
    assert len(machine.driver.launches) == 1


def test_what_was_compiled_ahead_is_loaded(machine: Machine) -> None:
    for _ in range(2):
        launch.compile_ahead(configuration(), 1)
    launch.compile_ahead(configuration(KNNPOOL_K=10), 1)  # never loaded
    launch.launch(configuration(), 1, VALUES)
    launch.compile_ahead(configuration(), 1)
    macros = (("KNNPOOL_K", 9),)
    assert machine.driver.modules == [f"{KERNEL.name} sm_91 {macros}".encode()]
    assert machine.compiled.count((KERNEL.name, "sm_91", macros)) == 1


def test_what_fails_ahead_is_said_when_it_is_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> bytes:
        raise CompileError("line 3: expected a ;")

    with monkeypatch.context() as patch:
        patch.setattr(compile, "cubin", refuse)
        launch.compile_ahead(configuration(), 0)
        with pytest.raises(CompileError, match="line 3"):
            launch.launch(configuration(), 0, VALUES)
    launch.launch(configuration(), 0, VALUES)
    assert len(machine.driver.launches) == 1


def test_without_cupy_nothing_is_remembered(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingDependencyError("no cupy")

    with monkeypatch.context() as patch:
        patch.setattr(cuda, "driver", missing)
        with pytest.raises(ImportError, match="no cupy"):
            launch.launch(configuration(), 0, VALUES)
    launch.launch(configuration(), 0, VALUES)
    assert len(machine.driver.launches) == 1


def test_the_size_of_a_device_is_asked_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def properties(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(
            multi_processor_count=132 + index,
            shared_memory_per_block=48 * 1024,
            shared_memory_per_block_optin=227 * 1024,
            shared_memory_per_multiprocessor=228 * 1024,
            max_threads_per_multi_processor=2048,
            name="NVIDIA H200",
            major=9,
            minor=0,
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(launch, "_facts", {})
    first = replace(H200, label="NVIDIA H200 sm_90")
    assert [launch.device_facts(index) for index in (0, 1, 0)] == [first, replace(first, multiprocessors=133), first]
    assert asked == [0, 1]


# From tensors to launches. The tensors are on the CPU, where their addresses are as good as any.

INDICES = torch.tensor([[0, 2, 5, 1], [1, 5, 5, 3]])


@pytest.fixture
def device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(execute, "device_facts", lambda index: H200)
    monkeypatch.setenv("KNNPOOL_CANARY", "off")
    return machine


def arguments_of(machine: Machine, number: int = -1) -> dict[str, int]:
    launched = machine.driver.launches[number]
    kernel = KERNELS_BY_NAME[machine.driver.functions[launched.function - 1101]]
    return dict(zip(kernel.arguments, launched.arguments, strict=True))


def addresses(meta: PoolMeta, **tensors: Tensor) -> dict[str, int]:
    tables = {
        "indices": meta.gather_indices,
        "first_slot": meta.first_slot,
        "count": meta.count,
        "rev_rowptr": meta.rev_rowptr,
        "rev_kn": meta.rev_kn,
        "rev_order": meta.rev_order,
        "rev_head": meta.rev_head,
    }
    return {name: tensor.data_ptr() for name, tensor in (tables | tensors).items()}


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_every_argument_is_what_it_is_called(device: Machine, mode: Mode, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(INDICES, 5)
    weights = torch.rand(2, 4) if mode is Mode.WEIGHTED else None
    reduction = make_reduction(meta, dtype, mode.value, weights=weights)
    prepared = {} if reduction.weights is None else {"weights": reduction.weights.weights}
    x = torch.randn(2, 3, 5).to(dtype)

    y, aux = execute.forward(meta, x, reduction, need_aux=True, rs=None)

    winners = {"aux": aux} if aux is not None else {}
    assert (aux is not None) == (mode is Mode.MAX)
    expected = addresses(meta, x=x, y=y, **winners, **prepared) | {"rows": 6}
    passed = arguments_of(device)
    assert passed == {name: expected[name] for name in passed}
    assert (y.shape, y.dtype) == ((2, 3, 4), dtype)

    if reduction.weights is not None:
        prepared = {"rev_weights": reduction.weights.rev_weights}
    grad_x = execute.backward(meta, y, aux, reduction, rs=None)
    expected = addresses(meta, grad_y=y, grad_x=grad_x, **winners, **prepared) | {"rows": 6}
    passed = arguments_of(device)
    assert passed == {name: expected[name] for name in passed}
    assert (grad_x.shape, grad_x.dtype) == ((2, 3, 5), dtype)


def plain_reduction(meta: PoolMeta, mode: str = "max") -> Reduction:
    return make_reduction(meta, torch.float32, mode)


@pytest.mark.parametrize(
    ("capability", "capturing", "attributes"),
    [((9, 0), False, ((6, 1),)), ((12, 0), False, ((6, 1),)), ((8, 9), False, ()), ((9, 0), True, ())],
)
def test_kernels_come_up_before_the_one_ahead_has_ended(
    device: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    capturing: bool,
    attributes: tuple[tuple[int, int], ...],
) -> None:
    """Attribute 6 of cuda.h, CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION; not for chips without, and not in
    graphs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(capture, "_held", {})
    meta = pool_meta_from_indices(INDICES, 5)
    for _ in range(2):
        execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=True, rs=None)
    assert {launched.attributes for launched in device.driver.launches} == {attributes}
    (grid,) = {launched.grid for launched in device.driver.launches}
    assert grid[1:] == (1, 1)


@pytest.mark.parametrize(("resident", "rows", "grid"), [(4, 5000, 528), (7, 5000, 924), (0, 5000, 132), (4, 40, 40)])
def test_as_many_blocks_as_the_device_holds(device: Machine, resident: int, rows: int, grid: int) -> None:
    """132 multiprocessors, and tiles of one row."""
    device.driver.resident = resident
    meta = pool_meta_from_indices(INDICES, 5)
    execute.forward(meta, torch.randn(rows, 5), plain_reduction(meta), need_aux=True, rs=1)
    assert device.driver.launches[-1].grid == (grid, 1, 1)


def test_a_launch_that_the_driver_refuses_raises(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    device.driver.status = 719
    meta = pool_meta_from_indices(INDICES, 5)
    with pytest.raises(RuntimeError, match="CUDA driver error 719"):
        execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=True, rs=None)


def test_without_aux_there_is_no_address(device: Machine) -> None:
    meta = pool_meta_from_indices(INDICES, 5)
    _, aux = execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=False, rs=None)
    assert aux is None
    assert arguments_of(device)["aux"] == 0
    assert dict(device.compiled[-1][2])["KNNPOOL_AUX"] == 0


@pytest.mark.parametrize("mode", ["max", "avg", "sum"])
@pytest.mark.parametrize("layout", AuxLayout)
def test_the_kernel_of_the_backward_is_compiled_with_the_forward(
    device: Machine, monkeypatch: pytest.MonkeyPatch, mode: str, layout: AuxLayout
) -> None:
    ahead: list[Configuration] = []
    monkeypatch.setattr(execute, "compile_ahead", lambda configuration, device: ahead.append(configuration))
    meta, reduction = pool_meta_from_indices(INDICES, 5), plain_reduction(pool_meta_from_indices(INDICES, 5), mode)
    for _ in range(2):
        y, aux = execute.forward(meta, torch.randn(8, 5), reduction, True, None, layout)
    execute.backward(meta, y, aux, reduction, None, layout)
    assert [(kernel.kernel.name, "", kernel.macros) for kernel in ahead] == [
        (name, "", macros) for name, _, macros in device.compiled[1:]
    ]
    assert len(ahead) == 1


def test_no_backward_is_compiled_where_none_is_known_to_follow(
    device: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "compile_ahead", lambda *args: pytest.fail("compiled ahead"))
    meta, x = pool_meta_from_indices(INDICES, 5), torch.randn(8, 5)
    execute.forward(meta, x, plain_reduction(meta), need_aux=False, rs=None)
    execute.forward(meta, x, plain_reduction(meta), need_aux=True, rs=1)
    execute.forward(meta, x, make_reduction(meta, x.dtype, "avg", nan="omit"), need_aux=True, rs=None)


def test_strided_tensors_are_made_contiguous(device: Machine) -> None:
    meta = pool_meta_from_indices(INDICES, 5)
    x = torch.randn(5, 6).T
    y, aux = execute.forward(meta, x, plain_reduction(meta), need_aux=True, rs=None)
    assert y.is_contiguous()
    assert aux is not None
    assert aux.is_contiguous()
    assert arguments_of(device)["x"] != x.data_ptr()
    grad_x = execute.backward(meta, torch.ones(()).expand(6, 4), aux, plain_reduction(meta), rs=None)
    assert grad_x.is_contiguous()


@pytest.mark.parametrize("rs", sorted({key.rows for key in KERNELS if key[:3] == KEY[:3]}))
def test_the_height_that_was_asked_for(device: Machine, rs: int) -> None:
    meta = pool_meta_from_indices(INDICES, 5)
    execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=True, rs=rs)
    keys = {kernel.name: key for key, kernel in KERNELS.items()}
    assert keys[device.driver.functions[-1]].rows == rs


def test_nothing_to_write_is_not_launched(device: Machine) -> None:
    meta = pool_meta_from_indices(INDICES, 5)
    y, aux = execute.forward(meta, torch.empty(0, 3, 5), plain_reduction(meta), need_aux=True, rs=None)
    assert y.shape == (0, 3, 4)
    assert aux is not None
    grad_x = execute.backward(meta, y, aux, plain_reduction(meta), rs=None)
    assert grad_x.shape == (0, 3, 5)
    assert device.driver.launches == []


def write(address: int, value: int, count: int) -> None:
    ctypes.memset(address, value, count)


def test_the_canary_of_a_call(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches the first time, one from then on; another table shape is another first time."""
    monkeypatch.setenv("KNNPOOL_CANARY", "first")
    meta = pool_meta_from_indices(INDICES, 5)
    x = torch.randn(6, 5)
    reduction = plain_reduction(meta)

    def work(arguments: Sequence[int]) -> None:
        passed = dict(zip(KERNELS_BY_NAME[device.driver.functions[-1]].arguments, arguments, strict=True))
        write(passed["y"], 0, 6 * meta.nout * 4)
        if passed["aux"]:
            write(passed["aux"], 1, 6 * meta.nout)

    device.driver.work = work
    for launches in (2, 3, 4):
        y, aux = execute.forward(meta, x, reduction, need_aux=True, rs=None)
        assert len(device.driver.launches) == launches
        assert not y.any()
        assert aux is not None
        assert (aux == 1).all()
    execute.forward(meta, x, reduction, need_aux=False, rs=None)
    assert len(device.driver.launches) == 6
    meta = pool_meta_from_indices(INDICES[:, :2], 5)
    execute.forward(meta, x, reduction, need_aux=True, rs=None)
    assert len(device.driver.launches) == 8


def test_a_kernel_that_forgets_its_last_byte(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", "first")
    meta = pool_meta_from_indices(INDICES, 5)
    index = KERNEL.arguments.index("y")
    device.driver.work = lambda arguments: write(arguments[index], 0, 6 * 4 * 4 - 1)
    for _ in range(2):  # and it does not pass the second time either
        with pytest.raises(KernelError) as caught:
            execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=False, rs=None)
        name = device.driver.functions[-1]
        assert str(caught.value) == f"{name} left 1 byte(s) of its output unwritten; please report this"
    device.driver.work = lambda arguments: write(arguments[index], 0, 6 * 4 * 4)
    y, _ = execute.forward(meta, torch.randn(6, 5), plain_reduction(meta), need_aux=False, rs=None)
    assert not y.any()


# The canary by itself.


@pytest.fixture
def checked(machine: Machine) -> Callable[..., int]:
    """Does as a call does, and says how often it launched."""

    def run(what: str, outputs: Sequence[Tensor], fill: Callable[[], object]) -> int:
        launches = 0

        def once() -> None:
            nonlocal launches
            launches += 1
            fill()

        if canary.due(what):
            canary.check(what, what, outputs, once)
        else:
            once()
        return launches

    return run


@pytest.mark.parametrize(
    ("setting", "launches"), [(None, [2, 1, 1]), ("first", [2, 1, 1]), ("always", [2, 2, 2]), ("off", [1, 1, 1])]
)
def test_settings(
    checked: Callable[..., int], monkeypatch: pytest.MonkeyPatch, setting: str | None, launches: list[int]
) -> None:
    if setting is not None:
        monkeypatch.setenv("KNNPOOL_CANARY", setting)
    y = torch.empty(3)
    assert [checked("a", [y], lambda: y.fill_(1)) for _ in launches] == launches
    assert checked("b", [y], lambda: y.fill_(1)) == launches[0]
    canary.forget()
    assert checked("a", [y], lambda: y.fill_(1)) == launches[0]


@pytest.mark.parametrize("setting", ["first", "always"])
def test_never_inside_a_capture(checked: Callable[..., int], monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", setting)
    y = torch.empty(3)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert checked("a", [y], lambda: y.fill_(1)) == 1
    # What was launched in a capture has not been checked by it.
    assert checked("a", [y], lambda: y.fill_(1)) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
@pytest.mark.parametrize("hole", [0, 7, 23])
def test_a_hole_anywhere_is_found(checked: Callable[..., int], dtype: torch.dtype, hole: int) -> None:
    whole, holed = torch.zeros(2, 3, 4).to(dtype), torch.zeros(2, 3, 4).to(dtype)
    written = torch.arange(24) != hole

    def fill() -> None:
        whole.fill_(1)
        holed.view(-1)[written] = 1

    size = whole.element_size()
    with pytest.raises(KernelError, match=rf"^kernel left {size} byte\(s\) of its output unwritten; please report"):
        checked("kernel", [whole, holed], fill)
    assert checked("kernel", [whole], fill) == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_value_trips_it(checked: Callable[..., int], dtype: torch.dtype) -> None:
    """NaN of any bits, inf, and the patterns that outputs are filled with."""
    size = torch.empty(0, dtype=dtype).element_size()
    patterns = [torch.full((size,), pattern, dtype=torch.uint8).view(dtype) for pattern in (*canary.PATTERNS, 0xFF)]
    values = torch.cat([torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]).to(dtype), *patterns])
    y = torch.empty_like(values)
    assert checked("a", [y], lambda: y.copy_(values)) == 2
    assert torch.equal(y.view(torch.uint8), values.view(torch.uint8))


def test_empty_outputs(checked: Callable[..., int]) -> None:
    assert checked("a", [torch.empty(0, 3), torch.empty(2, 0)], lambda: None) == 2


def test_a_setting_that_does_not_exist(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("often", "", "FIRST"):
        monkeypatch.setenv("KNNPOOL_CANARY", value)
        with pytest.raises(InvalidArgumentError, match=rf"^KNNPOOL_CANARY = '{value}'; allowed: off, first, always$"):
            canary.due("a")
    monkeypatch.setenv("KNNPOOL_CANARY", "always")
    assert canary.due("a")


def test_launches_fit_the_choice(machine: Machine) -> None:
    """What is selected for a large table can be launched as it is."""
    problem = Problem(Direction.FORWARD, Mode.MAX, "float32", k=9, nin=20_000, nout=5_000, rows=50_000)
    chosen = select(problem, H200, 1)
    assert chosen.shared_bytes > 48 * 1024
    launch.launch(chosen, 0, VALUES)
    (launched,) = machine.driver.launches
    assert (launched.block[0], launched.shared) == (chosen.threads, chosen.shared_bytes)
    assert machine.driver.attributes == [(1101, 8, chosen.shared_bytes)]


# Inside a capture.


def test_kernels_load_though_a_stream_is_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    load = machine.driver.moduleLoadData
    monkeypatch.setattr(
        machine.driver, "moduleLoadData", lambda binary: modes.append(machine.capture_mode) or load(binary)
    )
    launch.launch(configuration(), 0, VALUES)
    assert modes == [capture.RELAXED]
    assert machine.capture_mode == 0
    machine.driver.fails = True
    with pytest.raises(RuntimeError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        launch.launch(configuration(), 1, VALUES)
    assert machine.capture_mode == 0


def test_what_a_graph_reads_stays(device: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is replayed long after the table it was captured with has changed or died."""
    monkeypatch.setattr(capture, "_held", {})
    plans = [pool_meta_from_indices(torch.tensor([[0, 1], [2, 9]]), 3) for _ in range(2)]
    died = [weakref.ref(plan) for plan in plans]
    for plan, capturing in zip(plans, (False, True), strict=True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda now=capturing: now)
        execute.forward(plan, torch.ones(4, 3), plain_reduction(plan), need_aux=False, rs=None)
    del plan, plans
    gc.collect()
    assert [reference() is None for reference in died] == [True, False]
