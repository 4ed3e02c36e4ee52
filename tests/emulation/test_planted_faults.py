"""The checks themselves: faults planted into a generated source must be found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from knnpool_gen.emulator import Sanitizer
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.runtime import compile
from knnpool_gen.verification import calls, emulated, verify_kernel
from knnpool_gen.verification.tables import small_tables
from knnpool_gen.vocabulary import Direction, Mode, Staging

KEY = KernelKey(Direction.FORWARD, Mode.MAX, "float16", Staging.SHARED, 8)
KERNEL = KERNELS[KEY]


@pytest.fixture
def faults_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, Sanitizer], tuple[str, ...]]:
    """Replaces a piece of the source and returns what verification then finds."""

    def run(sound: str, faulty: str, sanitizer: Sanitizer) -> tuple[str, ...]:
        source = compile.read_source(KERNEL)
        assert source.count(sound) == 1
        (tmp_path / "cuda").mkdir(exist_ok=True)
        (tmp_path / KERNEL.file).write_text(source.replace(sound, faulty))
        monkeypatch.setattr(emulated, "GENERATED", tmp_path)
        tables = [table for table in small_tables() if table.name in ("pads", "odd_sizes")]
        given = list(calls(KEY, tables, rows=[2 * KEY.rows + 3]))
        return verify_kernel(KEY, KERNEL, emulated.EmulatedBackend(sanitizer), given).faults

    return run


READS_PAST_THE_END = ("ROWS * s + r < live ? from[r * (nodes / VECTOR)]", "true ? from[r * (nodes / VECTOR)]")
NO_FIRST_BARRIER = ("__syncthreads();  // the tile is complete", "")
NO_LAST_BARRIER = ("__syncthreads();  // nobody reads the tile any more", "")
LATER_TIES_WIN = ("? greater(node.word[w], best[w])", "? ~greater(best[w], node.word[w])")


def test_reads_past_the_last_row_are_found(faults_of) -> None:
    (fault,) = faults_of(*READS_PAST_THE_END, Sanitizer.ADDRESS)
    assert "heap-buffer-overflow" in fault
    assert f"{KERNEL.name}.cu:" in fault


def test_writes_past_the_tile_are_found(faults_of) -> None:
    (fault,) = faults_of(
        "tile[p * room + position(node, VECTOR)] = piece;",
        "tile[p * room + position(node, VECTOR) + 8] = piece;",
        Sanitizer.ADDRESS,
    )
    assert "heap-buffer-overflow" in fault
    assert f"{KERNEL.name}.cu:" in fault


@pytest.mark.parametrize("barrier", [NO_FIRST_BARRIER, NO_LAST_BARRIER], ids=["first", "last"])
def test_missing_barriers_are_found(faults_of, barrier: tuple[str, str]) -> None:
    (fault,) = faults_of(*barrier, Sanitizer.THREAD)
    assert "data race" in fault
    assert f"{KERNEL.name}.cu:" in fault


def test_wrong_answers_are_found(faults_of) -> None:
    faults = faults_of(*LATER_TIES_WIN, Sanitizer.NONE)
    assert any("aux" in fault and "elements differ" in fault for fault in faults)


def test_the_sound_source_has_no_faults(faults_of) -> None:
    assert faults_of(NO_LAST_BARRIER[0], NO_LAST_BARRIER[0], Sanitizer.NONE) == ()
