"""What the first published kernels for this pooling got wrong, as far as a CPU can show it."""

from __future__ import annotations

import pytest

from known_faults import CHECKS

# Of torch's own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", CHECKS)
def test_known_fault(name: str) -> None:
    CHECKS[name]("cpu")
