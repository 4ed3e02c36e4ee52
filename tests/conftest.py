from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-sanitized", action="store_true", help="run every variant under every sanitizer, not only some"
    )
