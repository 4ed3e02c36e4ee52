"""Which variant serves a problem on a device, and with how many blocks of how many threads.

Plain numbers in, plain numbers out: no tensor and no device is touched, so every choice can be tested anywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

from knnpool_gen.errors import InvalidArgumentError, OutOfReachError, UnsupportedTypeError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel
from knnpool_gen.vocabulary import Direction, Mode

THREADS = 256
"""Threads of a block, unless the table is tiny or a tile so large that few blocks fit a multiprocessor."""
RESERVED_SHARED = 1024
"""Shared memory the driver keeps of every block, in bytes (compute capability 8.0 and newer)."""
MAX_BLOCKS = 16
"""Blocks a multiprocessor can hold on every supported architecture."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice depends on, in threads and bytes."""

    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int


@dataclass(frozen=True)
class Problem:
    """One call, as far as the choice of a kernel is concerned."""

    direction: Direction
    mode: Mode
    dtype: str
    k: int
    nin: int
    nout: int
    rows: int
    """Rows of the input: the product of all its dimensions but the last."""
    aux: bool
    """Whether the forward writes the winning slots."""

    @property
    def staged_nodes(self) -> int:
        """Nodes of a row that a tile stages."""
        return self.nin if self.direction is Direction.FORWARD else self.nout

    @property
    def written_nodes(self) -> int:
        """Nodes of a row that a tile writes."""
        return self.nout if self.direction is Direction.FORWARD else self.nin


@dataclass(frozen=True)
class Configuration:
    """A kernel and how to launch it."""

    kernel: Kernel
    macros: tuple[tuple[str, int], ...]
    """The facts of table and launch that are compiled in, name and value."""
    tile_rows: int
    grid: int
    threads: int
    shared_bytes: int


def tile_heights(direction: Direction, mode: Mode, dtype: str) -> dict[int, Kernel]:
    """The kernels that compute ``mode`` on ``dtype``, by the rows of their tile, ascending."""
    found = {
        key.rows: kernel
        for key, kernel in KERNELS.items()
        if (key.direction, key.mode, key.dtype) == (direction, mode, dtype)
    }
    return dict(sorted(found.items()))


def all_tile_heights() -> set[int]:
    """Every number of rows for which some variant exists."""
    return {key.rows for key in KERNELS}


def supported_dtypes(mode: Mode) -> list[str]:
    """Names of the dtypes that have kernels for ``mode``."""
    return list(dict.fromkeys(key.dtype for key in KERNELS if key.mode is mode))


@lru_cache(maxsize=4096)
def select(problem: Problem, device: DeviceFacts, rs: int | None = None) -> Configuration:
    """Choose a kernel and its launch.

    ``rs`` asks for a tile of that many rows.

    Raises:
        UnsupportedTypeError: no kernel computes this mode on this dtype.
        InvalidArgumentError: no variant has tiles of ``rs`` rows.
        OutOfReachError: no tile, or not the tile asked for, fits into shared memory.
    """
    kernels = tile_heights(problem.direction, problem.mode, problem.dtype)
    if not kernels:
        raise UnsupportedTypeError(
            f"mode {problem.mode.value!r} has no kernel for {problem.dtype}; "
            f"supported: {', '.join(supported_dtypes(problem.mode))}"
        )
    if rs is not None:
        check_tile_height(rs, kernels)
        kernels = {rs: kernels[rs]}
    fitting = {
        rows: kernel
        for rows, kernel in kernels.items()
        if kernel.shared_bytes(problem.staged_nodes) <= device.shared_per_block
    }
    if not fitting:
        rows, kernel = next(iter(kernels.items()))
        side = "Nin" if problem.direction is Direction.FORWARD else "Nout"
        raise OutOfReachError(
            f"{side} = {problem.staged_nodes} is too large for {problem.dtype}: a tile of {rows} row(s) takes "
            f"{kernel.shared_bytes(problem.staged_nodes)} bytes of shared memory, "
            f"this device has {device.shared_per_block}"
        )
    rows = next(_preferred_heights(problem, device, fitting))
    return configure(problem, device, rows, fitting[rows])


def check_tile_height(rs: int, heights: Collection[int]) -> None:
    """Raise InvalidArgumentError unless ``rs`` is one of the tile heights that exist."""
    if rs not in heights:
        raise InvalidArgumentError(
            f"rs = {rs!r}: no variant has tiles of that many rows; there are {', '.join(map(str, sorted(heights)))}"
        )


def _preferred_heights(problem: Problem, device: DeviceFacts, kernels: dict[int, Kernel]) -> Iterator[int]:
    """Tile heights, best first: tall tiles as long as two share a multiprocessor and all have work."""
    for rows in sorted(kernels, reverse=True):
        shared = kernels[rows].shared_bytes(problem.staged_nodes)
        tiles = -(-problem.rows // rows)
        if _blocks_by_shared(shared, device) >= 2 and tiles >= device.multiprocessors:
            yield rows
    yield min(kernels)


def _blocks_by_shared(shared_bytes: int, device: DeviceFacts) -> int:
    fit = device.shared_per_multiprocessor // (shared_bytes + RESERVED_SHARED)
    return max(1, min(fit, MAX_BLOCKS))


def configure(problem: Problem, device: DeviceFacts, rows: int, kernel: Kernel) -> Configuration:
    """Launch facts of one kernel: block size from what fits, grid just large enough to fill the device."""
    shared_bytes = kernel.shared_bytes(problem.staged_nodes)
    blocks = _blocks_by_shared(shared_bytes, device)
    threads = THREADS
    while threads * blocks < kernel.resident_threads and threads < 1024:
        threads *= 2
    work = max(problem.written_nodes, -(-problem.staged_nodes // kernel.granule))
    while threads > 64 and work <= threads // 2:
        threads //= 2
    blocks = max(1, min(blocks, kernel.resident_threads // threads))
    resident = max(1, min(_blocks_by_shared(shared_bytes, device), device.threads_per_multiprocessor // threads))
    tiles = -(-problem.rows // rows)
    macros = {
        "KNNPOOL_K": problem.k,
        "KNNPOOL_NIN": problem.nin,
        "KNNPOOL_NOUT": problem.nout,
        "KNNPOOL_THREADS": threads,
        "KNNPOOL_BLOCKS": blocks,
    }
    if problem.direction is Direction.FORWARD and "aux" in kernel.arguments:
        macros["KNNPOOL_AUX"] = int(problem.aux)
    return Configuration(
        kernel=kernel,
        macros=tuple(macros.items()),
        tile_rows=rows,
        grid=max(1, min(tiles, device.multiprocessors * resident)),
        threads=threads,
        shared_bytes=shared_bytes,
    )
