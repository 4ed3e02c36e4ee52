from __future__ import annotations

import pytest

import commands


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-sanitized", action="store_true", help="run every variant under every sanitizer, not only some"
    )


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> commands.Run:
    """Runs a command in this process, its output going to no terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    return commands.run
