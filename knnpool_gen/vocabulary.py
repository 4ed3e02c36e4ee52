"""The closed word lists shared by specs, generated dispatch and runtime.

Data types and tile heights are open: they are whatever the specs list. Modes are closed because each one
needs its rules written down in :mod:`knnpool_gen.reference`, the oracle of every kernel.
"""

from __future__ import annotations

from enum import Enum


class Direction(str, Enum):
    """Which way a kernel computes."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Mode(str, Enum):
    """How the values of a column become one value."""

    MAX = "max"
    AVG = "avg"
    SUM = "sum"
    WEIGHTED = "weighted"

    @property
    def has_winner(self) -> bool:
        """Whether one slot of a column wins: the forward says which, and the backward has to be told."""
        return self is Mode.MAX

    @property
    def takes_weights(self) -> bool:
        """Whether a call brings weights."""
        return self is Mode.WEIGHTED


class Staging(str, Enum):
    """Where a kernel reads its inputs from: a tile in shared memory, or global memory through L2."""

    SHARED = "shared"
    DIRECT = "direct"


class NanRule(str, Enum):
    """What becomes of a NaN in the input."""

    OMIT = "omit"
    """It is left out, as if its slot were a pad."""
    PROPAGATE = "propagate"
    """It makes the result NaN."""
