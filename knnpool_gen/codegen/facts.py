"""Everything a template needs to know of one kernel, decided in Python: types, sizes, parameters.

Templates substitute these facts and loop; they compute nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from knnpool_gen.codegen.outputs import banner
from knnpool_gen.codegen.variant import PlanTable, TileValue, Variant
from knnpool_gen.kernel import AUX_ROWS, CHUNK, DEPTH, Kernel
from knnpool_gen.vocabulary import Direction, Staging

WIDEST_READ = 16
"""Bytes of the widest access to shared memory."""
WIDEST_STORE = 8
"""Bytes of the widest store of a backward: wider ones take registers that the sums need."""
WAVEFRONT = 128
"""Bytes that shared memory delivers at a time: 32 banks of 4 bytes."""
DEFAULT_NIN = 964
DEFAULT_NOUT = 230
"""Nodes of the table that a source is made for when it is compiled alone."""
AHEAD_BYTES = 128
"""Registers of a thread for values that are on their way to shared memory, in bytes."""
MOST_LOADS = 16
"""Loads of one row that a thread keeps in flight at most."""
COLUMN_UNROLL = {1: 32, 2: 16, 4: 16}
"""Look-ups of a sum's column that a thread of so many rows has under way: its terms wait for one another, and few
rows have registers to spare."""
COMMENT_COLUMN = 34
"""Column of the comments behind the constants."""

TABLES = {
    "indices": "KNNPOOL_INDEX",
    "first_slot": "Slot",
    "count": "float",
    "weights": "{accumulate}",
    "rev_rowptr": "int",
    "rev_kn": "Entry",
    "rev_order": "int",
    "rev_head": "Entry",
    "rev_weights": "{accumulate}",
}
"""Element types of the tables, by the name of their argument."""

PACKED_SLOTS = 2**15 - 1
"""Slots that 16 bits beside a 16-bit value can tell apart, as signed numbers."""

VALUE_TYPE = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
"""CUDA types that hold the raw bits of a value, by its bytes."""
ACCUMULATE_BYTES = {"float32": 4, "float64": 8}
ACCUMULATE_TYPE = {"float32": "float", "float64": "double"}


@dataclass(frozen=True)
class Switch:
    """A macro that is 0 or 1."""

    name: str
    default: int
    meaning: str


@dataclass(frozen=True)
class NodeFacts:
    """How the values of one node lie together, a row each: words of arithmetic, read in pieces."""

    stored: str
    """Type of one stored value."""
    word: str
    """Type of the unit of arithmetic."""
    values_per_word: int
    words: int
    """Words that hold all rows."""
    pieces: int
    """Reads of shared memory that bring them."""
    bytes: int

    @property
    def piece_bytes(self) -> int:
        """Bytes of one read."""
        return self.bytes // self.pieces

    @property
    def swizzle_shift(self) -> int:
        """log2 of the pieces in a wavefront: nodes this far apart share a bank."""
        return (WAVEFRONT // self.piece_bytes).bit_length() - 1

    @property
    def word_text(self) -> str:
        """What a word holds, in words."""
        return "1 row" if self.values_per_word == 1 else f"{self.values_per_word} rows"

    @classmethod
    def shared(cls, stored: str, stored_bytes: int, rows: int) -> NodeFacts:
        """In shared memory; 16-bit values are handled two by two."""
        packed = stored_bytes == 2 and rows % 2 == 0
        total = rows * stored_bytes
        return cls(
            stored=stored,
            word="unsigned" if packed else stored,
            values_per_word=2 if packed else 1,
            words=rows // 2 if packed else rows,
            pieces=max(1, total // WIDEST_READ),
            bytes=total,
        )

    @classmethod
    def direct(cls, stored: str, stored_bytes: int, rows: int) -> NodeFacts:
        """In registers, read value by value."""
        return cls(stored, stored, 1, rows, rows, rows * stored_bytes)


@dataclass(frozen=True)
class KernelFacts:
    """One kernel, as its template sees it."""

    variant: Variant
    node: NodeFacts

    @classmethod
    def of(cls, variant: Variant) -> KernelFacts:
        """Decide all facts of ``variant``."""
        dtype = variant.dtype
        if variant.direction is Direction.BACKWARD and variant.mode.backward_tile is TileValue.ACCUMULATE:
            stored, stored_bytes = ACCUMULATE_TYPE[dtype.accumulate], ACCUMULATE_BYTES[dtype.accumulate]
        else:
            stored, stored_bytes = VALUE_TYPE[dtype.bytes], dtype.bytes
        layout = NodeFacts.shared if variant.staging is Staging.SHARED else NodeFacts.direct
        return cls(variant, layout(stored, stored_bytes, variant.rows))

    @property
    def template(self) -> str:
        """Name of the template that writes it."""
        return f"{self.variant.direction.value}_{self.variant.staging.value}.cu.jinja"

    @property
    def shared(self) -> bool:
        """Whether tiles are staged in shared memory."""
        return self.variant.staging is Staging.SHARED

    @property
    def backward(self) -> bool:
        """Whether this is a gradient."""
        return self.variant.direction is Direction.BACKWARD

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
        return VALUE_TYPE[self.variant.dtype.bytes]

    @property
    def value_bytes(self) -> int:
        """Size of one."""
        return self.variant.dtype.bytes

    @property
    def mode(self) -> str:
        """Name of the mode, and of its template piece."""
        return self.variant.mode.mode.value

    @property
    def accumulate(self) -> str:
        """Name of the dtype sums run in, and of its template piece."""
        return self.variant.dtype.accumulate

    @property
    def accumulate_type(self) -> str:
        """CUDA type of a sum."""
        return ACCUMULATE_TYPE[self.accumulate]

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
    def loads(self) -> int:
        """Loads of every row that a thread keeps in flight, as far as its registers go."""
        budget = AHEAD_BYTES // 2 if self.backward else AHEAD_BYTES  # the backward holds entries, too
        return max(1, min(MOST_LOADS, budget // (self.rows * self.vector * self.variant.dtype.bytes)))

    @property
    def default_vector(self) -> int:
        """What one load brings with the sizes a source has when it is compiled alone."""
        return math.gcd(self.vector, DEFAULT_NOUT if self.backward else DEFAULT_NIN)

    @property
    def out_vector(self) -> int:
        """Nodes of one row that one store of a backward takes away."""
        return max(1, min(self.vector, WIDEST_STORE // self.variant.dtype.bytes))

    @property
    def held_columns(self) -> int:
        """Columns whose look-ups a thread keeps in registers."""
        return 2

    @property
    def held_slots(self) -> int:
        """The most slots of such a column."""
        return self.unroll

    @property
    def held_nodes(self) -> int:
        """Input nodes whose entries a thread keeps in registers."""
        return 4 if self.node.bytes <= 16 else 2

    @property
    def chunk(self) -> int:
        """Input nodes that the plan orders together."""
        return CHUNK

    @property
    def depth(self) -> int:
        """Entries of an input node that the plan puts at the head."""
        return DEPTH

    @property
    def aux_rows(self) -> int:
        """Rows of a block of aux."""
        return AUX_ROWS

    @property
    def blocked(self) -> bool:
        """Whether the kernel can write or read aux in blocks of rows."""
        return self.aux and self.shared and self.rows <= AUX_ROWS

    @property
    def splits(self) -> bool:
        """Whether several threads can share a column: the order of a sum's terms is fixed, that of a maximum not."""
        return self.forward_aux and self.shared

    @property
    def out(self) -> NodeFacts:
        """How the gradients of one input node lie together before they are written."""
        return NodeFacts.shared(self.value, self.value_bytes, self.rows)

    @property
    def exact_pairs(self) -> bool:
        """Whether adding two values as they are gives what adding in float32 and rounding gives.

        It does where the wide type has more than twice the digits of the narrow one, and two besides: Figueroa, When
        is double rounding innocuous? (1995). More than two addends, or weighted ones, are another matter.
        """
        return self.packed and not self.reads_weights

    @property
    def reads_weights(self) -> bool:
        """Whether the backward weighs what it adds."""
        return PlanTable.REV_WEIGHTS in self.variant.mode.backward_reads

    @property
    def packed(self) -> bool:
        """Whether a word holds two rows."""
        return self.node.values_per_word > 1

    @property
    def aux(self) -> bool:
        """Whether the mode records and reads winning slots."""
        return self.variant.mode.aux

    @property
    def forward_aux(self) -> bool:
        """Whether this kernel writes winning slots."""
        return self.aux and not self.backward

    @property
    def switches(self) -> tuple[Switch, ...]:
        """The switches of this kernel."""
        blocked = [Switch("KNNPOOL_AUX_BLOCKED", 1, "1: aux is [rows / AUX_ROWS, NOUT, AUX_ROWS], 0: [rows, NOUT]")]
        if self.backward:
            return tuple(blocked * self.blocked)
        found = [Switch("KNNPOOL_OMIT_NAN", int(self.aux), "1: leave NaN out, 0: let it through")]
        if self.shared:
            found.append(Switch("KNNPOOL_PLACES", 0, "1: all look-ups stand in shared memory, 0: they do not"))
        if self.aux:
            found.append(Switch("KNNPOOL_AUX", 1, "1: write aux, 0: leave it alone"))
            found += blocked * self.blocked
        if PlanTable.WEIGHTS in self.variant.mode.forward_reads:
            found.append(Switch("KNNPOOL_NORMALIZE", 0, "1: divide by the sum of the weights"))
        return tuple(found)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Names of the kernel's parameters, in order."""
        mode = self.variant.mode
        aux = ("aux",) if mode.aux else ()
        if not self.backward:
            return ("x", "indices", *_names(mode.forward_reads), "y", *aux, "rows")
        ordered = ("rev_order", "rev_head") if self.shared else ()
        return ("grad_y", *aux, *_names(mode.backward_reads), "rev_rowptr", "rev_kn", *ordered, "grad_x", "rows")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Declarations of the kernel's parameters, in order."""
        return tuple(self._parameter(name) for name in self.arguments)

    def _parameter(self, name: str) -> str:
        if name == "rows":
            return "long long rows"
        if name in TABLES:
            element = TABLES[name].format(accumulate=self.accumulate_type)
            return f"const {element}* __restrict__ {name}"
        written = name in ("y", "grad_x") or (name == "aux" and self.forward_aux)
        pointed = "Slot" if name == "aux" else "Value"
        return f"{'' if written else 'const '}{pointed}* __restrict__ {name}"

    @property
    def unroll(self) -> int:
        """Slots whose nodes are read ahead: a small column at once, if the registers hold its nodes."""
        if self.shared:
            return 12 if self.node.pieces == 1 else 4
        return 8 if self.node.bytes <= 8 else 4

    @property
    def column_unroll(self) -> int:
        """The same for columns of any length in shared memory."""
        narrow = self.node.bytes <= WIDEST_READ // 2 and not self.splits
        return COLUMN_UNROLL.get(self.rows, self.unroll) if narrow else self.unroll

    @property
    def resident_threads(self) -> int:
        """Threads of a multiprocessor that the registers must allow: fewer where every node takes many."""
        if self.node.bytes > WIDEST_READ:
            return 512
        light = self.value_bytes == 2 and not self.reads_weights if self.backward else self.node.bytes <= 8
        return 1024 if light else 768

    @property
    def default_blocks(self) -> int:
        """The same in blocks of 256 threads."""
        return self.resident_threads // 256

    @property
    def kernel(self) -> Kernel:
        """The dispatch entry, without its digest."""
        return Kernel(
            name=self.name,
            file=f"cuda/{self.name}.cu",
            sha256="",
            arguments=self.arguments,
            switches=tuple(switch.name for switch in self.switches),
            max_k=PACKED_SLOTS if self.forward_aux and self.packed else None,
            node_bytes=self.node.bytes if self.shared else 0,
            node_slots=self.rows if self.shared and self.backward and self.aux else 0,
            sum_bytes=self.out.bytes if self.shared and self.backward else 0,
            vector=self.vector,
            out_vector=self.out_vector if self.shared and self.backward else 1,
            resident_threads=self.resident_threads,
            held_slots=self.held_slots if self.shared and not self.backward else 0,
            held=(self.held_nodes if self.backward else self.held_columns) if self.shared else 0,
            extra_nodes=0 if self.backward else 1,
            gap_bytes=self.node.piece_bytes if self.shared and not self.backward else 0,
        )

    @staticmethod
    def pad(code: str, column: int = COMMENT_COLUMN) -> str:
        """Blanks that bring the comment behind ``code`` to its column."""
        return " " * max(2, column - len(code))


def _names(tables: tuple[PlanTable, ...]) -> tuple[str, ...]:
    return tuple(table.value for table in tables)
