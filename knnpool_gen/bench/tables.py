"""Neighbour tables to measure with: those of a file, and made ones for sizes that no real network has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Mode

CHANNELS = {
    "alexnet64_pool0": 96,
    "alexnet64_pool1": 256,
    "alexnet64_pool4": 256,
    "alexnet64_out": 256,
    "alexnet256_pool0": 96,
    "alexnet256_out": 256,
    "sampler64": 3,
}
"""Channels of the layers that the real tables come from."""
USUAL_CHANNELS = 64
GAUSSIAN = "gaussian"
"""What a file of tables may call the mode ``weighted``."""

_KEY = re.compile(r"(?P<name>.+)__nin(?P<nin>\d+)__(?P<mode>[a-z]+)")


@dataclass(frozen=True, eq=False)
class BenchTable:
    """A neighbour table, and how it is used where it comes from."""

    name: str
    indices: Tensor
    """int64 ``[K, Nout]``; an entry ``>= nin`` is a pad."""
    nin: int
    mode: Mode
    channels: int = USUAL_CHANNELS
    weights: Tensor | None = None
    """float32 ``[K, Nout]``."""

    @property
    def k(self) -> int:
        """Slots of a column."""
        return self.indices.shape[0]

    @property
    def nout(self) -> int:
        """Output nodes."""
        return self.indices.shape[1]


def load_tables(path: Path) -> list[BenchTable]:
    """The tables of an ``.npz`` file: arrays ``[K, Nout]`` named ``NAME__ninNIN__MODE``, weights ``NAME__weights``.

    Raises:
        InvalidArgumentError: the file cannot be read or holds no such array.
    """
    try:
        with np.load(path) as stored:
            arrays = {key: stored[key] for key in stored.files}
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as .npz: {error}") from error
    tables = []
    for key, array in arrays.items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        mode = Mode.WEIGHTED.value if match["mode"] == GAUSSIAN else match["mode"]
        if mode not in [known.value for known in Mode] or array.ndim != 2 or array.dtype.kind not in "iu":
            raise InvalidArgumentError(f"{path}: {key} is not an integer table [K, Nout] of a known mode")
        weights = arrays.get(f"{match['name']}__weights")
        tables.append(
            BenchTable(
                name=match["name"],
                indices=torch.from_numpy(array.astype(np.int64)),
                nin=int(match["nin"]),
                mode=Mode(mode),
                channels=CHANNELS.get(match["name"], USUAL_CHANNELS),
                weights=None if weights is None else torch.from_numpy(weights.astype(np.float32)),
            )
        )
    if not tables:
        raise InvalidArgumentError(f"{path} holds no array named NAME__ninNIN__MODE")
    return tables


def load_table(path: Path, nin: int | None, mode: Mode) -> list[BenchTable]:
    """The tables of a ``.npz`` file as :func:`load_tables` reads them, or the one table of a ``.npy`` file.

    Raises:
        InvalidArgumentError: the file cannot be read, or is a ``.npy`` and ``nin`` is not given.
    """
    if path.suffix != ".npy":
        return load_tables(path)
    if nin is None:
        raise InvalidArgumentError(f"{path} does not say how many inputs its table has: give --nin")
    try:
        array = np.load(path)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read as .npy: {error}") from error
    if array.ndim != 2 or array.dtype.kind not in "iu":
        raise InvalidArgumentError(f"{path} holds {array.dtype} {list(array.shape)}, not an integer table [K, Nout]")
    return [BenchTable(path.stem, torch.from_numpy(array.astype(np.int64)), nin, mode)]


def made_table(name: str, nin: int, nout: int, k: int, mode: Mode = Mode.MAX) -> BenchTable:
    """A table whose columns read neighbouring inputs, as real ones do, with one pad in twenty; always the same one."""
    generator = torch.Generator().manual_seed(k + nout)
    centres = torch.arange(nout) * max(0, nin - 1) // max(1, nout - 1)
    reach = max(1, 3 * k)
    near = centres + torch.randint(-reach, reach + 1, (k, nout), generator=generator)
    pads = torch.rand(k, nout, generator=generator) < 0.05
    return BenchTable(name, near.clamp(0, max(0, nin - 1)).masked_fill(pads, nin), nin, mode)


def global_table(name: str, nin: int, mode: Mode) -> BenchTable:
    """One column that reads every input: global pooling."""
    return BenchTable(name, torch.arange(nin)[:, None], nin, mode)


def odd_tables() -> list[BenchTable]:
    """Sizes far from the usual: columns of 1000 slots, rows that fit no shared memory."""
    return [
        global_table("global1000", 1000, Mode.MAX),
        made_table("long166716", 166716, 18413, 9),
    ]


def growing_nin() -> list[BenchTable]:
    """Rows of growing length, a quarter as many outputs, K 9."""
    return [made_table(f"nin{nin}", nin, nin // 4, 9) for nin in (64, 256, 1024, 4096, 16384, 65536)]


def growing_k() -> list[BenchTable]:
    """Columns of growing length, 1024 inputs, 256 outputs."""
    return [made_table(f"k{k}", 1024, 256, k) for k in (1, 2, 4, 8, 16, 32, 64)]


def named(tables: Sequence[BenchTable], names: Sequence[str]) -> list[BenchTable]:
    """Those of ``tables`` with these names, or all if there are none.

    Raises:
        InvalidArgumentError: no table has one of the names; the message lists those that exist.
    """
    known = [table.name for table in tables]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgumentError(f"no table {', '.join(unknown)}; there are {', '.join(known)}")
    return [table for table in tables if not names or table.name in names]
