"""Which variant serves a problem on a device, and with how many blocks of how many threads.

Plain numbers in, plain numbers out: no tensor and no device is touched, so every choice can be tested anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral

from knnpool_gen.errors import InvalidArgumentError, OutOfReachError, UnsupportedTypeError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime.tuned import TunedChoice, forget_tuned, tuned_choice, warn_ignored
from knnpool_gen.vocabulary import Direction, Mode, Staging

THREADS = 256
"""Threads of a block, unless the table is tiny or a tile so large that few blocks fit a multiprocessor."""
RESERVED_SHARED = 1024
"""Shared memory the driver keeps of every block, in bytes (compute capability 8.0 and newer)."""
BLOCK_SIZES = (64, 128, 256, 512, 1024)
"""Threads a block may have."""
MAX_BLOCKS = 32
"""Blocks a multiprocessor can hold at most; small blocks are limited by its threads before."""
STACKED_SHARED = {Direction.FORWARD: 16 * 1024, Direction.BACKWARD: 24 * 1024}
"""A tile is stacked only up to this many bytes; four times that, or twice, if it has no work for a warp otherwise."""
TILES = 2
"""Tiles that every multiprocessor should have at least, or rows are left to lower ones."""
LONG_ROW = 1 << 14
"""Nodes of a row so long that few of its tiles fit a multiprocessor."""
PLACES_SHARED = 16 * 1024
"""Look-ups of columns too long for registers stand in shared memory only up to this many bytes."""
PLACE_BYTES = 4
"""Bytes of one of them."""
LONG_SUM = 32
"""Terms of a sum, which one thread adds one after the other, that keep a tile waiting."""
SUM_NODE = 8
"""Bytes of a node in such tiles, at most: every row more takes longer to add."""
BANK = 4
"""Bytes that a bank of shared memory delivers at a time."""
LONG_COLUMN = 16
"""Slots that each of the threads that share a column is left with, at least."""
WARP = 32
"""Threads that work in step: as many as possible should have a column of their own."""
WIDEST_READ = 16
"""Bytes that one access to shared memory brings a thread at most."""
SECTOR = 32
"""Bytes that a scattered read takes from memory, however few it asks for."""

INDEX_TYPES = {2: "unsigned short", 4: "int"}
SLOT_TYPES = {1: "unsigned char", 2: "short", 4: "int"}
ENTRY_TYPES = {4: "unsigned", 8: "unsigned long long"}


@dataclass(frozen=True)
class DeviceFacts:
    """What the choice depends on, in threads and bytes."""

    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int
    threads_per_multiprocessor: int
    label: str = ""
    """What tuned choices know the device by; without it none is looked for."""


H200 = DeviceFacts(
    multiprocessors=132,
    shared_per_block=227 * 1024,
    shared_per_multiprocessor=228 * 1024,
    threads_per_multiprocessor=2048,
)
"""What choices are shown for where there is no device."""


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
    need_aux: bool = False
    """Whether the forward writes the winning slots."""
    omit_nan: bool = False
    normalize: bool = False
    index_bytes: int = 2
    slot_bytes: int = 1
    entry_bytes: int = 4
    blocked_aux: bool = False
    """Whether aux lies in blocks of rows."""
    aligned: bool = True
    """Whether the tensors begin where vectors may."""

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
    macros: tuple[tuple[str, int | str], ...]
    """The facts of table and launch that are compiled in, name and value."""
    grid: int
    """Blocks, as many as the device can be expected to hold at once."""
    threads: int
    shared_bytes: int
    tiles: int
    """Tiles, or parts of rows, that blocks take turns with: more blocks than these have nothing to do."""


def all_tile_heights() -> set[int]:
    """Every number of rows for which some variant exists."""
    return {key.rows for key in KERNELS}


def supported_dtypes(mode: Mode) -> list[str]:
    """Names of the dtypes that have kernels for ``mode``."""
    return list(dict.fromkeys(key.dtype for key in KERNELS if key.mode is mode))


def check_tile_height(rs: object, heights: Collection[int]) -> None:
    """Raise InvalidArgumentError unless ``rs`` is one of the tile heights that exist."""
    if isinstance(rs, bool) or not isinstance(rs, Integral) or rs not in heights:
        raise InvalidArgumentError(
            f"rs = {rs!r}: no variant has tiles of that many rows; there are {', '.join(map(str, sorted(heights)))}"
        )


@lru_cache(maxsize=4096)
def select(problem: Problem, device: DeviceFacts, rs: int | None = None) -> Configuration:
    """Choose a kernel and its launch: what ``rs`` asks for, then what was tuned on this device, then the model.

    ``rs`` asks for a variant of that many rows; its tiles are then not stacked.

    Raises:
        UnsupportedTypeError: no kernel computes this mode on this dtype.
        InvalidArgumentError: no variant of this mode and dtype has ``rs`` rows.
        OutOfReachError: no variant, or none of ``rs`` rows, serves a table of this size.
    """
    staged = _variants(problem, Staging.SHARED)
    direct = _variants(problem, Staging.DIRECT)
    heights = {*staged, *direct}
    if not heights:
        raise UnsupportedTypeError(
            f"mode {problem.mode.value!r} has no kernel for {problem.dtype}; "
            f"supported: {', '.join(supported_dtypes(problem.mode))}"
        )
    if rs is not None:
        check_tile_height(rs, heights)
    elif (tuned := tuned_choice(problem, device.label)) is not None:
        configuration = _tuned_configuration(problem, device, tuned)
        if configuration is not None:
            return configuration
    staged = {rows: kernel for rows, kernel in staged.items() if fits(problem, device, kernel)}
    direct = {rows: kernel for rows, kernel in direct.items() if fits(problem, device, kernel)}
    if rs is not None:
        if rs in staged:
            return configure(problem, device, rs, staged[rs], stack=1)
        if rs in direct:
            return configure(problem, device, rs, direct[rs])
        raise OutOfReachError(f"rs = {rs}: no variant of that many rows serves {_size(problem, device)}")
    if staged and not (direct and (_reads_little(problem) or _leaves_idle(problem, device))):
        rows = next(_preferred_heights(problem, device, staged))
        return configure(problem, device, rows, staged[rows])
    if not direct:
        raise OutOfReachError(f"no variant serves {_size(problem, device)}")
    blocks = problem.rows // max(direct) * -(-problem.written_nodes // THREADS)
    rows = max(direct) if blocks >= TILES * device.multiprocessors else min(direct)
    return configure(problem, device, rows, direct[rows])


def forget_choices() -> None:
    """Choose again for every problem, from the file of tuned choices as it then is."""
    forget_tuned()
    select.cache_clear()


def configure(
    problem: Problem,
    device: DeviceFacts,
    rows: int,
    kernel: Kernel,
    stack: int | None = None,
    block_threads: int | None = None,
) -> Configuration:
    """Launch facts of one kernel: block size and stacking from what fits, grid just large enough for the device.

    ``stack`` and ``block_threads`` overrule what is worked out here.
    """
    macros: dict[str, int | str] = {
        "KNNPOOL_K": problem.k,
        "KNNPOOL_NIN": problem.nin,
        "KNNPOOL_NOUT": problem.nout,
        "KNNPOOL_INDEX": INDEX_TYPES[problem.index_bytes],
        "KNNPOOL_SLOT": SLOT_TYPES[problem.slot_bytes],
        "KNNPOOL_ENTRY": ENTRY_TYPES[problem.entry_bytes],
    }
    switches = {
        "KNNPOOL_OMIT_NAN": problem.omit_nan,
        "KNNPOOL_AUX": problem.need_aux,
        "KNNPOOL_NORMALIZE": problem.normalize,
        "KNNPOOL_PLACES": _places_bytes(problem, kernel) > 0,
        "KNNPOOL_AUX_BLOCKED": problem.blocked_aux,
    }
    macros |= {name: int(switches[name]) for name in kernel.switches}
    if kernel.node_bytes:
        chosen = _stack(problem, device, rows, kernel) if stack is None else stack
        shared_bytes = _shared_bytes(problem, kernel, chosen)
        by_shared = _blocks_by_shared(shared_bytes, device)
        vector = _vector(problem, problem.staged_nodes, kernel.vector)
        split = _split(problem, chosen)
        work = chosen * max(problem.written_nodes * split, -(-problem.staged_nodes // vector))
        tiles = -(-problem.rows // (rows * chosen))
        macros["KNNPOOL_STACK"] = chosen
        macros["KNNPOOL_VECTOR"] = vector
        if problem.direction is Direction.FORWARD and problem.mode is Mode.MAX:
            macros["KNNPOOL_SPLIT"] = split
        if problem.direction is Direction.BACKWARD:
            macros["KNNPOOL_OUT_VECTOR"] = _vector(problem, problem.written_nodes, kernel.out_vector)
    else:
        shared_bytes, by_shared, work = 0, MAX_BLOCKS, problem.written_nodes
        tiles = -(-problem.rows // rows)
    threads = THREADS
    if not _waits_for_sums(problem):  # those few threads need registers rather than company
        while threads * by_shared < kernel.resident_threads and threads < 1024:
            threads *= 2
    while threads > 64 and work <= threads // 2:
        threads //= 2
    threads = block_threads or threads
    if not kernel.node_bytes:
        tiles *= -(-problem.written_nodes // threads)
    macros["KNNPOOL_THREADS"] = threads
    by_threads = device.threads_per_multiprocessor // threads
    blocks = max(1, min(by_shared, kernel.resident_threads // threads))
    macros["KNNPOOL_BLOCKS"] = blocks
    # A block looks its part of the table up once and goes on from tile to tile; of the others, as many as fit.
    resident = max(1, min(blocks, by_threads) if kernel.node_bytes else by_threads)
    return Configuration(
        kernel=kernel,
        macros=tuple(macros.items()),
        grid=max(1, min(tiles, device.multiprocessors * resident)),
        threads=threads,
        shared_bytes=shared_bytes,
        tiles=max(1, tiles),
    )


def _tuned_configuration(problem: Problem, device: DeviceFacts, tuned: TunedChoice) -> Configuration | None:
    """What ``tuned`` says, or None with a warning where it says what cannot be launched."""
    for key, kernel in KERNELS.items():
        if kernel.name == tuned.variant and key[:3] == (problem.direction, problem.mode, problem.dtype):
            if fits(problem, device, kernel, tuned.stack) and tuned.threads in BLOCK_SIZES:
                return configure(problem, device, key.rows, kernel, tuned.stack, tuned.threads)
            warn_ignored(f"{tuned.variant} with stack {tuned.stack} and {tuned.threads} threads does not fit here")
            return None
    warn_ignored(f"there is no variant {tuned.variant} for this mode and dtype")
    return None


def _variants(problem: Problem, staging: Staging) -> dict[int, Kernel]:
    """The kernels that compute the problem's mode on its dtype, by the rows of their tile, ascending."""
    wanted = (problem.direction, problem.mode, problem.dtype, staging)
    return dict(sorted((key.rows, kernel) for key, kernel in KERNELS.items() if key[:4] == wanted))


