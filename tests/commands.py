"""The command line, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from knnpool_gen.cli import app


@dataclass(frozen=True)
class Ended:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


def run(*arguments: str | Path) -> Ended:
    """Run a command, its output going to no terminal."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return Ended(result.exit_code, result.stdout_bytes.decode(), result.stderr_bytes.decode())
