"""Which cases there are, and how many bytes they must move."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from knnpool_gen import folders
from knnpool_gen.bench.cases import (
    HEADLINES,
    Group,
    Selection,
    compiled_cases,
    odd_cases,
    standard_cases,
    tuned_cases,
    variant_cases,
)
from knnpool_gen.bench.tables import (
    BenchTable,
    global_table,
    growing_k,
    growing_nin,
    load_table,
    load_tables,
    made_table,
    named,
    odd_tables,
)
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Direction, Mode
from measurements import case


def real() -> list[BenchTable]:
    path = folders.real_tables()
    assert path is not None
    return load_tables(path)


def standard(selection: Selection) -> list[str]:
    cases = standard_cases(real(), odd_tables(), growing_nin(), growing_k(), selection)
    assert len(set(cases)) == len(cases)
    return [item.name for item in cases]


def test_the_real_tables_are_those_of_the_checkout() -> None:
    facts = [(table.name, table.k, table.nin, table.nout, table.mode.value, table.channels) for table in real()]
    assert facts == [
        ("alexnet64_pool0", 9, 964, 230, "max", 96),
        ("alexnet64_pool1", 9, 230, 60, "max", 256),
        ("alexnet64_pool4", 9, 60, 16, "max", 256),
        ("alexnet64_out", 16, 16, 1, "avg", 256),
        ("alexnet256_pool0", 9, 16183, 4085, "max", 96),
        ("alexnet256_out", 230, 230, 1, "avg", 256),
        ("sampler64", 9, 54326, 5977, "weighted", 3),
    ]
    weighted = [table for table in real() if table.weights is not None]
    assert [(table.name, tuple(table.weights.shape)) for table in weighted] == [("sampler64", (9, 5977))]


def test_a_run_begins_with_the_headline_and_ends_with_other_dtypes() -> None:
    names = standard(Selection())
    assert names[:2] == [item.name for item in HEADLINES]
    assert names[0] == "alexnet64_pool0 512x96 float16 max forward"
    # 7 tables, 4 batches, 3 dtypes, both ways; alexp0 in 3 more modes; 2 odd tables in 2 modes; 6 + 7 growing.
    assert len(names) == 7 * 4 * 3 * 2 + 3 * 2 + 2 * 2 * 2 + 13 * 2
    assert all(" float32 " in name or " bfloat16 " in name for name in names[-7 * 4 * 2 * 2 :])
    assert not any(" float32 " in name or " bfloat16 " in name for name in names[: -7 * 4 * 2 * 2])


@pytest.mark.parametrize(
    ("selection", "count"),
    [
        (Selection(quick=True), 7 * 2 + 3 * 2),
        (Selection(quick=True, dtypes=("float32", "float64"), modes=(Mode.AVG,)), 7 * 2 * 2),
        (Selection(batches=(3,)), 7 * 3 * 2 + 3 * 2 + 2 * 2 * 2),
        (Selection(directions=(Direction.BACKWARD,)), 7 * 4 * 3 + 3 + 2 * 2 + 13),
    ],
    ids=str,
)
def test_selections(selection: Selection, count: int) -> None:
    names = standard(selection)
    assert len(names) == count
    assert all(name.endswith("backward") for name in names) == (selection.directions == (Direction.BACKWARD,))
    for wanted, words in ((selection.batches, [f" {batch}x" for batch in selection.batches]),
                          (selection.dtypes, [f" {dtype} " for dtype in selection.dtypes]),
                          (selection.modes, [f" {mode.value} " for mode in selection.modes])):  # fmt: skip
        assert not wanted or all(any(word in name for word in words) for name in names)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"dtypes": ("float16", "int8")}, "no dtype int8; there are float16, bfloat16, float32, float64"),
        ({"batches": (4, 0)}, "batch 0: at least 1 is measured"),
    ],
    ids=str,
)
def test_what_cannot_be_selected(facts: dict[str, tuple[object, ...]], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Selection(**facts)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_torch_compile_is_measured_once_a_table_and_direction() -> None:
    cases = standard_cases(real(), odd_tables(), growing_nin(), growing_k(), Selection())
    chosen = compiled_cases(cases)
    assert len(chosen) == 7 * 2 + 2 * 2 * 2
    assert set(HEADLINES) <= chosen
    assert {item.dtype for item in chosen} == {"float16"}
    assert not {item.group for item in chosen} & {Group.NIN, Group.K}


def test_odd_inputs_are_of_bounded_size() -> None:
    cases = odd_cases(odd_tables(), Selection())
    assert {(item.table, item.batch) for item in cases} == {("global1000", 512), ("long166716", 3)}
    assert all(item.rows * item.nin <= 1 << 25 for item in cases)


def test_cases_for_variants_and_tuning() -> None:
    assert len(variant_cases(real(), Selection())) == 7 * 2 * 2 * 2
    assert len(variant_cases(real(), Selection(quick=True))) == 7 * 2
    table = made_table("t", 20, 6, 3, Mode.SUM)
    cases = tuned_cases(table, Selection(batches=(7, 9), dtypes=("float32",)))
    assert [(item.rows, item.channels, item.mode, item.direction) for item in cases] == [
        (rows, 1, Mode.SUM, direction) for rows in (7, 9) for direction in Direction
    ]


def test_bytes_of_alexp0() -> None:
    rows = 49152
    assert case().traffic == rows * (964 * 2 + 230 * 2 + 230)
    assert case(direction=Direction.BACKWARD).traffic == case().traffic
    assert case(mode=Mode.AVG).traffic == 117_374_976
    assert case(dtype="float32").traffic == rows * (964 * 4 + 230 * 4 + 230)
    assert case().gathered == rows * 9 * 230 * 2
    assert [case(k=k).traffic - case(mode=Mode.SUM).traffic for k in (255, 256, 32767, 32768)] == [
        rows * 230 * slot for slot in (1, 2, 2, 4)
    ]


def test_made_tables() -> None:
    table = made_table("t", 100, 40, 5)
    assert (table.k, table.nin, table.nout) == (5, 100, 40)
    assert 0 < int((table.indices == 100).sum()) < 40
    assert int(table.indices.min()) >= 0
    assert torch.equal(table.indices, made_table("t", 100, 40, 5).indices)
    assert global_table("g", 3, Mode.AVG).indices.tolist() == [[0], [1], [2]]
    assert made_table("one", 1, 1, 1).indices.shape == (1, 1)
    for growing in (growing_nin(), growing_k()):
        assert [(table.nin, table.nout, table.k) for table in growing] == sorted(
            (table.nin, table.nout, table.k) for table in growing
        )


def test_tables_of_files(tmp_path) -> None:
    table = np.array([[0, 1], [2, 3]])
    np.savez(tmp_path / "t.npz", a__nin3__max=table, b__nin4__gaussian=table, b__weights=table * 0.5, other=table)
    a, b = load_tables(tmp_path / "t.npz")
    assert (a.name, a.nin, a.mode, a.channels, a.weights) == ("a", 3, Mode.MAX, 64, None)
    assert (b.name, b.nin, b.mode) == ("b", 4, Mode.WEIGHTED)
    assert b.weights is not None
    assert b.weights.tolist() == [[0, 0.5], [1, 1.5]]

    np.save(tmp_path / "t.npy", table.astype(np.uint16))
    (single,) = load_table(tmp_path / "t.npy", 3, Mode.SUM)
    assert (single.name, single.nin, single.mode, single.indices.tolist()) == ("t", 3, Mode.SUM, table.tolist())
    assert [item.name for item in load_table(tmp_path / "t.npz", None, Mode.MAX)] == ["a", "b"]
    assert [item.name for item in named([a, b], ["b"])] == ["b"]
    assert named([a, b], []) == [a, b]


def test_files_that_hold_no_table(tmp_path) -> None:
    np.savez(tmp_path / "none.npz", weights=np.zeros((2, 2)))
    np.savez(tmp_path / "real.npz", a__nin3__max=np.zeros((2, 2)))
    np.savez(tmp_path / "mode.npz", a__nin3__median=np.zeros((2, 2), int))
    np.save(tmp_path / "real.npy", np.zeros((2, 2)))
    np.save(tmp_path / "flat.npy", np.zeros(2, int))
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "text.npy").write_text("text")
    for name, message in {
        "none.npz": "holds no array named NAME__ninNIN__MODE",
        "real.npz": "a__nin3__max is not an integer table",
        "mode.npz": "a__nin3__median is not an integer table",
        "real.npy": r"holds float64 \[2, 2\], not an integer table",
        "flat.npy": r"holds int64 \[2\], not an integer table",
        "text.npz": "cannot be read as .npz",
        "text.npy": "cannot be read as .npy",
        "missing.npz": "cannot be read as .npz",
    }.items():
        with pytest.raises(InvalidArgumentError, match=message):
            load_table(tmp_path / name, 3, Mode.MAX)
    with pytest.raises(InvalidArgumentError, match=r"give --nin$"):
        load_table(tmp_path / "flat.npy", None, Mode.MAX)
    with pytest.raises(InvalidArgumentError, match=r"^no table x, y; there are a, b$"):
        named([replace(made_table("a", 3, 2, 1)), made_table("b", 3, 2, 1)], ["x", "a", "y"])
