"""Planted faults are found, and the report names the line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from knnpool_gen.emulator import EmulationError, Launch, Sanitizer, build

SOURCE = Path(__file__).parent / "kernels" / "faults.cu"
N = 64


def run(kernel: str, sanitizer: Sanitizer, *, n: int = N, **options: int) -> np.ndarray:
    """Launches a kernel on ``n`` numbers; returns what it wrote."""
    x = np.arange(1, n + 1, dtype=np.float32)
    y = np.zeros(n, np.float32)
    facts = {"grid": 1, "block": N, "shared_bytes": 4 * n, "arguments": (x, y, np.int32(n)), **options}
    build(SOURCE, sanitizer).run(kernel, [Launch(**facts)], timeout=20)
    return y


def faulty_line(kernel: str) -> str:
    """``faults.cu:12``, the line of this kernel that is marked as its fault."""
    lines = SOURCE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if f" {kernel}(" in line)
    return f"faults.cu:{next(i for i, line in enumerate(lines) if i > start and '// fault' in line) + 1}"


@pytest.mark.parametrize("misalign", [0, 4])
@pytest.mark.parametrize(
    ("kernel", "report"),
    [
        ("reads_past_the_end", "heap-buffer-overflow"),
        ("reads_before_the_start", "heap-buffer-overflow|use-after-poison"),
        ("writes_past_the_end", "heap-buffer-overflow"),
        ("leaves_dynamic_shared", "heap-buffer-overflow"),
        ("leaves_static_shared", "index 32 out of bounds for type 'float"),
        ("leaves_a_local_array", "dynamic-stack-buffer-overflow|index 64 out of bounds"),
    ],
)
def test_accesses_out_of_bounds(kernel: str, report: str, misalign: int) -> None:
    if kernel == "reads_before_the_start" and misalign:
        misalign = 8  # in front of an array ASan guards in units of 8 bytes

    with pytest.raises(EmulationError, match=report) as failure:
        run(kernel, Sanitizer.ADDRESS, misalign=misalign)

    assert faulty_line(kernel) in str(failure.value)


@pytest.mark.parametrize("kernel", ["misaligned", "misaligned_load"])
@pytest.mark.parametrize("misalign", [4, 8])
def test_misaligned_vectors(kernel: str, misalign: int) -> None:
    run(kernel, Sanitizer.ADDRESS)

    with pytest.raises(EmulationError, match=r"misaligned address .* which requires 16 byte alignment") as failure:
        run(kernel, Sanitizer.ADDRESS, misalign=misalign)

    assert faulty_line(kernel) in str(failure.value)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kernel", ["forgets_a_barrier", "forgets_a_warp_barrier"])
def test_a_missing_barrier(kernel: str, reverse: bool) -> None:
    with pytest.raises(EmulationError, match="data race") as failure:
        run(kernel, Sanitizer.THREAD, reverse=reverse)

    assert faulty_line(kernel) in str(failure.value)


def test_a_warp_barrier_orders_its_lanes() -> None:
    y = run("has_a_warp_barrier", Sanitizer.THREAD)

    np.testing.assert_array_equal(y, (np.arange(N) ^ 1) + 1)


def test_blocks_that_write_the_same_place_at_once() -> None:
    expected = np.arange(1, N + 1, dtype=np.float32)
    np.testing.assert_array_equal(run("blocks_write_the_same", Sanitizer.THREAD, grid=3), expected)

    with pytest.raises(EmulationError, match="data race") as failure:
        run("blocks_write_the_same", Sanitizer.THREAD, grid=3, concurrent=3)

    assert faulty_line("blocks_write_the_same") in str(failure.value)


@pytest.mark.parametrize("sanitizer", Sanitizer, ids=lambda sanitizer: sanitizer.value)
@pytest.mark.parametrize(
    ("kernel", "report"),
    [
        ("barrier_in_a_branch", r"32 threads \(first: 32\) returned; 32 threads .* at __syncthreads in line {line}"),
        ("different_barriers", r"meet at different __syncthreads, lines {before} and {line} \(block 0, thread 32\)"),
        ("half_a_warp_shuffles", r"32 threads \(first: 16\) wait at __syncthreads in .*; 32 threads .* warp intrinsic"),
        ("shuffles_from_outside_the_mask", r"a shuffle reads a lane outside the mask \(block 0, thread \d+\)"),
        ("too_many_threads", r"a block of 64 threads exceeds __launch_bounds__\(32\)"),
        ("assumes_wrongly", r"__builtin_assume\(n < 0\) does not hold \(block 0, thread 0\)"),
    ],
)  # fmt: skip
def test_misuse_of_the_programming_model(kernel: str, report: str, sanitizer: Sanitizer) -> None:
    if "{line}" in report:
        line = int(faulty_line(kernel).partition(":")[2])
        report = report.replace("{line}", str(line)).replace("{before}", str(line - 2))

    with pytest.raises(EmulationError, match=report):
        run(kernel, sanitizer)


@pytest.mark.parametrize("sanitizer", Sanitizer, ids=lambda sanitizer: sanitizer.value)
def test_shared_memory_that_nobody_wrote_is_not_a_number(sanitizer: Sanitizer) -> None:
    x = np.arange(N, dtype=np.float32)
    y = np.zeros(N + 1, np.float32)

    launch = Launch(2, N, 4 * N, (x, y, np.int32(N)))  # the second block must not see what the first one wrote
    build(SOURCE, sanitizer).run("reads_unwritten_shared", [launch])

    assert y.view(np.uint32)[[0, N]].tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    np.testing.assert_array_equal(y[1:N], x[1:])


def test_writing_to_a_read_only_array() -> None:
    x = np.ones(8, np.float32)
    y = np.zeros(8, np.float32)
    launch = Launch(1, 32, 0, (x, y, np.int32(8)))
    program = build(SOURCE, Sanitizer.NONE)
    program.run("writes_its_input", [launch])
    assert x.tolist() == [1] * 7 + [0]

    y[0] = 5
    x.flags.writeable = False

    with pytest.raises(EmulationError, match=r"writes_its_input writes to a read-only array: float32, shape \(8,\)"):
        program.run("writes_its_input", [launch])
    assert x.tolist() == [1] * 7 + [0]


def test_a_crash_is_an_error_of_the_launch() -> None:
    with pytest.raises(EmulationError, match=r"crashes \(none\), launch 0 of 1 .*: ended by signal 11"):
        run("crashes", Sanitizer.NONE)
    with pytest.raises(EmulationError, match="SEGV on unknown address"):
        run("crashes", Sanitizer.ADDRESS)


def test_a_kernel_that_never_ends() -> None:
    x = np.ones(4, np.float32)
    launch = Launch(1, 32, 0, (x, x.copy(), np.int32(4)))

    with pytest.raises(EmulationError, match=r"never_ends \(none\), launch 0 of 1 .*: no end after 0.5 s"):
        build(SOURCE, Sanitizer.NONE).run("never_ends", [launch], timeout=0.5)


def test_every_fault_has_a_test() -> None:
    tested = Path(__file__).read_text()

    assert [kernel for kernel in build(SOURCE, Sanitizer.NONE).kernels if not re.search(rf'"{kernel}"', tested)] == []
