"""Choices kept in a file: which problems they serve, what they overrule, and what becomes of a bad file."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import knnpool_gen
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime import tuned
from knnpool_gen.runtime.select import H200, DeviceFacts, Problem, forget_choices, select
from knnpool_gen.runtime.tuned import TunedChoice, read_tuned, tuned_file, write_tuned
from knnpool_gen.vocabulary import Direction, Mode

LABEL = "NVIDIA H200 sm_90"
DEVICE = replace(H200, label=LABEL)
PROBLEM = Problem(Direction.FORWARD, Mode.MAX, "float16", k=9, nin=964, nout=230, rows=512 * 96, need_aux=True)
CHOICE = TunedChoice(
    direction="forward", mode="max", dtype="float16", k=9, nin=964, nout=230, rows=512 * 96,
    variant="knnpool_forward_max_float16_shared_r2", stack=4, threads=128,
    microseconds=40.0, model_microseconds=44.0,
)  # fmt: skip
NO_VARIANT = "there is no variant {variant} for this mode and dtype"
ENDING = "run `knnpool-gen tune` again or remove the file"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "folder" / "tuned.json"
    monkeypatch.setenv("KNNPOOL_TUNED", str(path))
    forget_choices()
    yield path
    forget_choices()


def chosen(problem: Problem = PROBLEM, rs: int | None = None, device: DeviceFacts = DEVICE) -> tuple[str, object, int]:
    """Variant, stack and threads, with no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        configuration = select(problem, device, rs)
    return configuration.kernel.name, dict(configuration.macros).get("KNNPOOL_STACK"), configuration.threads


MODEL = chosen(device=H200)
TUNED = (CHOICE.variant, 4, 128)


def test_the_model_would_choose_otherwise() -> None:
    assert MODEL != TUNED


def test_a_tuned_choice_overrules_the_model_and_rs_overrules_both(file: Path) -> None:
    write_tuned(file, LABEL, [CHOICE])
    assert chosen() == TUNED
    assert chosen(rs=1) == ("knnpool_forward_max_float16_shared_r1", 1, 256)
    assert select(PROBLEM, H200).kernel.name == MODEL[0]  # a device without a name has no tuned choices


def test_the_launch_of_a_tuned_choice_is_whole(file: Path) -> None:
    write_tuned(file, LABEL, [CHOICE])
    configuration = select(PROBLEM, DEVICE)
    macros = dict(configuration.macros)
    assert (macros["KNNPOOL_STACK"], macros["KNNPOOL_THREADS"]) == (4, 128)
    # 965 nodes, rounded up to 968, of 2 rows of 2 bytes, and 4 bytes to the next group of rows; four times.
    assert configuration.shared_bytes == 4 * (968 * 4 + 4)
    # As many blocks as the registers allow: 1024 threads a multiprocessor, in blocks of 128.
    assert configuration.grid == 132 * 8


@pytest.mark.parametrize(
    "other",
    [
        {"direction": Direction.BACKWARD},
        {"mode": Mode.SUM},
        {"dtype": "bfloat16"},
        {"k": 8},
        {"nin": 963},
        {"nout": 231},
        {"rows": 512 * 96 * 2 + 1},
        {"rows": 512 * 48 - 1},
    ],
    ids=str,
)
def test_other_problems_are_left_to_the_model(file: Path, other: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **other)
    without = chosen(problem, device=H200)
    write_tuned(file, LABEL, [CHOICE])
    assert chosen(problem) == without


@pytest.mark.parametrize("other", [{"rows": 512 * 96 * 2}, {"rows": 512 * 48}, {"omit_nan": True, "need_aux": False}])
def test_about_as_many_rows_and_other_options_are_served(file: Path, other: dict[str, Any]) -> None:
    write_tuned(file, LABEL, [CHOICE])
    assert chosen(replace(PROBLEM, **other)) == TUNED


def test_the_nearest_number_of_rows_serves(file: Path) -> None:
    write_tuned(file, LABEL, [CHOICE, replace(CHOICE, rows=1000, threads=64), replace(CHOICE, rows=3000, threads=512)])
    assert [chosen(replace(PROBLEM, rows=rows))[2] for rows in (900, 1700, 1800, 6000)] == [64, 64, 512, 512]


def test_another_device_is_left_to_the_model(file: Path) -> None:
    write_tuned(file, "NVIDIA A100 sm_80", [CHOICE])
    assert chosen() == MODEL


