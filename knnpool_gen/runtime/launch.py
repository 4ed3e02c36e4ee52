"""Configurations to launches: kernels loaded once per device, arguments packed, torch's current stream used."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeAlias

import torch

from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime import capture, compile, cuda, overlapped
from knnpool_gen.runtime.select import Configuration, DeviceFacts
from knnpool_gen.runtime.tuned import device_label

DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory every kernel may use without asking, in bytes."""

Loadable: TypeAlias = tuple[Kernel, tuple[tuple[str, int | str], ...], int]
"""What is compiled and loaded once: a kernel, its macros, the device."""

_functions: dict[Loadable, int] = {}
_ahead: dict[Loadable, Future[bytes]] = {}
"""What is compiled, or being compiled, and not loaded yet."""
_facts: dict[int, DeviceFacts] = {}
_lock = threading.Lock()


def device_facts(device: int) -> DeviceFacts:
    """Size of the CUDA device with index ``device``."""
    facts = _facts.get(device)
    if facts is None:
        properties = torch.cuda.get_device_properties(device)
        facts = _facts[device] = DeviceFacts(
            multiprocessors=properties.multi_processor_count,
            shared_per_block=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
            shared_per_multiprocessor=properties.shared_memory_per_multiprocessor,
            threads_per_multiprocessor=properties.max_threads_per_multi_processor,
            label=device_label(properties.name, (properties.major, properties.minor)),
        )
    return facts


def launch(configuration: Configuration, device: int, values: Mapping[str, int]) -> None:
    """Launch on the current stream of ``device``; ``values`` holds an address or number for every argument."""
    with _current(device):
        function = load(configuration, device)
        configuration = fitted(configuration, function, device)
        arguments = [values[name] for name in configuration.kernel.arguments]
        start(function, configuration, device, arguments, overlap=False)


def start(function: int, configuration: Configuration, device: int, arguments: list[int], overlap: bool) -> None:
    """Launch the loaded ``function`` on the current stream of ``device``, which is the current device.

    The arguments come in the kernel's order. ``overlap`` lets it come up before the kernel ahead of it has ended.
    """
    _enter_context(device)
    cells, pointers = _parameters.of(len(arguments))
    cells[:] = arguments  # type: ignore[assignment]
    if overlap:
        overlapped.start(function, configuration, _current_stream(device), pointers)
        return
    cuda.driver().launchKernel(
        function, configuration.grid, 1, 1, configuration.threads, 1, 1,
        configuration.shared_bytes, _current_stream(device), pointers, 0,
    )  # fmt: skip


def compile_ahead(configuration: Configuration, device: int) -> None:
    """Begin to compile, in a thread of its own, what will be loaded later; if that fails, :func:`load` says so."""
    key = (configuration.kernel, configuration.macros, device)
    if key not in _functions and key not in _ahead:
        thread = ThreadPoolExecutor(1)
        _ahead[key] = thread.submit(compile.cubin, configuration.kernel, _arch(device), configuration.macros)
        thread.shutdown(wait=False)  # no more work; it ends when this is done


def load(configuration: Configuration, device: int) -> int:
    """Handle of the kernel, compiled and loaded once for each device; valid in its primary context."""
    key = (configuration.kernel, configuration.macros, device)
    function = _functions.get(key)
    if function is None:
        with _current(device), _lock:
            _enter_context(device)
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _load_now(configuration, device)
    return function


def fitted(configuration: Configuration, function: int, device: int) -> Configuration:
    """The same with exactly as many blocks as ``device``, the current device, holds at once.

    Fewer leave room that a kernel which comes up early would take on some multiprocessors and not on others.
    """
    _enter_context(device)
    blocks: int = cuda.driver().occupancyMaxActiveBlocksPerMultiprocessor(
        function, configuration.threads, configuration.shared_bytes
    )
    return replace(configuration, grid=min(configuration.tiles, max(1, blocks) * device_facts(device).multiprocessors))


class _Parameters(threading.local):
    """Memory for the parameters of a launch, 8 bytes each: a pointer or the number of rows.

    The driver copies them before it returns, so one buffer a thread is enough.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[ctypes.Array[ctypes.c_uint64], int, object]] = {}

    def of(self, count: int) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
        """Return cells for ``count`` parameters and the address of the pointers to them."""
        found = self._buffers.get(count)
        if found is None:
            cells = (ctypes.c_uint64 * count)()
            base = ctypes.addressof(cells)
            pointers = (ctypes.c_void_p * count)(*[base + 8 * i for i in range(count)])
            found = self._buffers[count] = (cells, ctypes.addressof(pointers), pointers)
        return found[0], found[1]


_parameters = _Parameters()


def _current(device: int) -> AbstractContextManager[object]:
    """Make ``device`` the current one, if it is not: a guard costs as much as a launch."""
    return nullcontext() if torch.cuda.current_device() == device else torch.cuda.device(device)


def _current_stream(device: int) -> int:
    """Handle of torch's current stream, without the object around it."""
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream


def forget_kernels() -> None:
    """Drop what was loaded; the next launch loads again, from the cache on disk."""
    with _lock:
        _functions.clear()
        _ahead.clear()


def _load_now(configuration: Configuration, device: int) -> int:
    driver = cuda.driver()
    ahead = _ahead.pop((configuration.kernel, configuration.macros, device), None)
    binary = ahead.result() if ahead else compile.cubin(configuration.kernel, _arch(device), configuration.macros)
    # The module is never unloaded: launches of it may still be queued, and graphs may hold it.
    with capture.relaxed():
        module = driver.moduleLoadData(binary)
        function: int = driver.moduleGetFunction(module, configuration.kernel.name)
        if configuration.shared_bytes > DEFAULT_SHARED:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function, attribute, configuration.shared_bytes)
    return function


def _arch(device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def can_overlap(device: int) -> bool:
    """Whether kernels of ``device`` can come up before the one ahead has ended."""
    return torch.cuda.get_device_capability(device) >= overlapped.FIRST_CAPABILITY


def _enter_context(device: int) -> None:
    """Make a context of ``device``, the current device, current in the driver too.

    torch sets the device lazily: a new thread (autograd's, for one) may reach the driver without a context, and one
    that comes back to a device not in use yet with the context of the device it has left.
    """
    driver = cuda.driver()
    if driver.ctxGetCurrent() == 0 or driver.ctxGetDevice() != device:
        cuda.runtime().setDevice(device)