def fits(problem: Problem, device: DeviceFacts, kernel: Kernel, stack: int = 1) -> bool:
    """Whether ``kernel`` can be launched with tiles of ``stack`` groups of rows."""
    shared_bytes = _shared_bytes(problem, kernel, stack)
    return stack >= 1 and shared_bytes <= device.shared_per_block and problem.k <= (kernel.max_k or problem.k)


def _size(problem: Problem, device: DeviceFacts) -> str:
    return (
        f"K = {problem.k} and {problem.staged_nodes} nodes of {problem.dtype} "
        f"with {device.shared_per_block} bytes of shared memory a block"
    )


def _reads_little(problem: Problem) -> bool:
    """Whether scattered reads of the inputs that are used take less from memory than all inputs in order, or as much
    as the staging of rows so long that little else fits beside them."""
    reads = problem.k * problem.nout
    return reads * SECTOR < problem.staged_nodes * 2 or (reads <= problem.nin and problem.nin >= LONG_ROW)


def _leaves_idle(problem: Problem, device: DeviceFacts) -> bool:
    """Whether tiles would use little of the device: too few rows for its multiprocessors, each with much to write,
    or long columns for a few threads of blocks that take much shared memory."""
    few_rows = problem.rows < 2 * device.multiprocessors and problem.written_nodes > 4 * THREADS
    few_long_rows = problem.rows < 8 * device.multiprocessors and 2 * problem.nin >= LONG_ROW
    few_threads = problem.k * problem.written_nodes >= 1 << 14 and problem.written_nodes < THREADS
    return few_rows or few_long_rows or (few_threads and problem.staged_nodes > LONG_ROW)


