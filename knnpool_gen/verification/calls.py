"""What a kernel is verified with: inputs, and the outputs the reference says they must give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnpool_gen.kernel import KernelKey
from knnpool_gen.reference import reference_backward, reference_forward
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import Problem
from knnpool_gen.verification.tables import Table, adversarial_values
from knnpool_gen.vocabulary import Direction, Mode


@dataclass(frozen=True)
class Call:
    """One call of one kernel, on the CPU; tensors by the names of the kernel's arguments."""

    name: str
    key: KernelKey
    meta: PoolMeta
    rows: int
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    misaligned: bool
    """Whether the call's tensors begin one element past an aligned address."""

    @property
    def problem(self) -> Problem:
        """What the choice of a configuration depends on."""
        return Problem(
            self.key.direction, self.key.mode, self.key.dtype, self.meta.k, self.meta.nin, self.meta.nout, self.rows,
            aux="aux" in self.expected,
        )  # fmt: skip


def calls(key: KernelKey, tables: Iterable[Table], rows: Sequence[int] | None = None) -> Iterator[Call]:
    """Calls of the kernel ``key``: each table with each number of rows, aligned and not, with and without aux."""
    for table in tables:
        meta = pool_meta_from_indices(table.indices, table.nin)
        for count in rows or (1, 2 * key.rows + 1, 5 * key.rows):
            yield _call(key, meta, table.name, count, misaligned=count % 2 == 1, need_aux=True)
        if key.mode is Mode.MAX and key.direction is Direction.FORWARD:
            yield _call(key, meta, table.name, key.rows + 1, misaligned=False, need_aux=False)


def _call(key: KernelKey, meta: PoolMeta, table: str, rows: int, misaligned: bool, need_aux: bool) -> Call:
    dtype: torch.dtype = getattr(torch, key.dtype)
    x = adversarial_values(rows, meta.nin, dtype, seed=rows)
    y, aux = reference_forward(meta, x, key.mode, need_aux)
    inputs, expected = {"x": x}, {"y": y}
    if key.direction is Direction.FORWARD:
        if aux is not None:
            expected["aux"] = aux
    else:
        grad_y = adversarial_values(rows, meta.nout, dtype, seed=rows + 1)
        inputs, expected = {"grad_y": grad_y}, {"grad_x": reference_backward(meta, grad_y, aux, key.mode)}
        if aux is not None:
            inputs["aux"] = aux
    name = f"{table}, {rows} row(s){', misaligned' if misaligned else ''}{'' if need_aux else ', no aux'}"
    return Call(name, key, meta, rows, inputs, expected, misaligned)
