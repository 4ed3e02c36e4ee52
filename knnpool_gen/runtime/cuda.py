"""The one door to CuPy: NVRTC, the driver, and where the CUDA headers are.

torch is imported before CuPy, always: each brings its own copy of NVIDIA's libraries and the first one loaded
serves both.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType

from knnpool_gen.errors import MissingDependencyError

EXTRAS = "pip install 'knnpool-gen[cuda12]' or 'knnpool-gen[cuda13]', whichever matches your CUDA driver"


@cache
def nvrtc() -> ModuleType:
    """CuPy's binding of the runtime compiler; needs no GPU."""
    module = _cupy_module("nvrtc")
    try:
        module.getVersion()  # loads the library
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(f"NVRTC, the compiler of CUDA kernels, was not found: {EXTRAS}") from error
    return module


@cache
def driver() -> ModuleType:
    """CuPy's binding of the CUDA driver."""
    return _cupy_module("driver")


@cache
def runtime() -> ModuleType:
    """CuPy's binding of the CUDA runtime."""
    return _cupy_module("runtime")


@cache
def capture_mode_exchange() -> Callable[..., int]:
    """``cuThreadExchangeStreamCaptureMode``, which CuPy does not bind."""
    return _driver_library().cuThreadExchangeStreamCaptureMode


@cache
def launch_kernel_ex() -> Callable[..., int]:
    """``cuLaunchKernelEx``, which CuPy does not bind: launch description, function, parameters, nothing; addresses."""
    launch = _driver_library().cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    return launch


def _driver_library() -> ctypes.CDLL:
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def _cupy_module(name: str) -> ModuleType:
    importlib.import_module("torch")
    if importlib.util.find_spec("cupy") is None:
        raise MissingDependencyError(f"CUDA kernels are compiled and launched through CuPy, which is missing: {EXTRAS}")
    module: ModuleType = getattr(importlib.import_module("cupy.cuda"), name)
    return module


@cache
def include_folder() -> str:
    """Folder of ``cuda_fp16.h`` and its like: NVIDIA's pip wheels, conda, or an installed toolkit."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
    except ModuleNotFoundError:
        raise MissingDependencyError(
            f"the CUDA headers are found with cuda-pathfinder, which is missing: {EXTRAS}"
        ) from None
    folder = pathfinder.find_nvidia_header_directory("cudart")
    if folder is None:
        raise MissingDependencyError(f"the CUDA headers (cuda_fp16.h) were not found: {EXTRAS}")
    return str(folder)
