"""Everything a template needs to know of one kernel, decided in Python: types, sizes, parameters.

Templates substitute these facts and loop; they compute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from knnpool_gen.codegen.outputs import banner
from knnpool_gen.codegen.variant import PlanTable, TileValue, Variant
from knnpool_gen.kernel import Kernel
from knnpool_gen.vocabulary import Direction

WIDEST_READ = 16
"""Bytes of the widest access to shared memory."""
WAVEFRONT = 128
"""Bytes that shared memory delivers at a time: 32 banks of 4 bytes."""
COMMENT_COLUMN = 32
"""Column of the comments behind the constants."""

TABLES = {
    "indices": "int",
    "first_slot": "unsigned char",
    "count": "float",
    "rev_rowptr": "int",
    "rev_kn": "int",
}
"""Element types of the plan's tables, by the name of their argument."""

ACCUMULATE_BYTES = {"float32": 4, "float64": 8}
ACCUMULATE_TYPE = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class TileFacts:
    """How a tile lies in shared memory: for each node the values of all rows, in pieces of one read each."""

    stored: str
    """Type of one stored value."""
    word: str
    """Type of the unit of arithmetic."""
    values_per_word: int
    words: int
    """Words of a piece."""
    piece_rows: int
    pieces: int
    piece_bytes: int

    @property
    def swizzle_shift(self) -> int:
        """log2 of the pieces in a wavefront: nodes this far apart share a bank."""
        return (WAVEFRONT // self.piece_bytes).bit_length() - 1

    @property
    def node_bytes(self) -> int:
        """Shared memory of one node, all rows."""
        return self.pieces * self.piece_bytes

    @classmethod
    def of(cls, stored: str, stored_bytes: int, rows: int) -> TileFacts:
        """Lay out a tile of ``rows`` rows of ``stored`` values; 16-bit values are handled two by two."""
        packed = stored_bytes == 2 and rows % 2 == 0
        piece_bytes = min(rows * stored_bytes, WIDEST_READ)
        word_bytes = 4 if packed else stored_bytes
        return cls(
            stored=stored,
            word="unsigned" if packed else stored,
            values_per_word=2 if packed else 1,
            words=piece_bytes // word_bytes,
            piece_rows=piece_bytes // stored_bytes,
            pieces=rows * stored_bytes // piece_bytes,
            piece_bytes=piece_bytes,
        )


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, as its template sees it."""

    variant: Variant
    tile: TileFacts

    @classmethod
    def of(cls, variant: Variant) -> KernelFacts:
        """Decide all facts of ``variant``."""
        dtype = variant.dtype
        if variant.direction is Direction.BACKWARD and variant.mode.backward_tile is TileValue.ACCUMULATE:
            stored, stored_bytes = ACCUMULATE_TYPE[dtype.accumulate], ACCUMULATE_BYTES[dtype.accumulate]
        else:
            stored, stored_bytes = dtype.cuda_value, dtype.bytes
        return cls(variant, TileFacts.of(stored, stored_bytes, variant.rows))

    @property
    def name(self) -> str:
        """Symbol of the kernel."""
        return self.variant.name

    @property
    def banner(self) -> str:
        """The comment every generated file begins with."""
        return banner("//", self.name)

    @property
    def dtype(self) -> str:
        """Name of the dtype, and of its template piece."""
        return self.variant.dtype.name

    @property
    def value(self) -> str:
        """Type of one value in global memory."""
        return self.variant.dtype.cuda_value

    @property
    def mode(self) -> str:
        """Name of the mode, and of its template piece."""
        return self.variant.mode.mode.value

    @property
    def accumulate(self) -> str:
        """Name of the dtype sums run in, and of its template piece."""
        return self.variant.dtype.accumulate

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.variant.rows

    @property
    def rows_text(self) -> str:
        """The same in words."""
        return "1 row" if self.rows == 1 else f"{self.rows} rows"

    @property
    def vector(self) -> int:
        """Nodes of one row that one load brings."""
        return self.variant.dtype.vector

    @property
    def packed(self) -> bool:
        """Whether a word holds two rows."""
        return self.tile.values_per_word > 1

    @property
    def every(self) -> str:
        """The factor that repeats a small number for every row of a word."""
        return "0x00010001" if self.packed else "1"

    @property
    def by_row(self) -> bool:
        """Whether pieces are taken apart into rows; only the max forward works on whole words."""
        return not self.forward_aux

    @property
    def aux(self) -> bool:
        """Whether the mode records and reads winning slots."""
        return self.variant.mode.aux

    @property
    def forward_aux(self) -> bool:
        """Whether this kernel writes winning slots."""
        return self.aux and self.variant.direction is Direction.FORWARD

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in order."""
        mode = self.variant.mode
        aux = ("aux",) if mode.aux else ()
        if self.variant.direction is Direction.FORWARD:
            return ("x", "indices", *_names(mode.forward_reads), "y", *aux, "rows")
        return ("grad_y", *aux, *_names(mode.backward_reads), "rev_rowptr", "rev_kn", "grad_x", "rows")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Declarations of the kernel's parameters, in order."""
        return tuple(self._parameter(name) for name in self.arguments)

    def _parameter(self, name: str) -> str:
        if name == "rows":
            return "long long rows"
        if name in TABLES:
            return f"const {TABLES[name]}* __restrict__ {name}"
        written = name in ("y", "grad_x") or (name == "aux" and self.forward_aux)
        pointed = "unsigned char" if name == "aux" else "Value"
        return f"{'' if written else 'const '}{pointed}* __restrict__ {name}"

    @property
    def resident_threads(self) -> int:
        """Threads of all blocks on a multiprocessor: 64 registers a thread, more where a node is long."""
        if self.tile.pieces == 1:
            return 1024
        return 768 if self.tile.pieces == 2 else 512

    @property
    def default_blocks(self) -> int:
        """Blocks of 256 threads that make them up."""
        return self.resident_threads // 256

    @property
    def kernel(self) -> Kernel:
        """The dispatch entry, without its digest."""
        winners = self.rows if self.aux and self.variant.direction is Direction.BACKWARD else 0
        return Kernel(
            name=self.name,
            file=f"cuda/{self.name}.cu",
            sha256="",
            arguments=self.arguments,
            node_bytes=self.tile.node_bytes + winners,
            granule=self.vector,
            resident_threads=self.resident_threads,
            extra_nodes=1 if self.variant.direction is Direction.FORWARD else 0,
        )

    @staticmethod
    def pad(code: str) -> str:
        """Blanks that bring the comment behind ``code`` to its column."""
        return " " * max(2, COMMENT_COLUMN - len(code))


def _names(tables: tuple[PlanTable, ...]) -> tuple[str, ...]:
    return tuple(table.value for table in tables)
