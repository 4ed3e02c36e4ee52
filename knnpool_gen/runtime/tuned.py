"""Choices measured on this machine by ``knnpool-gen tune``: a JSON file, read once, that overrules the model.

A file that cannot be used costs a warning and leaves the choice to the model; it never ends a call.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from knnpool_gen.errors import InvalidArgumentError

if TYPE_CHECKING:
    from knnpool_gen.runtime.select import Problem

FORMAT = 1
OFF = "off"
"""Value of ``KNNPOOL_TUNED`` that leaves every choice to the model."""
NEAR = 1.0
"""A choice serves row counts up to this many doublings away from the one it was measured with."""


@dataclass(frozen=True)
class TunedChoice:
    """The fastest configuration measured for one problem."""

    direction: str
    mode: str
    dtype: str
    k: int
    nin: int
    nout: int
    rows: int
    """Rows of the input it was measured with."""
    variant: str
    """Name of the kernel."""
    stack: int
    """Groups of rows in a tile; 1 for ``direct``."""
    threads: int
    """Threads of a block."""
    microseconds: float
    """Median time of a call."""
    model_microseconds: float
    """The same for what the model chooses."""

    def serves(self, problem: Problem) -> bool:
        """Whether this was measured for the table, mode and dtype of ``problem``, and about as many rows."""
        mine = (self.direction, self.mode, self.dtype, self.k, self.nin, self.nout)
        asked = (problem.direction.value, problem.mode.value, problem.dtype, problem.k, problem.nin, problem.nout)
        return mine == asked and self.distance(problem.rows) <= NEAR

    def distance(self, rows: int) -> float:
        """How many doublings ``rows`` is away from what this was measured with."""
        return abs(log2(max(1, rows) / max(1, self.rows)))


Choices = Mapping[str, tuple[TunedChoice, ...]]
"""By the name of the device, as :func:`device_label` gives it."""

_loaded: Choices | None = None
_lock = threading.Lock()


def device_label(name: str, capability: tuple[int, int]) -> str:
    """What a device is called in the file: two of one label are taken to be equally fast."""
    major, minor = capability
    return f"{name} sm_{major}{minor}"


def tuned_file() -> Path | None:
    """Where choices are kept: ``KNNPOOL_TUNED``, or a file in the user's config folder; None if that is ``off``."""
    configured = os.environ.get("KNNPOOL_TUNED")
    if configured == OFF:
        return None
    return Path(configured) if configured else Path(platformdirs.user_config_dir("knnpool-gen")) / "tuned.json"


def tuned_choice(problem: Problem, device: str) -> TunedChoice | None:
    """The choice kept for ``problem`` on the device of that label, of the nearest number of rows; None if none is."""
    if not device:
        return None
    serving = [choice for choice in _choices().get(device, ()) if choice.serves(problem)]
    return min(serving, key=lambda choice: choice.distance(problem.rows), default=None)


def forget_tuned() -> None:
    """Read the file again when it is next needed."""
    global _loaded
    with _lock:
        _loaded = None


def read_tuned(path: Path) -> dict[str, tuple[TunedChoice, ...]]:
    """What the file at ``path`` holds; nothing if there is no file.

    Raises:
        InvalidArgumentError: it cannot be read, or is not what :func:`write_tuned` wrote.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise InvalidArgumentError(f"{path} is not a file of tuned choices of format {FORMAT}")
    devices = content.get("devices")
    if not isinstance(devices, dict) or not all(isinstance(entries, list) for entries in devices.values()):
        raise InvalidArgumentError(f"{path} has no lists of choices under 'devices'")
    return {device: tuple(_choice(entry, path) for entry in entries) for device, entries in devices.items()}


def write_tuned(path: Path, device: str, choices: Iterable[TunedChoice]) -> None:
    """Add ``choices`` to the file at ``path``, each in place of an older one for the same problem.

    Raises:
        InvalidArgumentError: the file holds something else, or cannot be written.
    """
    kept = read_tuned(path)
    merged = {_problem_of(choice): choice for choice in (*kept.get(device, ()), *choices)}
    kept[device] = tuple(merged[problem] for problem in sorted(merged))
    content = {
        "format": FORMAT,
        "devices": {name: [asdict(choice) for choice in entries] for name, entries in sorted(kept.items())},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=1) + "\n")
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be written: {error}; set KNNPOOL_TUNED to another file") from error


def warn_ignored(reason: str) -> None:
    """Say that something in the file is not used, and how to mend that."""
    warnings.warn(f"tuned choice ignored: {reason}; run `knnpool-gen tune` again or remove the file", stacklevel=2)


def _choices() -> Choices:
    global _loaded
    with _lock:
        if _loaded is None:
            path = tuned_file()
            try:
                _loaded = {} if path is None else read_tuned(path)
            except InvalidArgumentError as error:
                _loaded = {}
                warn_ignored(str(error))
        return _loaded


def _choice(entry: object, path: Path) -> TunedChoice:
    if not isinstance(entry, dict):
        raise InvalidArgumentError(f"{path} holds {entry!r} where a choice should be")
    wanted = {field.name: _KINDS[str(field.type)] for field in fields(TunedChoice)}
    values: dict[str, Any] = {name: entry.get(name) for name in wanted}
    for name, kinds in wanted.items():
        if not isinstance(values[name], kinds) or isinstance(values[name], bool):
            raise InvalidArgumentError(f"{path} holds a choice with {name} = {values[name]!r}")
    return TunedChoice(**values)


_KINDS: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float)}


def _problem_of(choice: TunedChoice) -> tuple[str | int, ...]:
    return choice.direction, choice.mode, choice.dtype, choice.k, choice.nin, choice.nout, choice.rows
