"""How the winning slots lie in memory: row by row, as people see them, or in blocks of rows, as kernels like them.

In blocks, the slots of :data:`~knnpool_gen.kernel.AUX_ROWS` rows at one output node stand side by side: a thread,
which works on several rows of one node, writes and reads them in one access.
"""

from __future__ import annotations

import math
from enum import Enum

from torch import Tensor

from knnpool_gen.kernel import AUX_ROWS, Kernel

BLOCKED = "KNNPOOL_AUX_BLOCKED"


class AuxLayout(Enum):
    """How aux lies in memory."""

    ROWS = "rows"
    """``[..., Nout]``, what the public functions give and take."""
    BLOCKS = "blocks"
    """``[rows / AUX_ROWS, Nout, AUX_ROWS]``."""


def can_block_aux(kernel: Kernel) -> bool:
    """Whether ``kernel`` knows aux in blocks."""
    return BLOCKED in kernel.switches


def block_aux(aux: Tensor) -> Tensor:
    """``[rows / AUX_ROWS, Nout, AUX_ROWS]`` of an aux ``[..., Nout]`` whose rows make whole blocks."""
    rows = math.prod(aux.shape[:-1])
    return aux.reshape(rows // AUX_ROWS, AUX_ROWS, aux.shape[-1]).transpose(1, 2).contiguous()


def unblock_aux(aux: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse: ``shape`` is ``[..., Nout]``."""
    return aux.transpose(1, 2).reshape(shape)
