"""Launches that may begin before the kernel ahead of them in the stream has ended: programmatic dependent launch.

A kernel launched this way comes up, and looks into the tables of its plan, while the last blocks of the one before
still run; ``join_the_stream()`` in its source waits for these. The source and the driver's part are described in the
CUDA Programming Guide, "Programmatic Dependent Launch and Synchronization".
"""

from __future__ import annotations

import ctypes
import threading

from knnpool_gen.runtime import cuda
from knnpool_gen.runtime.select import Configuration

FIRST_CAPABILITY = (9, 0)
"""Older chips have no such launches."""
PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""``CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION``."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_byte * 60))


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("threads", ctypes.c_uint),
        ("threads_y", ctypes.c_uint),
        ("threads_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class _OfThread(threading.local):
    """The description of a launch, filled in again for each: the driver has read it when it returns."""

    def __init__(self) -> None:
        attribute = _Attribute(PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self.config = _Config(1, 1, 1, 1, 1, 1, 0, None, ctypes.pointer(attribute), 1)
        self.address = ctypes.addressof(self.config)


_of_thread = _OfThread()


def start(function: int, configuration: Configuration, stream: int, parameters: int) -> None:
    """Launch ``function`` on ``stream``; ``parameters`` is the address of the pointers to its parameters."""
    config = _of_thread.config
    config.grid = configuration.grid
    config.threads = configuration.threads
    config.shared_bytes = configuration.shared_bytes
    config.stream = stream
    status = cuda.launch_kernel_ex()(_of_thread.address, function, parameters, None)
    if status:
        raise cuda.driver().CUDADriverError(status)
