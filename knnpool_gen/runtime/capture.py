"""What a CUDA graph capture allows: nothing that synchronises, and nothing that dies before the graph does."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from knnpool_gen.errors import CaptureError
from knnpool_gen.runtime import cuda

P = ParamSpec("P")
T = TypeVar("T")

RELAXED = 2
"""``CU_STREAM_CAPTURE_MODE_RELAXED``."""

_held: dict[int, object] = {}


def capturing() -> bool:
    """Whether the current stream of any device is being captured."""
    if not _uses_cuda():
        return False
    if torch.cuda.is_current_stream_capturing():
        return True
    for stream in _streams_set():
        with torch.cuda.device(stream.device):
            if torch.cuda.is_current_stream_capturing():
                return True
    return False


def hold(tables: object) -> None:
    """Keep ``tables`` for good: the graph that is being captured reads them, and nobody says when it is gone."""
    _held[id(tables)] = tables


def refuse(what: str) -> None:
    """Raise inside a capture, before ``what`` does harm to it."""
    if capturing():
        raise CaptureError(
            f"{what}, which a CUDA graph capture forbids: call prepare(x, indices, mode) before the capture, with the "
            "same table and options; torch.compile(mode='reduce-overhead') captures copies of its inputs, so there "
            "tables have to be buffers of a module"
        )


def built_apart(build: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``build``, which derives tables from tensors, to run in a thread of its own.

    A new thread has none of the caller's inference mode, transforms and dispatch modes, and none of the memory pool
    that cudagraph trees install while they warm up: tables made there would be overwritten by the next replay.
    """

    @functools.wraps(build)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        refuse("the plan of this table is not there yet, and building it waits for the device")
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                torch.cuda.current_stream(tensor.device).synchronize()
        # On the caller's streams all the same: memory is then reused in the order of the stream that it is used on.
        streams = [*_streams_set(), torch.cuda.current_stream()] if _uses_cuda() else []

        def build_there() -> T:
            for stream in streams:  # the last one sets the device
                torch.cuda.set_stream(stream)
            return build(*args, **kwargs)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(build_there).result()

    return run


def wait(device: torch.device) -> None:
    """Wait until tables are written: other streams use them, and kernels that begin before the one ahead has ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _streams_set() -> list[torch.cuda.Stream]:
    """The current streams that someone set: a thread begins with the default ones, and those cannot be captured."""
    streams = (torch.cuda.current_stream(index) for index in range(torch.cuda.device_count()))
    return [stream for stream in streams if stream.cuda_stream != 0]


def _uses_cuda() -> bool:
    """Whether CUDA is running already; to ask it anything else would start it."""
    running: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return running


@contextmanager
def relaxed() -> Iterator[None]:
    """This thread may load modules, though a stream is being captured."""
    mode = ctypes.c_int(RELAXED)
    exchange = cuda.capture_mode_exchange()
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))
