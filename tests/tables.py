"""Tables, inputs and comparisons that many tests share; everything here is the same on every run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knnpool_gen.verification.compare import difference
from knnpool_gen.verification.tables import Table, adversarial_values, small_tables, wide_tables

__all__ = ["DTYPES", "Table", "adversarial_values", "assert_same_bits", "real_tables", "small_tables", "wide_tables"]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def real_tables() -> list[Table]:
    """The tables of fovi's networks in ``tests/data/fovi_tables.npz``; the name is their key."""
    with np.load(Path(__file__).parent / "data" / "fovi_tables.npz") as arrays:
        found = {key: re.search(r"__nin(\d+)__", key) for key in arrays}
        return [
            Table(key, torch.from_numpy(arrays[key].astype(np.int64)), int(nin[1]))
            for key, nin in found.items()
            if nin is not None  # the others are weights
        ]


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and bits, where any NaN equals any other."""
    assert difference(actual, expected) is None
