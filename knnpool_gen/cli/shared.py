"""What all commands share: where they print, how they end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.syntax import Syntax

from knnpool_gen.errors import KNNPoolError

WIDE = 200
"""Columns of output that no terminal limits."""

stdout = Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDE)
stderr = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)

JsonOption = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]

T = TypeVar("T")


def print_text(text: str, language: str) -> None:
    """Print ``text`` in colours on a terminal, and exactly as it is elsewhere."""
    if stdout.is_terminal:
        stdout.print(Syntax(text, language, background_color="default"))
    else:
        sys.stdout.write(text)


def print_json(value: object) -> None:
    """Print ``value`` as JSON and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def progress(items: Iterable[T], total: int, what: str) -> Iterator[T]:
    """``items``, with a progress bar on a terminal and nothing elsewhere."""
    yield from track(
        items, description=what, total=total, console=stderr, transient=True, disable=not stderr.is_terminal
    )


@contextmanager
def errors() -> Iterator[None]:
    """Bad input ends the command with its message and exit code 2."""
    try:
        yield
    except KNNPoolError as error:
        fail(str(error))


def fail(message: str) -> NoReturn:
    """End the command with ``message`` and exit code 2."""
    stderr.print(f"knnpool-gen: {message}", markup=False)
    raise typer.Exit(2)