def _preferred_heights(problem: Problem, device: DeviceFacts, kernels: Mapping[int, Kernel]) -> Iterator[int]:
    """Tile heights, best first: tall tiles as long as two share a multiprocessor and all threads have work."""
    # One access brings 16 bytes: more of a node are not read faster, and take more registers. Backward over few nodes,
    # tall tiles are better all the same.
    small = problem.direction is Direction.BACKWARD and problem.written_nodes <= THREADS
    widest = SUM_NODE if _waits_for_sums(problem) else WIDEST_READ
    for rows in sorted(kernels, key=lambda rows: (not small and kernels[rows].node_bytes > widest, -rows)):
        shared = _shared_bytes(problem, kernels[rows], 1)
        tiles = -(-problem.rows // rows)
        stack = _stack(problem, device, rows, kernels[rows])
        if (
            _blocks_by_shared(shared, device) >= 2
            and tiles >= TILES * device.multiprocessors
            and _columns(problem, stack) >= _lanes(problem, kernels[rows], stack)
        ):
            yield rows
    yield min(kernels)


def _stack(problem: Problem, device: DeviceFacts, rows: int, kernel: Kernel) -> int:
    """Groups of rows in a tile: as many as give a block's threads work, if the tile stays small and tiles many."""
    stack = 1
    while (
        2 * stack * problem.written_nodes <= _work(problem, kernel)
        and _tile_bytes(problem, kernel, 2 * stack) <= min(_stacked_shared(problem, stack), device.shared_per_block)
        and problem.rows >= 2 * TILES * stack * rows * device.multiprocessors
    ):
        stack *= 2
    return stack


def _stacked_shared(problem: Problem, stack: int) -> int:
    """Bytes up to which a tile may be stacked once more: fewer, the more threads have a column already."""
    columns = _columns(problem, stack)
    most = STACKED_SHARED[problem.direction]
    if columns >= WARP:
        return most
    return 2 * most if _waits_for_sums(problem) and columns >= WARP // 2 else 4 * most


def _columns(problem: Problem, stack: int) -> int:
    """Threads of a block that have a column, or a part of one."""
    return stack * problem.written_nodes * _split(problem, stack)


def _lanes(problem: Problem, kernel: Kernel, stack: int) -> int:
    """Threads of a block that should have a column: a warp, or half of one that adds few rows or lets more tiles in."""
    small = kernel.node_bytes <= BANK or _tile_bytes(problem, kernel, stack) <= 2 * STACKED_SHARED[problem.direction]
    return WARP // 2 if _waits_for_sums(problem) and small else WARP


def _waits_for_sums(problem: Problem) -> bool:
    """Whether tiles wait for few threads that add long columns."""
    few = problem.written_nodes < WARP
    return problem.direction is Direction.FORWARD and problem.mode is not Mode.MAX and problem.k >= LONG_SUM and few


def _work(problem: Problem, kernel: Kernel) -> int:
    """Nodes to write that a block should have: as many as its threads hold backward; forward, where a column takes
    longer, one for each, or two warps of them where a row has few."""
    if problem.direction is Direction.BACKWARD:
        return kernel.held * THREADS
    return THREADS if problem.written_nodes >= WARP else 2 * WARP


def _split(problem: Problem, stack: int) -> int:
    """Threads that share a column of a maximum: as many as the block has, if each is left a good part of it."""
    split = 1
    if problem.mode is Mode.MAX and problem.direction is Direction.FORWARD:
        while (
            split < WARP
            and stack * problem.written_nodes * 2 * split <= THREADS
            and problem.k >= LONG_COLUMN * 2 * split
        ):
            split *= 2
    return split


def _shared_bytes(problem: Problem, kernel: Kernel, stack: int) -> int:
    tile, places = _tile_bytes(problem, kernel, stack), _places_bytes(problem, kernel)
    return -(-tile // WIDEST_READ) * WIDEST_READ + places if places else tile


def _tile_bytes(problem: Problem, kernel: Kernel, stack: int) -> int:
    return kernel.shared_bytes(problem.staged_nodes, problem.written_nodes, stack, problem.slot_bytes)


def _places_bytes(problem: Problem, kernel: Kernel) -> int:
    """Shared memory for the look-ups of columns too long for a thread's registers; 0 where there are too many."""
    found = problem.k * problem.nout * PLACE_BYTES
    return found if problem.k > kernel.held_slots > 0 and found <= PLACES_SHARED else 0


def _vector(problem: Problem, nodes: int, most: int) -> int:
    """How many neighbouring nodes one access brings: rows of ``nodes`` nodes must consist of whole vectors."""
    return math.gcd(nodes, most) if problem.aligned else 1


def _blocks_by_shared(shared_bytes: int, device: DeviceFacts) -> int:
    fit = device.shared_per_multiprocessor // (shared_bytes + RESERVED_SHARED)
    return max(1, min(fit, MAX_BLOCKS))
