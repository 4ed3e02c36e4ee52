"""YAML values with positions: what they hold, and where faults are said to stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from knnpool_gen.codegen.faults import Faults
from knnpool_gen.codegen.yaml_source import Value, read_yaml
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


# --- files that nobody writes on purpose


@pytest.mark.parametrize(
    "text", ["[" * 10_000, "".join(f"{' ' * depth}a:\n" for depth in range(2000))], ids=["[", "a:"]
)
def test_a_file_that_is_nested_too_deeply(tmp_path: Path, faults: Faults, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml", faults) is None
    assert messages(faults) == ["1: lists or mappings are nested too deeply to be read"]


def test_an_integer_that_python_does_not_read(tmp_path: Path, faults: Faults) -> None:
    assert read(tmp_path, "9" * 5000, faults).integer("it") is None
    assert messages(faults) == [f"1: it must be an integer, not {'9' * 100!r}..."]


def test_long_texts_are_cut(tmp_path: Path, faults: Faults) -> None:
    value = read(tmp_path, f"{'k' * 101}: {'v' * 101}\n? {'k' * 101}\n: {'v' * 100}\n", faults)
    assert value.mapping("it", ("a",)) == {}
    entries = value.mapping("it")
    assert entries is not None
    (entry,) = entries.values()
    entry.word("word", {"a": 1})
    assert messages(faults) == [
        f"1: unknown key {'k' * 100!r}... in it; allowed: a",
        f"1: unknown word {'v' * 100!r}...; allowed: a",
        f"2: duplicate key {'k' * 100!r}... in it; it stands in line 1 already",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n---\nb: 1\n", "2: not YAML: expected a single document in the stream, but found another document"),
        ("a: &x 1\nb: &x 2\n", "2: not YAML: found duplicate anchor 'x'; first occurrence, second occurrence"),
        ("a: *x\n", "1: not YAML: found undefined alias 'x'"),
    ],
)
def test_what_yaml_refuses_is_said_in_full(tmp_path: Path, faults: Faults, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert read_yaml(tmp_path / "a.yaml", faults) is None
    assert messages(faults) == [message]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("!mine [1]", "a list tagged '!mine'"),
        ("!mine {a: 1}", "a mapping tagged '!mine'"),
        ("!!set {a, b}", "a mapping tagged 'tag:yaml.org,2002:set'"),
        ("!!python/tuple [1]", "a list tagged 'tag:yaml.org,2002:python/tuple'"),
        ("!!python/object/apply:os._exit [3]", "a list tagged 'tag:yaml.org,2002:python/object/apply:os._exit'"),
    ],
)
def test_tags_are_neither_followed_nor_ignored(tmp_path: Path, faults: Faults, text: str, kind: str) -> None:
    value = read(tmp_path, text, faults)
    assert value.mapping("it") is None
    assert value.items("it") is None
    assert messages(faults) == [f"1: it must be a list, not {kind}", f"1: it must be a mapping, not {kind}"]


def test_keys_are_words(tmp_path: Path, faults: Faults) -> None:
    assert read(tmp_path, "? [a, b]\n: 1\n? {c: d}\n: 2\n", faults).mapping("it") == {}
    assert messages(faults) == [
        "1: a key of it must be a word, not a list",
        "3: a key of it must be a word, not a mapping",
    ]


def test_an_alias_reads_like_what_it_stands_for(tmp_path: Path, faults: Faults) -> None:
    fields = read(tmp_path, "a: &x [1, 2]\nb: *x\n", faults).fields("it", ("a", "b"))
    assert fields is not None
    assert [[item.integer("n") for item in fields[name].items(name) or ()] for name in "ab"] == [[1, 2], [1, 2]]
    faults.raise_if_any()
    fields["b"].integer("b")
    assert messages(faults) == ["2: b must be an integer, not a list"]


def test_aliases_that_contain_themselves_or_grow_without_bound(tmp_path: Path, faults: Faults) -> None:
    (value,) = read(tmp_path, "&x [*x]", faults).items("it") or ()
    assert value.integer("it") is None
    growing = "".join(
        f"{name}: &{name} [*{last}, *{last}, *{last}]\n"
        for last, name in zip("abcdefghijklmnopqrstuv", "bcdefghijklmnopqrstuvw", strict=True)
    )
    entries = read(tmp_path, f"a: &a [1]\n{growing}", faults).mapping("it")
    assert entries is not None
    assert len(entries) == 23
    assert messages(faults) == ["1: it must be an integer, not a list"]


def test_merge_keys_merge_nothing(tmp_path: Path, faults: Faults) -> None:
    """Everything an entry says is written there."""
    fields = read(tmp_path, "a: &x {b: 1}\nc:\n  <<: *x\n", faults).fields("it", ("a", "c"))
    assert fields is not None
    fields["c"].fields("c", ("b",))
    assert messages(faults) == ["2: c lacks the key 'b'", "3: unknown key '<<' in c; allowed: b"]


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path, faults: Faults) -> None:
    assert read(tmp_path, "\ufeffa: 1\n", faults).fields("it", ("a",)) is not None
    faults.raise_if_any()
