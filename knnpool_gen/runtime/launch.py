"""Configurations to launches: kernels loaded once per device, arguments packed, torch's current stream used."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping

import torch

from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime import capture, compile, cuda
from knnpool_gen.runtime.select import Configuration, DeviceFacts
from knnpool_gen.runtime.tuned import device_label

DEFAULT_SHARED = 48 * 1024
"""Dynamic shared memory every kernel may use without asking, in bytes."""

_functions: dict[tuple[Kernel, tuple[tuple[str, int | str], ...], int], int] = {}
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
    kernel = configuration.kernel
    with torch.cuda.device(device):
        function = _load(configuration, device)
        count = len(kernel.arguments)
        # Every parameter is 8 bytes wide: a pointer or the number of rows.
        cells = (ctypes.c_uint64 * count)(*[values[name] for name in kernel.arguments])
        base = ctypes.addressof(cells)
        pointers = (ctypes.c_void_p * count)(*[base + 8 * i for i in range(count)])
        stream = torch.cuda.current_stream(device).cuda_stream
        cuda.driver().launchKernel(
            function, configuration.grid, 1, 1, configuration.threads, 1, 1,
            configuration.shared_bytes, stream, ctypes.addressof(pointers), 0,
        )  # fmt: skip


def forget_kernels() -> None:
    """Drop what was loaded; the next launch loads again, from the cache on disk."""
    with _lock:
        _functions.clear()


def _load(configuration: Configuration, device: int) -> int:
    """Handle of the loaded kernel, valid in the primary context of ``device``, which must be current."""
    _enter_context(device)
    key = (configuration.kernel, configuration.macros, device)
    function = _functions.get(key)
    if function is None:
        with _lock:
            function = _functions.get(key)
            if function is None:
                function = _functions[key] = _load_now(configuration, device)
    return function


def _load_now(configuration: Configuration, device: int) -> int:
    driver = cuda.driver()
    major, minor = torch.cuda.get_device_capability(device)
    binary = compile.cubin(configuration.kernel, f"sm_{major}{minor}", configuration.macros)
    # The module is never unloaded: launches of it may still be queued, and graphs may hold it.
    with capture.relaxed():
        module = driver.moduleLoadData(binary)
        function: int = driver.moduleGetFunction(module, configuration.kernel.name)
        if configuration.shared_bytes > DEFAULT_SHARED:
            attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(function, attribute, configuration.shared_bytes)
    return function


def _enter_context(device: int) -> None:
    """Make the primary context of ``device`` current in a thread that has none yet.

    torch sets the device lazily, so a new thread (autograd's, for one) may reach the driver without a context.
    """
    if cuda.driver().ctxGetCurrent() == 0:
        cuda.runtime().setDevice(device)
