"""Compiles sources for the CPU, each content once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .cache import cache_folder, cached, content_key
from .program import EmulationError, Program, Sanitizer
from .toolchain import compile_with, find_toolchain
from .unit import translate

_HERE = Path(__file__).resolve().parent
_HEADER = _HERE / "cuda_emu.h"
_EXECUTOR = _HERE / "executor.cpp"

# Kernels cast pointers freely. Nothing is fused that the source does not fuse. A local variable that is read
# before it is written should not happen to be zero. Warnings are the business of NVRTC.
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


def build(
    source: Path,
    sanitizer: Sanitizer,
    *,
    parameters: Sequence[str] = (),
    defines: Mapping[str, str] | None = None,
    cache_dir: Path | None = None,
) -> Program:
    """Compile one CUDA source for the CPU, or find it in the cache.

    ``parameters`` are macros that every launch gives a value, ``defines`` macros that are fixed now. The
    cache is ``cache_dir``, else ``KNNPOOL_EMULATOR_CACHE``, else a folder of this user; processes may share it.
    """
    defines = defines or {}
    if both := [name for name in parameters if name in defines]:
        raise EmulationError(f"{source.name}: both parameter and define: {', '.join(both)}")
    unit = translate(source.name, source.read_text(encoding="utf-8"), parameters)
    toolchain = find_toolchain()
    folder = cache_folder(cache_dir)

    executor_flags = (*_COMMON, *_EXECUTOR_FLAGS[sanitizer])
    header, executor_text = (path.read_text(encoding="utf-8") for path in (_HEADER, _EXECUTOR))
    executor_key = content_key(toolchain.identity, header, executor_text, *executor_flags)

    def make_executor(result: Path) -> None:
        compile_with(toolchain, _EXECUTOR.name, [*executor_flags, "-c", str(_EXECUTOR)], "", result)

    # Precompiled, the header takes less than half the time; g++ looks for the .gch in the first -I folder.
    header_flags = (*_COMMON, *_KERNEL_FLAGS[sanitizer])
    header_key = content_key(toolchain.identity, header, *header_flags)

    def make_header(result: Path) -> None:
        compile_with(toolchain, _HEADER.name, [*header_flags, "-x", "c++-header", str(_HEADER)], "", result)

    flags = (*header_flags, *(f"-D{name}={value}" for name, value in defines.items()))
    key = content_key(executor_key, unit.text, *flags)

    def make_program(result: Path) -> None:
        executor = cached(folder, f"executor-{sanitizer.value}-{executor_key}.o", make_executor)
        precompiled = cached(folder / f"header-{sanitizer.value}-{header_key}", f"{_HEADER.name}.gch", make_header)
        arguments = [*flags, f"-I{precompiled.parent}", f"-I{_HERE}", "-x", "c++", "-", "-x", "none", str(executor)]
        compile_with(toolchain, f"{source.name} ({sanitizer.value})", arguments, unit.text, result)

    path = cached(folder, f"{source.stem}-{sanitizer.value}-{key}", make_program)
    return Program(path, source.name, sanitizer, unit.kernels, tuple(parameters))
