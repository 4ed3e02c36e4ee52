"""Recordings: to JSON and back, into numbers, tables, lines and pictures."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from knnpool_gen.bench import plots, report
from knnpool_gen.bench.plots import PICTURES, write_plots
from knnpool_gen.bench.record import Recording, VariantResult, VariantTime, read_recording, write_recording
from knnpool_gen.bench.regret import Regret, regrets
from knnpool_gen.bench.summary import Headline, Mean, Slower, summarize
from knnpool_gen.errors import InvalidArgumentError, MissingDependencyError
from knnpool_gen.vocabulary import Direction
from measurements import MACHINE, case, recording, result

FORWARD, BACKWARD = Direction


def test_to_json_and_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    write_recording(recording(), path)
    assert read_recording(path) == recording()
    content = json.loads(path.read_text())
    assert content["format"] == 1
    first = content["cases"][0]
    assert (first["case"]["mode"], first["times"]["ours"]["median"]) == ("max", 40.0)
    assert content["cases"][1]["times"]["torch"] is None
    assert [item.name for item in path.parent.iterdir()] == ["r.json"]


def test_nothing_measured(tmp_path: Path) -> None:
    empty = Recording(MACHINE, {}, "2026-01-01T00:00:00+00:00")
    write_recording(empty, tmp_path / "r.json")
    assert read_recording(tmp_path / "r.json") == empty
    assert list(report.tables(empty)) == []
    assert list(report.lines(empty)) == []
    assert write_plots(empty, tmp_path / "plots") == []


@pytest.mark.parametrize("change", ["", "[]", '{"format": 2}', '{"format": 1}', '{"format": 1, "machine": {}}'])
def test_files_that_are_no_recordings(tmp_path: Path, change: str) -> None:
    (tmp_path / "r.json").write_text(change)
    with pytest.raises(InvalidArgumentError, match=r"r\.json (cannot be read|is not a recording of format 1)"):
        read_recording(tmp_path / "r.json")


def test_recordings_with_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_recording(recording(), path)
    whole = path.read_text()
    for old, new in (('"max"', '"maximum"'), ('"median"', '"mean"'), ('"batch": 512,', ""), ('"date"', '"day"')):
        assert old in whole
        path.write_text(whole.replace(old, new, 1))
        with pytest.raises(InvalidArgumentError, match="is not a recording of format 1"):
            read_recording(path)


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match="cannot be written"):
        write_recording(recording(), tmp_path / "file" / "r.json")


def test_summary() -> None:
    """Ratios by hand: forward 120 / 40 and 30 / 10 are 3 and 3, 800 / 40 and 50 / 10 are 20 and 5."""
    found = summarize(recording().cases)
    assert found.headlines == (
        Headline(FORWARD, 40.0, {"copy": 0.9, "fovi": 3.0, "torch": 20.0, "compile": 6.0}),
        Headline(BACKWARD, 50.0, {"copy": 0.8, "fovi": 0.8}),
    )
    means = {(mean.direction, mean.peer): mean for mean in found.means}
    assert means[FORWARD, "fovi"] == Mean(FORWARD, "fovi", pytest.approx(3.0), 3.0, 2)
    assert means[FORWARD, "torch"] == Mean(FORWARD, "torch", pytest.approx(10.0), 5.0, 2)
    assert means[FORWARD, "copy"] == Mean(FORWARD, "copy", pytest.approx(0.3), 0.1, 2)
    assert means[BACKWARD, "fovi"] == Mean(BACKWARD, "fovi", pytest.approx(0.8), 0.8, 1)
    assert (BACKWARD, "torch") not in means
    assert found.slower == (Slower("alexnet64_pool0 512x96 float16 max backward", "fovi", 0.8),)
    assert found.failed == ("small 512x96 float16 max forward: not today",)


def test_the_worst_come_first() -> None:
    cases = [result(case(f"t{fovi}"), ours=10.0, fovi=float(fovi), compile=5.0) for fovi in (9, 7, 11)]
    assert [(item.case.split()[0], item.peer) for item in summarize(cases).slower] == [
        *((f"t{fovi}", "compile") for fovi in (9, 7, 11)),
        ("t7", "fovi"),
        ("t9", "fovi"),
    ]


def test_a_report_in_words() -> None:
    assert list(report.lines(recording())) == [
        "alexp0 forward: 40.0 µs, 0.90 of the copy, 3.0x fovi, 20.0x torch, 6.0x compile",
        "alexp0 backward: 50.0 µs, 0.80 of the copy, 0.8x fovi",
        "forward: 0.30 of the copy (geometric mean of 2 cases, 0.10 at worst)",
        "forward: 3.00 times as fast as fovi (geometric mean of 2 cases, 3.00 at worst)",
        "forward: 10.00 times as fast as torch (geometric mean of 2 cases, 5.00 at worst)",
        "forward: 6.00 times as fast as compile (geometric mean of 1 cases, 6.00 at worst)",
        "backward: 0.80 of the copy (geometric mean of 1 cases, 0.80 at worst)",
        "backward: 0.80 times as fast as fovi (geometric mean of 1 cases, 0.80 at worst)",
        "slower than a peer: 1 time(s)",
        "  alexnet64_pool0 512x96 float16 max backward: 0.80x fovi",
        "FAILED small 512x96 float16 max forward: not today",
        "torch left out of 1 case(s): not today",
        "host, forward: 12.5 µs, 0.50 of fovi's 25.0",
        "the chosen variant is within 5% of the best in 0 of 1 cases",
        "  alexnet64_pool0 512x96 float16 max forward: r8, stack 1, 256 threads is 10% slower than r4, stack 2, "
        "128 threads",
        "2 case(s) left out for want of time",
    ]


def test_a_report_in_tables() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    for table in report.tables(recording()):
        console.print(table)
    rows = [line.split() for line in console.export_text().splitlines()]
    shown = "alexnet64_pool0 512x96 float16 max forward forward_max_float16_shared_r8 40.0 ± 4.0 0.90 3.00 20.00 6.00"
    assert shown.split() in rows
    assert ["forward", "12.50", "25.00"] in rows
    assert any(row[-2:] == ["300", "(2.5)"] for row in rows)


def test_pictures(tmp_path: Path) -> None:
    written = write_plots(recording(), tmp_path / "new")
    assert [path.stem for path in written] == list(PICTURES)
    assert all(path.read_bytes().startswith(b"\x89PNG\r\n") for path in written)


def test_points_of_a_picture() -> None:
    figure = PICTURES["copy_fraction"](recording().cases)
    assert figure is not None
    (axes,) = figure.axes
    forward, backward = (points.get_offsets().tolist() for points in axes.collections)
    assert forward == [[0.9, 0], [0.1, 1]]
    assert backward == [[0.8, 0]]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["alexnet64_pool0 512x96 float16 max", "alexnet64_pool0 8x96 float16 max"]


def test_growth() -> None:
    for name, sizes in (("growth_batch", [8, 512]), ("growth_nin", [16, 64]), ("growth_k", [16, 64])):
        figure = PICTURES[name](recording().cases)
        assert figure is not None
        first = figure.axes[0].get_lines()[0]
        assert (list(first.get_xdata()), name) == (sizes, name)
    assert PICTURES["growth_k"](recording().cases[:4]) is None
    assert PICTURES["growth_batch"](recording().cases[:2]) is None
    assert PICTURES["versus_compile"](recording().cases[1:]) is None


def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'knnpool-gen\[bench\]'$"):
        write_plots(recording(), tmp_path)


# Regret.

A, B, C = VariantTime("a", 1, 256, 30.0), VariantTime("b", 2, 128, 24.0), VariantTime("b", 1, 256, 48.0)
MEASURED = (
    VariantResult(case("first"), A, (A, B, C)),
    VariantResult(case("second"), A, (A, replace(B, microseconds=60.0), C)),
)


def test_regret_of_the_recorded_choice() -> None:
    first, second = regrets(MEASURED)
    assert first == Regret(
        "first 512x96 float16 max forward",
        "a, stack 1, 256 threads",
        "b, stack 2, 128 threads",
        pytest.approx(0.25),
        pytest.approx(6.0),
    )
    assert (second.case.split()[0], second.share) == ("second", 0)


def test_regret_of_another_choice() -> None:
    """Twice as slow in the first case, 60 % slower in the second."""
    found = regrets(MEASURED, lambda case: ("b", 1, 256))
    assert [(item.case.split()[0], item.share) for item in found] == [
        ("first", pytest.approx(1.0)),
        ("second", pytest.approx(0.6)),
    ]


def test_a_choice_that_was_not_measured() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        regrets(MEASURED, lambda case: ("b", 4, 256))
    assert str(caught.value) == (
        "first 512x96 float16 max forward: b with stack 4 and 256 threads was not measured; "
        "record again with `knnpool-gen bench --variants`"
    )
