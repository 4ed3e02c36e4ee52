"""Compiled sources and their launches."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from knnpool_gen.errors import KernelError

_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:redzone=256:exitcode=99",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:exitcode=99:atexit_sleep_ms=0",
}
_SHOWN = 20_000  # characters of a sanitizer's report that a message keeps


class EmulationError(KernelError):
    """A source cannot be emulated or its run failed; the message holds the report of g++ or the sanitizer."""


class Sanitizer(str, Enum):
    """What watches over a run."""

    NONE = "none"
    ADDRESS = "address"
    """AddressSanitizer and UndefinedBehaviorSanitizer: bounds, alignment, undefined arithmetic."""
    THREAD = "thread"
    """ThreadSanitizer: accesses of several threads that no barrier orders."""


@dataclass(frozen=True)
class Launch:
    """One launch: a one-dimensional grid of one-dimensional blocks.

    An array is passed as a pointer to a copy in memory of exactly its size, and updated in place afterwards;
    one that is given twice, in one launch or in several, is one array. A numpy scalar is passed by value.
    """

    grid: int
    block: int
    shared_bytes: int
    arguments: tuple[npt.NDArray[Any] | np.generic, ...]
    parameters: Mapping[str, int] = field(default_factory=dict)
    """Values of the macros that :func:`build` was told to keep variable: all of them, and no others."""
    reverse: bool = False
    """Run blocks and threads in the opposite order."""
    concurrent: int = 1
    """How many consecutive blocks count as running at once; only the thread sanitizer sees a difference."""
    misalign: int = 0
    """Bytes by which every array begins after a multiple of 16."""


@dataclass(frozen=True)
class Program:
    """A compiled source. Runs happen in child processes, so a crash is an :class:`EmulationError`."""

    path: Path
    """The executable."""
    source: str
    """Name of the source, as it appears in messages."""
    sanitizer: Sanitizer
    kernels: tuple[str, ...]
    """The kernels of the source, in its order."""
    parameters: tuple[str, ...] = ()
    """The macros that each launch gives a value."""

    def run(self, kernel: str, launches: Sequence[Launch], *, timeout: float = 120.0) -> None:
        """Run the launches one after another and update their writable arrays in place.

        Raises :class:`EmulationError` with the report of what went wrong, and when ``timeout`` seconds are
        over; arrays are then as they were. To write to a read-only array is wrong, too.
        """
        if kernel not in self.kernels:
            raise EmulationError(f"{self.source} has no kernel {kernel}; it has {', '.join(self.kernels)}")
        if not launches:
            return
        case, arrays = self._case(kernel, launches)
        with tempfile.TemporaryDirectory(prefix="knnpool-emulator-") as folder:
            case_path, result_path = Path(folder, "case"), Path(folder, "result")
            case_path.write_bytes(case)
            command = [*_fixed_addresses(self.sanitizer), str(self.path), str(case_path), str(result_path)]
            try:
                child = subprocess.run(
                    command,
                    env={**os.environ, **_OPTIONS},
                    capture_output=True,
                    errors="replace",
                    timeout=timeout,
                )
                failure = _describe_exit(child.returncode) + child.stderr if child.returncode else ""
            except subprocess.TimeoutExpired:
                failure = f"no end after {timeout:g} s\n"
            result = result_path.read_bytes() if result_path.exists() else b""
        if failure:
            raise EmulationError(self._describe(kernel, launches, result, failure))
        self._take_back(kernel, arrays, result)

    def _case(self, kernel: str, launches: Sequence[Launch]) -> tuple[bytes, list[npt.NDArray[Any]]]:
        """The file that executor.cpp reads (it documents the format), and the arrays in it."""
        arrays: dict[int, npt.NDArray[Any]] = {}
        for number, launch in enumerate(launches):
            _check(f"launch {number} of {kernel}", launch, self.parameters)
            for argument in launch.arguments:
                if isinstance(argument, np.ndarray):
                    arrays.setdefault(id(argument), argument)
        index = {identity: i for i, identity in enumerate(arrays)}

        parts = [_text(kernel.encode()), _words(len(arrays))]
        parts += [_text(array.tobytes()) for array in arrays.values()]
        parts.append(_words(len(launches)))
        for launch in launches:
            parts.append(_words(launch.grid, launch.block, launch.shared_bytes))
            parts.append(_words(launch.reverse, launch.concurrent, launch.misalign))
            values = [launch.parameters[name] for name in self.parameters]
            parts.append(_words(len(values), *values))
            parts.append(_words(len(launch.arguments)))
            for argument in launch.arguments:
                if isinstance(argument, np.ndarray):
                    parts.append(_words(1, index[id(argument)]))
                else:
                    parts.append(_words(0) + _text(argument.tobytes()))
        return b"".join(parts), list(arrays.values())

    def _describe(self, kernel: str, launches: Sequence[Launch], result: bytes, failure: str) -> str:
        where = f"{self.source}: {kernel} ({self.sanitizer.value})"
        if len(result) >= 8:
            number = struct.unpack_from("<q", result)[0]
            launch = launches[number]
            parameters = "".join(f", {name}={value}" for name, value in launch.parameters.items())
            where += (
                f", launch {number} of {len(launches)} (grid {launch.grid}, block {launch.block}, "
                f"{launch.shared_bytes} bytes shared{parameters})"
            )
        if "unexpected memory mapping" in failure:
            failure += "Linux spreads addresses too far: sysctl vm.mmap_rnd_bits=28, or install setarch\n"
        if len(failure) > _SHOWN:
            failure = failure[:_SHOWN] + "\n...\n"
        return f"{where}: {failure.rstrip()}"

    def _take_back(self, kernel: str, arrays: Sequence[npt.NDArray[Any]], result: bytes) -> None:
        position = 8
        for array in arrays:
            raw = result[position : position + array.nbytes]
            position += array.nbytes
            if array.flags.writeable:
                if array.size:
                    array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)
            elif raw != array.tobytes():
                raise EmulationError(
                    f"{self.source}: {kernel} writes to a read-only array: {array.dtype}, shape {array.shape}"
                )


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _text(raw: bytes) -> bytes:
    return _words(len(raw)) + raw + bytes(-len(raw) % 8)


def _check(what: str, launch: Launch, parameters: tuple[str, ...]) -> None:
    limits = (
        ("grid", launch.grid, 1, 2**31 - 1),
        ("block", launch.block, 1, 1024),
        ("shared_bytes", launch.shared_bytes, 0, 227 * 1024),
        ("concurrent", launch.concurrent, 1, 2**31 - 1),
        ("misalign", launch.misalign, 0, 4096),
    )
    for name, value, least, most in limits:
        if not least <= value <= most:
            raise EmulationError(f"{what}: {name} is {value}, not {least} to {most}")
    if set(launch.parameters) != set(parameters):
        given, wanted = ", ".join(sorted(launch.parameters)), ", ".join(sorted(parameters))
        raise EmulationError(f"{what}: parameters given: {given or 'none'}; needed: {wanted or 'none'}")
    for name, value in launch.parameters.items():
        if not -(2**31) <= value < 2**31:
            raise EmulationError(f"{what}: {name}={value} does not fit into an int")
    for number, argument in enumerate(launch.arguments):
        if isinstance(argument, np.ndarray):
            if not argument.flags.c_contiguous:
                raise EmulationError(f"{what}: argument {number} is an array that is not contiguous")
        elif not isinstance(argument, np.generic):
            raise EmulationError(f"{what}: argument {number} is neither a numpy array nor a numpy scalar")


def _describe_exit(status: int) -> str:
    return f"ended by signal {-status}\n" if status < 0 else ""


def _fixed_addresses(sanitizer: Sanitizer) -> list[str]:
    """Words before the command for systems that spread addresses further than the sanitizers allow."""
    if sanitizer is Sanitizer.NONE:
        return []
    try:
        spread = int(Path("/proc/sys/vm/mmap_rnd_bits").read_text())
    except (OSError, ValueError):
        return []
    setarch = shutil.which("setarch")
    return [setarch, "-R"] if spread > 28 and setarch else []
