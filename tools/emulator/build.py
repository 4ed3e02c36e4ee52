"""Compiles sources with g++, each content once."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import platformdirs

from .program import EmulationError, Program, Sanitizer
from .unit import translate

_HERE = Path(__file__).resolve().parent
_HEADER = _HERE / "cuda_emu.h"
_EXECUTOR = _HERE / "executor.cpp"
_OLDEST_COMPILER = 12

# The kernels cast pointers freely, NVIDIA's compiler is told not to fuse multiply and add, and a local variable
# that is read before it is written should not happen to be zero. Warnings are NVRTC's business.
_COMMON = (
    "-std=gnu++20",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-ftrivial-auto-var-init=pattern",
    "-fno-omit-frame-pointer",
    "-U_FORTIFY_SOURCE",
    "-w",
)
_KERNEL_FLAGS = {
    Sanitizer.NONE: ("-O1",),
    Sanitizer.ADDRESS: ("-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    Sanitizer.THREAD: ("-O1", "-g1", "-fsanitize=thread"),
}
# The executor is told of the sanitizer, but not instrumented.
_EXECUTOR_FLAGS = {
    Sanitizer.NONE: ("-O2",),
    Sanitizer.ADDRESS: ("-O2", "-DEMU_ADDRESS_SANITIZER"),
    Sanitizer.THREAD: ("-O2", "-DEMU_THREAD_SANITIZER"),
}
# Folder in site-packages/nvidia, a header that is needed from it, and the package that brings it.
_CUDA_HEADERS = (
    ("cuda_runtime", "cuda_fp16.h", "nvidia-cuda-runtime-cu12"),
    ("cuda_nvcc", "crt/host_defines.h", "nvidia-cuda-nvcc-cu12"),
    ("cuda_cccl", "nv/target", "nvidia-cuda-cccl-cu12"),
)


def build(
    source: Path,
    sanitizer: Sanitizer,
    *,
    parameters: Sequence[str] = (),
    defines: Mapping[str, str] | None = None,
    cache_dir: Path | None = None,
) -> Program:
    """Compile one CUDA source for the CPU, or find it in the cache.

    ``parameters`` are macros that every launch gives a value, ``defines`` macros that are fixed now. The cache is
    ``cache_dir``, else ``KNNPOOL_EMULATOR_CACHE``, else a folder of this user; any number of processes may share it.
    """
    compiler = _compiler()
    headers = _cuda_headers()
    unit = translate(source.name, source.read_text(encoding="utf-8"), parameters)
    cache = _cache_dir(cache_dir)
    common = (*_COMMON, f"-I{_HERE}", *(f"-isystem{folder}" for folder in headers))
    world = (compiler, _digest_of_headers(headers), _HEADER.read_text(encoding="utf-8"))

    executor_flags = (*_COMMON, *_EXECUTOR_FLAGS[sanitizer])
    executor_text = _EXECUTOR.read_text(encoding="utf-8")
    executor_key = _key(*world, executor_text, *executor_flags)

    def make_executor(result: Path) -> None:
        flags = (*common, *_EXECUTOR_FLAGS[sanitizer], "-c", str(_EXECUTOR))
        _compile("the executor", flags, "", result)

    flags = (*_KERNEL_FLAGS[sanitizer], *(f"-D{name}={value}" for name, value in (defines or {}).items()))

    def make_program(result: Path) -> None:
        executor = _cached(cache, f"executor-{sanitizer.value}-{executor_key}.o", make_executor)
        arguments = (*common, *flags, "-x", "c++", "-", "-x", "none", str(executor))
        _compile(f"{source.name} ({sanitizer.value})", arguments, unit.text, result)

    key = _key(*world, executor_key, unit.text, *_COMMON, *flags)
    path = _cached(cache, f"{source.stem}-{sanitizer.value}-{key}", make_program)
    return Program(path, source.name, sanitizer, unit.kernels, tuple(parameters))


def _compile(what: str, arguments: Sequence[str], text: str, result: Path) -> None:
    command = ["g++", *arguments, "-o", str(result)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise EmulationError(f"g++ failed on {what}:\n{done.stderr.rstrip()}")


# ---------------------------------------------------------------- the cache
def _cache_dir(given: Path | None) -> Path:
    if given is not None:
        return given
    from_environment = os.environ.get("KNNPOOL_EMULATOR_CACHE")
    if from_environment:
        return Path(from_environment)
    return platformdirs.user_cache_path("knnpool-gen") / "emulator"


def _cached(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The file ``name`` in the cache, made now unless it is there and whole.

    A file ends in the digest of what comes before it, which neither the loader nor the linker minds.
    """
    path = cache / name
    if _is_whole(path):
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with _only_one(cache / f"{name}.lock"):
        if _is_whole(path):  # another process was faster
            return path
        with tempfile.TemporaryDirectory(prefix=".making-", dir=cache) as folder:
            made = Path(folder, name)
            make(made)
            with made.open("ab") as file:
                file.write(hashlib.sha256(made.read_bytes()).digest())
            made.replace(path)
    return path


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Holds the lock file ``path``, which the end of a process gives back in any case."""
    import fcntl  # absent on Windows, where nothing gets this far

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:24]


# ---------------------------------------------------------------- what must be installed
@lru_cache(maxsize=1)
def _compiler() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EmulationError(f"emulation needs Linux on x86-64, this is {sys.platform} on {platform.machine()}")
    wanted = f"emulation needs g++ {_OLDEST_COMPILER} or later with its sanitizers (Debian: apt install g++)"
    try:
        done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmulationError(f"{wanted}; running g++ failed: {error}") from error
    version = done.stdout.splitlines()[0]
    number = re.search(r"(\d+)\.\d+\.\d+", version)
    if number is None or int(number[1]) < _OLDEST_COMPILER:
        raise EmulationError(f"{wanted}; found {version}")
    return version


@lru_cache(maxsize=1)
def _cuda_headers() -> tuple[Path, ...]:
    folders = []
    missing = []
    for part, header, package in _CUDA_HEADERS:
        folder = _find_include(part)
        if folder is None or not (folder / header).is_file():
            missing.append(package)
        else:
            folders.append(folder)
    if missing:
        raise EmulationError(
            f"emulation needs NVIDIA's CUDA headers: pip install 'knnpool-gen[dev]' (missing: {', '.join(missing)})"
        )
    return tuple(folders)


def _find_include(part: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(f"nvidia.{part}")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), "include")


@lru_cache(maxsize=1)
def _digest_of_headers(folders: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for name in ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "vector_types.h"):
        digest.update((folders[0] / name).read_bytes())
    return digest.hexdigest()
