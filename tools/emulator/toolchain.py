"""What the emulator needs on the machine: g++ and NVIDIA's headers."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from .program import EmulationError

_OLDEST_COMPILER = 12
# Folder in site-packages/nvidia, a header that is needed from it, and the package that brings it.
_CUDA_HEADERS = (
    ("cuda_runtime", "cuda_fp16.h", "nvidia-cuda-runtime-cu12"),
    ("cuda_nvcc", "crt/host_defines.h", "nvidia-cuda-nvcc-cu12"),
    ("cuda_cccl", "nv/target", "nvidia-cuda-cccl-cu12"),
)
_DIGESTED = ("cuda_fp16.h", "cuda_fp16.hpp", "cuda_bf16.h", "cuda_bf16.hpp", "vector_types.h")


@dataclass(frozen=True)
class Toolchain:
    """A compiler and the headers it is given."""

    identity: str
    """Changes when another compiler or other headers are installed."""
    include_flags: tuple[str, ...]


@lru_cache(maxsize=1)
def find_toolchain() -> Toolchain:
    """What is installed here; an :class:`EmulationError` names what is missing."""
    compiler = _compiler_version()
    folders = _cuda_include_folders()
    digest = hashlib.sha256()
    for name in _DIGESTED:
        digest.update((folders[0] / name).read_bytes())
    return Toolchain(f"{compiler} {digest.hexdigest()}", tuple(f"-isystem{folder}" for folder in folders))


def compile_with(toolchain: Toolchain, what: str, arguments: Sequence[str], text: str, result: Path) -> None:
    """Run g++ on ``text`` (standard input) or on a file that is named in the arguments."""
    command = ["g++", *toolchain.include_flags, *arguments, "-o", str(result)]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, input=text, env=english, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise EmulationError(f"g++ failed on {what}:\n{done.stderr.rstrip()}")


def _compiler_version() -> str:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EmulationError(f"emulation needs Linux on x86-64; this is {sys.platform}, {platform.machine()}")
    wanted = f"emulation needs g++ {_OLDEST_COMPILER} or later with its sanitizers (Debian: apt install g++)"
    try:
        done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EmulationError(f"{wanted}; running g++ failed: {error}") from error
    version = done.stdout.partition("\n")[0]
    number = re.search(r"(\d+)\.\d+\.\d+", version)
    if number is None or int(number[1]) < _OLDEST_COMPILER:
        raise EmulationError(f"{wanted}; found {version}")
    return version


def _cuda_include_folders() -> tuple[Path, ...]:
    folders = [(_find_include(part), header, package) for part, header, package in _CUDA_HEADERS]
    found = tuple(folder for folder, header, _ in folders if folder and (folder / header).is_file())
    if len(found) < len(folders):
        missing = [package for folder, _, package in folders if folder not in found]
        raise EmulationError(
            f"emulation needs NVIDIA's CUDA headers, {', '.join(missing)}: pip install 'knnpool-gen[dev]'"
        )
    return found


def _find_include(part: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(f"nvidia.{part}")
    except ModuleNotFoundError:
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), "include")
