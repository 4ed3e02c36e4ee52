"""YAML values with positions: what they hold, and where faults are said to stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from knnpool_gen.codegen.yaml_source import Faults, Value, read_yaml
from knnpool_gen.errors import SpecError


@pytest.fixture
def faults() -> Faults:
    return Faults()


def read(folder: Path, text: str, faults: Faults) -> Value:
    (folder / "a.yaml").write_bytes(text.encode())
    value = read_yaml(folder / "a.yaml", faults)
    assert value is not None
    return value


def messages(faults: Faults) -> list[str]:
    with pytest.raises(SpecError) as caught:
        faults.raise_if_any()
    return [line.partition("a.yaml:")[2] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("-3", -3), ("16", 16)])
def test_integers(tmp_path: Path, faults: Faults, text: str, number: int) -> None:
    assert read(tmp_path, text, faults).integer("it") == number
    faults.raise_if_any()


@pytest.mark.parametrize("text", ["010", "1:30", "1_000", "0x10", "0b1", "+1", "true", "1.0", "!!int abc"])
def test_what_is_no_plain_integer(tmp_path: Path, faults: Faults, text: str) -> None:
    assert read(tmp_path, text, faults).integer("it") is None
    assert messages(faults) == [f"1: it must be an integer, not {text.split()[-1]!r}"]


def test_a_quoted_number_is_called_a_string(tmp_path: Path, faults: Faults) -> None:
    assert read(tmp_path, '"8"', faults).integer("it") is None
    assert messages(faults) == ["1: it must be an integer, not the string '8'"]


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False)])
def test_booleans(tmp_path: Path, faults: Faults, text: str, value: bool) -> None:
    assert read(tmp_path, text, faults).boolean("it") is value
    faults.raise_if_any()


@pytest.mark.parametrize("text", ["yes", "off", "1", "!!bool maybe"])
def test_what_is_no_boolean(tmp_path: Path, faults: Faults, text: str) -> None:
    assert read(tmp_path, text, faults).boolean("it") is None
    assert messages(faults) == [f"1: it must be true or false, not {text.split()[-1]!r}"]


def test_a_value_stands_where_its_key_does(tmp_path: Path, faults: Faults) -> None:
    fields = read(tmp_path, "# comment\nfirst:\n  # comment\n  x: 1\n\nsecond:\n\n  - 1\n", faults).fields(
        "it", ("first", "second")
    )
    assert fields is not None
    fields["first"].fields("first", ("x", "y"))
    fields["second"].integer("second")
    assert messages(faults) == ["2: first lacks the key 'y'", "6: second must be an integer, not a list"]


def test_a_character_that_yaml_does_not_allow(tmp_path: Path, faults: Faults) -> None:
    (tmp_path / "a.yaml").write_bytes(b"x: 1\ny: \x00\n")
    assert read_yaml(tmp_path / "a.yaml", faults) is None
    assert messages(faults) == ["2: not YAML: character '\\x00' is not allowed"]
