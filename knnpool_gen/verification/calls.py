"""What a kernel is verified with: inputs, and the outputs the reference says they must give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import AUX_ROWS, KernelKey
from knnpool_gen.reduction import Reduction, make_reduction
from knnpool_gen.reference import reference_backward, reference_forward
from knnpool_gen.runtime.aux_layout import AuxLayout, block_aux, can_block_aux
from knnpool_gen.runtime.execute import problem_of
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import Problem
from knnpool_gen.verification.tables import Table, adversarial_values
from knnpool_gen.vocabulary import Direction, Mode, NanRule


@dataclass(frozen=True)
class Call:
    """One call of one kernel, on the CPU; tensors by the names of the kernel's arguments."""

    name: str
    key: KernelKey
    meta: PoolMeta
    rows: int
    options: dict[str, str | bool | Tensor]
    """Keyword options of the public functions."""
    reduction: Reduction
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    misaligned: bool
    """Whether the call's tensors begin one element past an aligned address."""
    layout: AuxLayout = AuxLayout.ROWS
    """How aux lies in memory."""

    @property
    def problem(self) -> Problem:
        """What the choice of a configuration depends on."""
        dtype: torch.dtype = getattr(torch, self.key.dtype)
        need_aux = "aux" in self.expected
        return problem_of(
            self.key.direction,
            self.meta,
            self.reduction,
            dtype,
            self.rows,
            need_aux,
            not self.misaligned,
            self.layout,
        )


def calls(key: KernelKey, tables: Iterable[Table], rows: Sequence[int] | None = None) -> Iterator[Call]:
    """Calls of the kernel ``key``: each table with each number of rows and each set of options, aligned and not."""
    for table in tables:
        meta = pool_meta_from_indices(table.indices, table.nin)
        for count in rows or (1, 2 * key.rows + 1, 5 * key.rows):
            for number, options in enumerate(_options(key, meta)):
                yield _call(key, meta, table.name, count, options, misaligned=(count + number) % 2 == 1)
        if key.mode is Mode.MAX and key.direction is Direction.FORWARD:
            yield _call(key, meta, table.name, key.rows + 1, {}, misaligned=False, need_aux=False)
        if can_block_aux(KERNELS[key]):
            yield _call(key, meta, table.name, 3 * AUX_ROWS, {}, misaligned=False, layout=AuxLayout.BLOCKS)


def _options(key: KernelKey, meta: PoolMeta) -> Iterator[dict[str, str | bool | Tensor]]:
    """Every set of options that the kernel ``key`` itself carries out."""
    rules = list(NanRule) if key.direction is Direction.FORWARD or key.mode is Mode.MAX else [NanRule.PROPAGATE]
    for rule in rules:
        if key.mode is not Mode.WEIGHTED:
            yield {"nan": rule.value}
            continue
        generator = torch.Generator().manual_seed(meta.k)
        weights = torch.rand(meta.k, meta.nout, generator=generator).masked_fill(meta.indices >= meta.nin, torch.nan)
        for normalize in (False, True):
            yield {"nan": rule.value, "weights": weights, "normalize_weights": normalize}


def _call(
    key: KernelKey,
    meta: PoolMeta,
    table: str,
    rows: int,
    options: dict[str, str | bool | Tensor],
    misaligned: bool,
    need_aux: bool = True,
    layout: AuxLayout = AuxLayout.ROWS,
) -> Call:
    dtype: torch.dtype = getattr(torch, key.dtype)
    reduction = make_reduction(meta, dtype, key.mode.value, **options)  # type: ignore[arg-type]
    x = adversarial_values(rows, meta.nin, dtype, seed=rows)
    y, aux = reference_forward(meta, x, reduction, need_aux)
    inputs, expected = {"x": x}, {"y": y}
    if key.direction is Direction.FORWARD:
        if aux is not None:
            expected["aux"] = aux
    else:
        grad_y = adversarial_values(rows, meta.nout, dtype, seed=rows + 1)
        inputs, expected = {"grad_y": grad_y}, {"grad_x": reference_backward(meta, grad_y, aux, reduction)}
        if aux is not None:
            inputs["aux"] = aux
    if aux is not None and layout is AuxLayout.BLOCKS:
        for tensors in (inputs, expected):
            tensors.update({"aux": block_aux(aux)} if "aux" in tensors else {})
    shown = [f"{name}={value}" for name, value in options.items() if not isinstance(value, Tensor)]
    name = ", ".join(
        [
            table,
            f"{rows} row(s)",
            *shown,
            *["misaligned"] * misaligned,
            *["no aux"] * (not need_aux),
            *["aux in blocks"] * (layout is AuxLayout.BLOCKS),
        ]
    )
    return Call(name, key, meta, rows, options, reduction, inputs, expected, misaligned, layout)
