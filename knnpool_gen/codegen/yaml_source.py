"""YAML with positions: values that know their file and line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import yaml

from knnpool_gen.codegen.faults import Faults, Place

T = TypeVar("T")

BOOLEANS = {"true": True, "false": False}
MAPPING = "tag:yaml.org,2002:map"
LIST = "tag:yaml.org,2002:seq"
LONGEST = 100
"""Characters of a value that messages show."""


@dataclass(frozen=True)
class Value(Place):
    """A node of a YAML file. Wrong types are noted as faults and read as None."""

    node: yaml.Node | None
    faults: Faults

    def mapping(self, what: str, allowed: Iterable[str] | None = None) -> dict[Key, Value] | None:
        """Keys and values; keys that are not ``allowed``, or stand twice, are faults."""
        if not isinstance(self.node, yaml.MappingNode) or self.node.tag != MAPPING:
            self.fault(f"{what} must be a mapping, not {self._kind()}")
            return None
        allowed = None if allowed is None else sorted(allowed)
        result: dict[Key, Value] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in self.node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                key_at = self._at(key_node)
                key_at.fault(f"a key of {what} must be a word, not {key_at._kind()}")
                continue
            key = Key(key_node.value, self._at(key_node))
            if key.name in lines:
                first = lines[key.name]
                key.at.fault(f"duplicate key {_shown(key.name)} in {what}; it stands in line {first} already")
            elif allowed is not None and key.name not in allowed:
                key.at.fault(f"unknown key {_shown(key.name)} in {what}; allowed: {', '.join(allowed)}")
            else:
                result[key] = replace(self._at(value_node), line=key.at.line)
            lines.setdefault(key.name, key.at.line)
        return result

    def fields(self, what: str, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Value] | None:
        """The values of a mapping with fixed keys. A required one that is missing is a fault, and reads as None."""
        required = tuple(required)
        entries = self.mapping(what, (*required, *optional))
        if entries is None:
            return None
        values = {key.name: value for key, value in entries.items()}
        for name in required:
            if name not in values:
                self.fault(f"{what} lacks the key {name!r}")
                values[name] = Value(self.file, self.line, None, Faults())  # reported once is enough
        return values

    def items(self, what: str) -> list[Value] | None:
        """The values of a list."""
        if not isinstance(self.node, yaml.SequenceNode) or self.node.tag != LIST:
            self.fault(f"{what} must be a list, not {self._kind()}")
            return None
        return [self._at(node) for node in self.node.value]

    def text(self, what: str) -> str | None:
        """A string."""
        return self._scalar(what, "a string", "tag:yaml.org,2002:str", str)

    def integer(self, what: str) -> int | None:
        """An integer in decimal; true and false are none."""
        return self._scalar(what, "an integer", "tag:yaml.org,2002:int", _decimal)

    def boolean(self, what: str) -> bool | None:
        """True or false."""
        return self._scalar(what, "true or false", "tag:yaml.org,2002:bool", BOOLEANS.get)

    def word(self, what: str, words: Mapping[str, T]) -> T | None:
        """What one of ``words`` stands for."""
        text = self.text(what)
        if text is None:
            return None
        if text not in words:
            self.fault(f"unknown {what} {_shown(text)}; allowed: {', '.join(words)}")
            return None
        return words[text]

    def fault(self, message: str) -> None:
        """Note a fault of this value."""
        self.faults.add(self, message)

    @property
    def place(self) -> Place:
        """Where it stands, and nothing else."""
        return Place(self.file, self.line)

    @property
    def is_list(self) -> bool:
        """Whether this is a list."""
        return isinstance(self.node, yaml.SequenceNode)

    def _scalar(self, what: str, wanted: str, tag: str, read: Callable[[str], T | None]) -> T | None:
        value = None
        if isinstance(self.node, yaml.ScalarNode) and self.node.tag == tag:
            value = read(self.node.value)
        if value is None:
            self.fault(f"{what} must be {wanted}, not {self._kind()}")
        return value

    def _at(self, node: yaml.Node) -> Value:
        return Value(self.file, node.start_mark.line + 1, node, self.faults)

    def _kind(self) -> str:
        if isinstance(self.node, yaml.MappingNode):
            return "a mapping" if self.node.tag == MAPPING else f"a mapping tagged {_shown(self.node.tag)}"
        if isinstance(self.node, yaml.SequenceNode):
            return "a list" if self.node.tag == LIST else f"a list tagged {_shown(self.node.tag)}"
        if isinstance(self.node, yaml.ScalarNode) and self.node.tag != "tag:yaml.org,2002:null":
            return f"{'the string ' if self.node.style else ''}{_shown(self.node.value)}"
        return "nothing"


@dataclass(frozen=True)
class Key:
    """A key of a mapping, and where it stands."""

    name: str
    at: Value = field(compare=False)


def read_yaml(path: Path, faults: Faults) -> Value | None:
    """The root of a YAML file, shown in messages as ``<folder>/<file>``; None, and a fault, if it cannot be read."""
    shown = f"{path.parent.name}/{path.name}"
    nowhere = Value(shown, 1, None, faults)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
        faults.add(nowhere, f"cannot be read: {reason}")
        return None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.reader.ReaderError as error:
        at = Value(shown, text.count("\n", 0, error.position) + 1, None, faults)
        faults.add(at, f"not YAML: character {chr(error.character)!r} is not allowed")
        return None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        at = Value(shown, mark.line + 1 if mark else 1, None, faults)
        faults.add(at, f"not YAML: {_problem(error)}")
        return None
    except RecursionError:
        faults.add(nowhere, "lists or mappings are nested too deeply to be read")
        return None
    return Value(shown, node.start_mark.line + 1 if node else 1, node, faults)


def _problem(error: yaml.YAMLError) -> str:
    """What is wrong; an anchor or document too many is named by the context alone."""
    parts = [getattr(error, "problem", None) or str(error)]
    if isinstance(error, yaml.composer.ComposerError) and error.context:
        parts.insert(0, error.context)
    return ", ".join(parts)


def _decimal(text: str) -> int | None:
    """An integer in the one form that nobody reads otherwise: YAML takes 010 for 8 and 1:30 for 90.

    One of more digits than any size has is none: Python refuses to read some of those.
    """
    return int(text) if re.fullmatch("-?(0|[1-9][0-9]{0,18})", text) else None


def _shown(text: str) -> str:
    """``text`` as messages quote it, cut where it is very long."""
    return repr(text) if len(text) <= LONGEST else f"{text[:LONGEST]!r}..."
