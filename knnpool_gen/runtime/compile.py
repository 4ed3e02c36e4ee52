"""Generated source to cubin, through NVRTC, with one cache on disk.

CuPy's ``RawModule(code=...)`` is not used because it always adds ``-ftz=true``, which flushes float32 denormals,
and because its cache would be a second one.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from knnpool_gen import folders
from knnpool_gen.errors import CompileError, StaleDispatchError
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime import cuda

Macros = Iterable[tuple[str, int | str]]

GENERATED = folders.generated()
"""Folder of the dispatch table and the sources."""
OPTIONS = ("-std=c++17", "-Xptxas=-v")
DIGEST_BYTES = 64


@dataclass(frozen=True)
class Resources:
    """What one kernel takes of a multiprocessor, as ptxas reports it; bytes are per thread, shared per block."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared_bytes: int


def read_source(kernel: Kernel) -> str:
    """The generated CUDA of ``kernel``.

    Raises:
        StaleDispatchError: the file is missing, or not the one the dispatch table was generated with.
    """
    path = GENERATED / kernel.file
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise StaleDispatchError(
            f"generated/{kernel.file} is missing though the dispatch table lists it; run `knnpool-gen regenerate`"
        ) from None
    if hashlib.sha256(source).hexdigest() != kernel.sha256:
        raise StaleDispatchError(
            f"generated/{kernel.file} is not the source the dispatch table was generated with; "
            "run `knnpool-gen regenerate`"
        )
    return source.decode()


def compile_kernel(kernel: Kernel, arch: str, macros: Macros = ()) -> tuple[bytes, Resources]:
    """Compile ``kernel`` for ``arch`` (such as ``sm_90``); no GPU needed, no cache used.

    Raises:
        CompileError: NVRTC's log, with the generated file's name and lines.
    """
    return compile_source(kernel, read_source(kernel), arch, macros)


def compile_source(kernel: Kernel, source: str, arch: str, macros: Macros = ()) -> tuple[bytes, Resources]:
    """The same with ``source`` as the kernel's, such as a rendered one that is not written yet."""
    return _nvrtc(kernel, source, arch, _definitions(macros))


def cubin(kernel: Kernel, arch: str, macros: Macros) -> bytes:
    """The compiled kernel, from the cache on disk if it is there."""
    source = read_source(kernel)
    definitions = _definitions(macros)
    key = hashlib.sha256(repr((source, OPTIONS, definitions, arch, cuda.nvrtc().getVersion())).encode()).hexdigest()
    path = cache_folder() / f"{kernel.name}-{key[:32]}.cubin"
    cached = _read_cached(path)
    if cached is not None:
        return cached
    binary, _ = _nvrtc(kernel, source, arch, definitions)
    _write_cached(path, binary)
    return binary


def cache_folder() -> Path:
    """Where cubins are kept: ``KNNPOOL_CACHE_DIR``, or the user's cache folder."""
    configured = os.environ.get("KNNPOOL_CACHE_DIR")
    return Path(configured) if configured else Path(platformdirs.user_cache_dir("knnpool-gen")) / "cubin"


def _definitions(macros: Macros) -> tuple[str, ...]:
    return tuple(f"-D{name}={value}" for name, value in macros)


def _nvrtc(kernel: Kernel, source: str, arch: str, definitions: tuple[str, ...]) -> tuple[bytes, Resources]:
    nvrtc = cuda.nvrtc()
    options = (f"-arch={arch}", *OPTIONS, *definitions, f"-I{cuda.include_folder()}")
    program = nvrtc.createProgram(source, Path(kernel.file).name, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program), _resources(nvrtc.getProgramLog(program))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).rstrip("\0\n")
        raise CompileError(f"NVRTC could not compile generated/{kernel.file} for {arch}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match.group(1)) if match else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        static_shared_bytes=number(r"(\d+) bytes smem"),
    )


def _read_cached(path: Path) -> bytes | None:
    """The cubin at ``path``; None if there is none or it is damaged (it is then replaced)."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, binary = stored[:DIGEST_BYTES], stored[DIGEST_BYTES:]
    return binary if digest == hashlib.sha256(binary).hexdigest().encode() else None


def _write_cached(path: Path, binary: bytes) -> None:
    """Keep ``binary`` at ``path``, whole or not at all; a folder that cannot be written costs only speed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(binary).hexdigest().encode() + binary)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept in {path.parent} ({error}); set KNNPOOL_CACHE_DIR to a writable folder",
            stacklevel=2,
        )
