"""Tables and inputs that hold every difficulty a kernel can meet; the same on every run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Table:
    """A neighbour table with a name that can stand in a test id."""

    name: str
    indices: Tensor
    """int64 ``[K, Nout]``; any entry ``>= nin`` is a pad."""
    nin: int

    @property
    def k(self) -> int:
        """Slots of a column."""
        return self.indices.shape[0]

    @property
    def nout(self) -> int:
        """Output nodes."""
        return self.indices.shape[1]

    def __str__(self) -> str:
        return self.name


def small_tables() -> list[Table]:
    """Tables that each hold one difficulty, small enough for a loop in Python."""
    return [
        Table("one_to_one", torch.tensor([[0]]), 1),
        Table("identity", torch.arange(5)[None], 5),
        Table("plain", _random(4, 6, 9, pads=0), 9),
        Table("pads", _random(5, 7, 11, pads=5), 11),
        Table("pads_first", torch.tensor([[6, 6, 6, 0], [6, 2, 6, 1], [3, 2, 6, 1]]), 6),
        Table("pads_far_beyond", torch.tensor([[2**32 + 3, 1], [2**62, 2**31], [0, 4]]), 4),
        Table("empty_columns", torch.tensor([[3, 0, 3, 1], [3, 2, 3, 3]]), 3),
        Table("only_pads", torch.full((3, 4), 2), 2),
        Table("duplicates", torch.tensor([[1, 1, 0], [1, 2, 0], [1, 1, 2], [2, 1, 0]]), 3),
        Table("k1", torch.tensor([[4, 0, 2, 5, 2]]), 5),
        Table("k0", torch.empty((0, 3), dtype=torch.int64), 4),
        Table("k33", _random(33, 5, 40, pads=9), 40),
        Table("k255", _random(255, 3, 50, pads=10), 50),
        Table("nout1", _random(6, 1, 10, pads=2), 10),
        Table("nout0", torch.empty((3, 0), dtype=torch.int64), 4),
        Table("nin1", torch.tensor([[0, 1, 0], [1, 0, 0]]), 1),
        Table("nin0", torch.tensor([[0, 7], [1, 0]]), 0),
        Table("all_zero_sizes", torch.empty((0, 0), dtype=torch.int64), 0),
        Table("hub", torch.stack([torch.full((8,), 3), torch.arange(8), torch.full((8,), 3)]), 8),
        Table("unread", torch.tensor([[9, 2, 9], [2, 9, 4]]), 12),
        Table("odd_sizes", _random(3, 17, 31, pads=4), 31),
    ]


def wide_tables() -> list[Table]:
    """Tables on both sides of every change of a type: slots, indices, packed entries.

    And one whose columns are too long for registers and too many for their look-ups to stand in shared memory.
    """
    return [
        Table("many_k13", _random(13, 330, 40, pads=5), 40),
        *(Table(f"k{k}", _random(k, 3, 20, pads=5), 20) for k in (127, 128, 129, 254, 256, 257, 300)),
        *(Table(f"nin{nin}", _random(3, 5, nin, pads=nin // 4), nin) for nin in (65534, 65535, 65536, 65537)),
    ]


def adversarial_values(rows: int, nin: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``[rows, nin]`` of ties, NaN, ±inf, ±0, denormals, the largest numbers, and ordinary ones.

    The first row has a bit of everything; from there each row has a theme, coming round after seven rows.
    """
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    denormal = info.smallest_normal * info.eps
    normals = torch.randn(rows, nin, generator=generator, dtype=torch.float64)

    def of(*choices: float) -> Tensor:
        values = torch.tensor(choices, dtype=torch.float64)
        return values[torch.randint(len(choices), (rows, nin), generator=generator)]

    ties = of(-1.0, -0.0, 0.0, 1.0, 1.0, 2.0)
    tiny = of(0.0, -0.0, denormal, -denormal, 3 * denormal, info.smallest_normal - denormal, info.smallest_normal)
    huge = of(info.max, -info.max, info.max, info.max / 2, info.max / 2 * (1 + info.eps), 1.0)
    nothing = of(torch.nan, -torch.inf, -torch.inf)
    special = of(torch.nan, torch.inf, -torch.inf, 0.0, -0.0, denormal, info.max, -info.max, 1.0, 1 + info.eps)
    which = of(0, 0, 1, 1, 2, 5)
    mixed = torch.where(which == 0, normals, torch.where(which == 1, ties, torch.where(which == 2, tiny, special)))
    themes = torch.stack([mixed, normals, ties, special, tiny, nothing, huge])
    rows_of_themes = torch.arange(rows)
    return themes[rows_of_themes % len(themes), rows_of_themes].to(dtype)


def _random(k: int, nout: int, nin: int, pads: int) -> Tensor:
    """Random neighbours; about ``pads`` in ``nin + pads`` entries are pads, of different values."""
    generator = torch.Generator().manual_seed(1000 * k + nout)
    return torch.randint(nin + pads, (k, nout), generator=generator)