def test_the_file_is_read_once_until_the_caches_are_cleared(file: Path) -> None:
    assert chosen() == MODEL
    write_tuned(file, LABEL, [CHOICE])
    select.cache_clear()
    assert chosen() == MODEL
    knnpool_gen.clear_pool_cache()
    assert chosen() == TUNED


def test_off(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tuned(file, LABEL, [CHOICE])
    monkeypatch.setenv("KNNPOOL_TUNED", "off")
    assert tuned_file() is None
    assert chosen() == MODEL


def test_the_file_without_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KNNPOOL_TUNED", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned_file() == tmp_path / "knnpool-gen" / "tuned.json"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"variant": "knnpool_forward_max_float16_shared_r64"},
            "there is no variant {variant} for this mode and dtype",
        ),
        (
            {"variant": "knnpool_backward_max_float16_shared_r2"},
            "there is no variant {variant} for this mode and dtype",
        ),
        ({"stack": 64}, "{variant} with stack 64 and 128 threads does not fit here"),
        ({"stack": 0}, "{variant} with stack 0 and 128 threads does not fit here"),
        ({"threads": 96}, "{variant} with stack 4 and 96 threads does not fit here"),
    ],
    ids=str,
)
def test_what_cannot_be_launched_is_left_to_the_model(file: Path, change: dict[str, Any], reason: str) -> None:
    choice = replace(CHOICE, **change)
    write_tuned(file, LABEL, [choice])
    with pytest.warns(UserWarning, match="tuned choice ignored") as caught:
        configuration = select(PROBLEM, DEVICE)
    assert configuration.kernel.name == MODEL[0]
    reason = reason.format(variant=choice.variant)
    assert [str(warning.message) for warning in caught] == [f"tuned choice ignored: {reason}; {ENDING}"]


ENTRY = json.loads(json.dumps(CHOICE.__dict__))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "cannot be read: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "is not a file of tuned choices of format 1"),
        ('{"format": 2, "devices": {}}', "is not a file of tuned choices of format 1"),
        ('{"format": 1}', "has no lists of choices under 'devices'"),
        ('{"format": 1, "devices": {"a": 1}}', "has no lists of choices under 'devices'"),
        ('{"format": 1, "devices": {"a": [1]}}', "holds 1 where a choice should be"),
        (json.dumps({"format": 1, "devices": {"a": [ENTRY | {"rows": "1"}]}}), "holds a choice with rows = '1'"),
        (json.dumps({"format": 1, "devices": {"a": [ENTRY | {"stack": True}]}}), "holds a choice with stack = True"),
        (json.dumps({"format": 1, "devices": {"a": [ENTRY | {"k": 1.5}]}}), "holds a choice with k = 1.5"),
    ],
    ids=str,
)
def test_a_damaged_file_costs_one_warning(file: Path, content: str, reason: str) -> None:
    file.parent.mkdir()
    file.write_text(content)
    with pytest.warns(UserWarning, match="tuned choice ignored") as caught:
        configurations = [select(replace(PROBLEM, rows=rows), DEVICE) for rows in (PROBLEM.rows, 7)]
    assert configurations[0].kernel.name == MODEL[0]
    assert [str(warning.message) for warning in caught] == [f"tuned choice ignored: {file} {reason}; {ENDING}"]
    with pytest.raises(InvalidArgumentError):
        write_tuned(file, LABEL, [CHOICE])
    assert file.read_text() == content


def test_a_folder_in_place_of_the_file(file: Path) -> None:
    file.mkdir(parents=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        assert select(PROBLEM, DEVICE).kernel.name == MODEL[0]


def test_choices_are_added_and_replaced(file: Path) -> None:
    backward = replace(CHOICE, direction="backward", variant="knnpool_backward_max_float16_shared_r4")
    write_tuned(file, LABEL, [CHOICE])
    write_tuned(file, "another", [backward])
    write_tuned(file, LABEL, [backward, replace(CHOICE, threads=256)])
    assert read_tuned(file) == {LABEL: (backward, replace(CHOICE, threads=256)), "another": (backward,)}
    assert [path.name for path in file.parent.iterdir()] == ["tuned.json"]


def test_a_folder_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tuned.tempfile, "mkstemp", refuse)
    with pytest.raises(InvalidArgumentError, match=r"Permission denied; set KNNPOOL_TUNED to another file$"):
        write_tuned(file, LABEL, [CHOICE])


def test_labels() -> None:
    assert tuned.device_label("NVIDIA H200", (9, 0)) == LABEL
