"""What the generated dispatch table says of a kernel; all that the runtime knows of the generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from knnpool_gen.vocabulary import Direction, Mode, Staging

CHUNK = 1024
"""Input nodes that a backward works on together; the plan orders them by the number of their readers."""
DEPTH = 4
"""Entries of an input node that lie at the head of the reverse table, where all nodes have the same number."""
AUX_ROWS = 8
"""Rows of a block of aux, where it lies in blocks."""


class KernelKey(NamedTuple):
    """The five facts that tell one variant from another."""

    direction: Direction
    mode: Mode
    dtype: str
    """Name of the torch dtype, such as ``float16``."""
    staging: Staging
    rows: int
    """How many rows one tile stages."""


@dataclass(frozen=True)
class Kernel:
    """One entry of the dispatch table: one source file with one kernel."""

    name: str
    """Symbol of the kernel, stem of its file, and what people call the variant."""
    file: str
    """Path of the source, relative to the folder of the dispatch table."""
    sha256: str
    """Digest of the source the table was generated with."""
    arguments: tuple[str, ...]
    """Names of the kernel's parameters in order: tensors and plan tables by their name, and ``rows``."""
    switches: tuple[str, ...]
    """Macros of value 0 or 1 that the source knows."""
    max_k: int | None
    """The most slots a column may have, if there is a limit."""
    node_bytes: int
    """Shared memory for the values of one node in a group of rows; 0 if nothing is staged."""
    node_slots: int
    """Winning slots kept beside them."""
    sum_bytes: int
    """Shared memory for the gradients of one input node in a group of rows, on their way out."""
    vector: int
    """The most neighbouring nodes of a row that one access brings; a tile has room for whole ones."""
    out_vector: int
    """The most neighbouring nodes of a row that one store of a backward takes away."""
    held: int
    """Nodes that a thread writes whose look-ups it keeps in registers; 0 if nothing is staged."""
    held_slots: int
    """The most slots of such a node, in a forward."""
    extra_nodes: int
    """Nodes a tile holds besides the table's own (the pad)."""
    gap_bytes: int
    """Shared memory between one group of rows and the next, so that one node of several is in as many banks."""
    resident_threads: int
    """Threads of all blocks on a multiprocessor that the kernel's registers should allow."""

    def shared_bytes(self, staged: int, written: int, stack: int = 1, slot_bytes: int = 1) -> int:
        """Dynamic shared memory, in bytes, of a tile of ``stack`` groups of rows.

        ``staged`` nodes of each are read into it, ``written`` nodes written from it.
        """
        nodes = self._room(staged + self.extra_nodes) * (self.node_bytes + self.node_slots * slot_bytes)
        group = nodes + self._room(min(written, CHUNK)) * self.sum_bytes
        return stack * (group + self.gap_bytes) if stack > 1 else group

    def _room(self, nodes: int) -> int:
        return -(-nodes // self.vector) * self.vector
