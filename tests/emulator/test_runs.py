"""A clean kernel: shapes that change from launch to launch, and what the child process gives back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from knnpool_gen.emulator import EmulationError, Launch, Program, Sanitizer, build

KERNELS = Path(__file__).parent / "kernels"
PARAMETERS = ("K", "NIN", "NOUT", "THREADS")


def sum_tiles(
    rows: int, k: int, nin: int, nout: int, threads: int, grid: int, **options: int
) -> tuple[Launch, np.ndarray]:
    """A launch of the kernel and the sums that it must give."""
    rng = np.random.default_rng(rows * nin + k)
    x = rng.standard_normal((rows, nin)).astype(np.float32)
    indices = rng.integers(0, nin + 1, (k, nout)).astype(np.int32)
    padded = np.concatenate([x, np.zeros((rows, 1), np.float32)], axis=1)
    expected = np.zeros((rows, nout), np.float32)
    for column in indices:
        expected += padded[:, column]
    arguments = (x, indices, np.full((rows, nout), np.nan, np.float32), np.zeros(1, np.uint32), np.int64(rows))
    parameters = {"K": k, "NIN": nin, "NOUT": nout, "THREADS": threads}
    return Launch(grid, threads, 4 * ((nin + 3) // 4 * 4), arguments, parameters, **options), expected


@pytest.fixture(scope="module", params=Sanitizer, ids=lambda sanitizer: sanitizer.value)
def program(request: pytest.FixtureRequest) -> Program:
    return build(KERNELS / "tiles.cu", request.param, parameters=PARAMETERS)


@pytest.fixture(scope="module")
def plain() -> Program:
    return build(KERNELS / "tiles.cu", Sanitizer.NONE, parameters=PARAMETERS)


def test_one_build_runs_every_shape(program: Program) -> None:
    cases = [
        sum_tiles(rows=5, k=3, nin=16, nout=8, threads=32, grid=2),
        sum_tiles(rows=7, k=1, nin=37, nout=45, threads=64, grid=3, concurrent=3),
        sum_tiles(rows=1, k=9, nin=37, nout=70, threads=48, grid=4, reverse=True),
        sum_tiles(rows=6, k=12, nin=4, nout=1, threads=64, grid=2, reverse=True, concurrent=2),
    ]

    program.run("sum_tiles", [launch for launch, _ in cases])

    for launch, expected in cases:
        np.testing.assert_array_equal(launch.arguments[2], expected)
        np.testing.assert_array_equal(launch.arguments[3], [len(expected)])


def test_arrays_may_begin_anywhere_that_suits_their_type(program: Program) -> None:
    launch, expected = sum_tiles(rows=3, k=2, nin=7, nout=5, threads=32, grid=2, misalign=4)

    program.run("sum_tiles", [launch])

    np.testing.assert_array_equal(launch.arguments[2], expected)


def test_launches_share_an_array_that_is_given_twice(plain: Program) -> None:
    first, expected = sum_tiles(rows=3, k=2, nin=8, nout=8, threads=32, grid=1)
    x, indices, y, tiles, rows = first.arguments
    z = np.zeros_like(y)
    second = Launch(1, 32, 32, (y, indices, z, tiles, rows), first.parameters)

    plain.run("sum_tiles", [first, second])

    np.testing.assert_array_equal(y, expected)
    padded = np.concatenate([expected, np.zeros((3, 1), np.float32)], axis=1)
    np.testing.assert_array_equal(z, padded[:, indices[0]] + padded[:, indices[1]])
    np.testing.assert_array_equal(tiles, [6])
    assert not np.shares_memory(x, y)


def test_denormals_are_kept(program: Program) -> None:
    tiny = np.float32(1e-42)
    x = np.array([[tiny, 2 * tiny, 0, -tiny]], np.float32)
    y = np.zeros((1, 1), np.float32)
    indices = np.array([[0], [1]], np.int32)
    parameters = {"K": 2, "NIN": 4, "NOUT": 1, "THREADS": 32}

    program.run("sum_tiles", [Launch(1, 32, 16, (x, indices, y, np.zeros(1, np.uint32), np.int64(1)), parameters)])

    assert y[0, 0] == tiny + 2 * tiny > 0


def test_an_empty_array_is_a_pointer_to_nothing(program: Program) -> None:
    empty = np.empty(0, np.float32)
    parameters = {"K": 1, "NIN": 4, "NOUT": 4, "THREADS": 32}
    arguments = (empty, np.zeros((1, 4), np.int32), empty, np.zeros(1, np.uint32), np.int64(0))

    program.run("sum_tiles", [Launch(2, 32, 16, arguments, parameters)])

    np.testing.assert_array_equal(arguments[3], [0])


def test_nothing_to_run(plain: Program) -> None:
    plain.run("sum_tiles", [])


def test_a_program_knows_its_kernels() -> None:
    program = build(KERNELS / "faults.cu", Sanitizer.NONE)

    assert program.kernels[:2] == ("reads_past_the_end", "reads_before_the_start")
    with pytest.raises(EmulationError, match=r"faults\.cu has no kernel sum; it has reads_past_the_end, "):
        program.run("sum", [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": 0}, "launch 0 of sum_tiles: grid is 0, not 1 to"),
        ({"block": 1025}, "block is 1025, not 1 to 1024"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared_bytes is 232449, not 0 to 232448"),
        ({"concurrent": 0}, "concurrent is 0"),
        ({"misalign": -1}, "misalign is -1"),
        ({"parameters": {"K": 1}}, "parameters given: K; needed: K, NIN, NOUT, THREADS"),
        ({"parameters": {"K": 2**31, "NIN": 1, "NOUT": 1, "THREADS": 1}}, "K=2147483648 does not fit"),
        ({"arguments": (1, 2)}, "argument 0 is neither a numpy array nor a numpy scalar"),
        ({"arguments": (np.zeros((4, 4))[:, 1],)}, "argument 0 is an array that is not contiguous"),
        ({"arguments": (np.zeros(4),)}, "sum_tiles takes 5 arguments"),
        ({"arguments": (np.int64(4),) * 5}, "argument 0 of sum_tiles is a pointer"),
        ({"arguments": (np.zeros(4),) * 5}, "argument 4 of sum_tiles is no pointer"),
        ({"arguments": (np.zeros(4),) * 4 + (np.int32(1),)}, "argument 4 of sum_tiles has 8 bytes, not 4"),
        ({"block": 64}, r"a block of 64 threads exceeds __launch_bounds__\(32\)"),
    ],
)
def test_wrong_launches_are_refused(plain: Program, change: dict[str, object], message: str) -> None:
    good, _ = sum_tiles(rows=1, k=1, nin=4, nout=4, threads=32, grid=1)
    facts = {name: getattr(good, name) for name in ("grid", "block", "shared_bytes", "arguments", "parameters")}

    with pytest.raises(EmulationError, match=message):
        plain.run("sum_tiles", [Launch(**{**facts, **change})])  # type: ignore[arg-type]


def test_a_failure_names_its_launch(plain: Program) -> None:
    good, _ = sum_tiles(rows=1, k=1, nin=4, nout=4, threads=32, grid=1)
    bad = Launch(2, 64, 16, good.arguments, good.parameters)

    with pytest.raises(
        EmulationError,
        match=r"tiles\.cu: sum_tiles \(none\), launch 1 of 2 \(grid 2, block 64, 16 bytes shared, K=1, NIN=4, ",
    ):
        plain.run("sum_tiles", [good, bad])
    assert np.isnan(good.arguments[2]).all(), "nothing is written back after a failure"
