"""Pooling of CUDA tensors: outputs allocated, a kernel selected and launched."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.kernel import AUX_ROWS
from knnpool_gen.reduction import Reduction
from knnpool_gen.reference import reverse_weights
from knnpool_gen.runtime import canary, capture
from knnpool_gen.runtime.aux_layout import AuxLayout, can_block_aux
from knnpool_gen.runtime.launch import can_overlap, compile_ahead, device_facts, fitted, load, start
from knnpool_gen.runtime.plan import PoolMeta, aux_dtype
from knnpool_gen.runtime.select import Configuration, Problem, select
from knnpool_gen.vocabulary import Direction, Mode

T = TypeVar("T")
Owner = TypeVar("Owner")

WIDEST_ACCESS = 16
"""Bytes of the widest access to global memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """What specs and dispatch table call ``dtype``."""
    return str(dtype).removeprefix("torch.")


_layouts: weakref.WeakKeyDictionary[PoolMeta, dict[object, AuxLayout]] = weakref.WeakKeyDictionary()


def aux_layout(meta: PoolMeta, x: Tensor, reduction: Reduction) -> AuxLayout:
    """The layout of aux that suits the forward and the backward of ``x`` both."""
    rows = math.prod(x.shape[:-1])
    if reduction.mode is not Mode.MAX or not x.is_cuda or rows % AUX_ROWS:
        return AuxLayout.ROWS
    key = (x.dtype, rows, reduction.omit_nan, x.get_device())
    of_plan = _layouts.get(meta)
    found = None if of_plan is None else of_plan.get(key)
    if found is None:
        facts = device_facts(x.get_device())
        problems = (problem_of(direction, meta, reduction, x.dtype, rows, True, True) for direction in Direction)
        blocks = all(can_block_aux(select(problem, facts).kernel) for problem in problems)
        found = AuxLayout.BLOCKS if blocks else AuxLayout.ROWS
        _keep(_layouts, meta, key, found)
    return found


def forward(
    meta: PoolMeta,
    x: Tensor,
    reduction: Reduction,
    need_aux: bool,
    rs: int | None,
    layout: AuxLayout = AuxLayout.ROWS,
) -> tuple[Tensor, Tensor | None]:
    """Reduce every column of the table: :func:`knnpool_gen.reference.reference_forward`, as one kernel.

    ``need_aux`` says that a backward follows, in every mode; its kernel is compiled at the same time.
    """
    x = x.contiguous()
    outer = x.shape[:-1]
    y = x.new_empty((*outer, meta.nout))
    if not (need_aux and reduction.mode is Mode.MAX):
        _run(Direction.FORWARD, meta, reduction, {"x": x, "y": y}, (y,), math.prod(outer), rs, layout, need_aux)
        return y, None
    rows = math.prod(outer)
    shape = (rows // AUX_ROWS, meta.nout, AUX_ROWS) if layout is AuxLayout.BLOCKS else y.shape
    aux = x.new_empty(shape, dtype=aux_dtype(meta.k))
    _run(Direction.FORWARD, meta, reduction, {"x": x, "y": y, "aux": aux}, (y, aux), rows, rs, layout, need_aux)
    return y, aux


def backward(
    meta: PoolMeta,
    grad_y: Tensor,
    aux: Tensor | None,
    reduction: Reduction,
    rs: int | None,
    layout: AuxLayout = AuxLayout.ROWS,
) -> Tensor:
    """Send the gradient back: :func:`knnpool_gen.reference.reference_backward`, as one kernel."""
    grad_y = grad_y.contiguous()
    outer = grad_y.shape[:-1]
    grad_x = grad_y.new_empty((*outer, meta.nin))
    tensors = {"grad_y": grad_y, "grad_x": grad_x}
    if aux is not None:
        tensors["aux"] = aux.contiguous()
    _run(Direction.BACKWARD, meta, reduction, tensors, (grad_x,), math.prod(outer), rs, layout)
    return grad_x


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A loaded kernel for calls that differ in their tensors only."""

    configuration: Configuration
    function: int
    arguments: tuple[int, ...]
    """Addresses of tables, the number of rows, and 0 for what the call brings."""
    brought: tuple[tuple[int, str], ...]
    """Places of the tensors that the call brings, and their names."""
    overlaps: bool
    """Whether it can come up before the kernel ahead of it has ended."""


_prepared: weakref.WeakKeyDictionary[object, dict[object, _Prepared]] = weakref.WeakKeyDictionary()
"""By what the addresses belong to: the weights if there are any, otherwise the plan. It must outlive its kernels'
arguments, hence is not kept alive by them."""
MOST_PREPARED = 64
"""Kernels prepared for one plan: as many as it has batch sizes, dtypes and options in use."""


def _keep(kept: weakref.WeakKeyDictionary[Owner, dict[object, T]], owner: Owner, key: object, value: T) -> None:
    """Keep ``value`` as long as ``owner`` lives, or until that has too many."""
    of_owner = kept.setdefault(owner, {})
    if len(of_owner) >= MOST_PREPARED:
        of_owner.clear()
    of_owner[key] = value


def forget_prepared() -> None:
    """Choose and load again at the next call."""
    _prepared.clear()
    _layouts.clear()


def _run(
    direction: Direction,
    meta: PoolMeta,
    reduction: Reduction,
    tensors: dict[str, Tensor],
    outputs: tuple[Tensor, ...],
    rows: int,
    rs: int | None,
    layout: AuxLayout,
    backward_follows: bool = False,
) -> None:
    """Select and launch; ``tensors`` holds what the call brings, by the names of the kernel's arguments."""
    output = outputs[0]
    device: int = output.get_device()
    if torch.cuda.current_device() != device:  # whose stream is asked about, captured or not
        with torch.cuda.device(device):
            return _run(direction, meta, reduction, tensors, outputs, rows, rs, layout, backward_follows)
    addresses: dict[str, int] = {}
    every = 0
    for name, tensor in tensors.items():  # no comprehensions: this is what a call takes
        addresses[name] = address = tensor.data_ptr()
        every |= address
    aligned = every % WIDEST_ACCESS == 0
    how = reduction if reduction.plain else (reduction.mode, reduction.omit_nan, reduction.normalize)
    blocks = layout is AuxLayout.BLOCKS
    key = (direction is Direction.FORWARD, how, output.dtype, rows, "aux" in addresses, aligned, blocks, rs, device)
    of_owner = _prepared.get(reduction.weights or meta)
    prepared = None if of_owner is None else of_owner.get(key)
    if prepared is None:
        problem = problem_of(direction, meta, reduction, output.dtype, rows, "aux" in tensors, aligned, layout)
        configuration = select(problem, device_facts(device), rs)
        if not any(output.numel() for output in outputs):
            return None
        if backward_follows and rs is None and not reduction.backward_reads_x:  # with that, by several kernels
            follows = replace(problem, direction=Direction.BACKWARD, aligned=True)  # gradients are tensors of their own
            compile_ahead(select(follows, device_facts(device)), device)
        prepared = _prepare(configuration, meta, reduction, addresses, rows, device)
        _keep(_prepared, reduction.weights or meta, key, prepared)
    arguments = list(prepared.arguments)
    for place, name in prepared.brought:
        arguments[place] = addresses[name]
    capturing = torch.cuda.is_current_stream_capturing()
    _start(prepared, arguments, outputs, device, prepared.overlaps and not capturing)  # graphs are replayed anywhere
    if capturing:
        capture.hold(meta)
        capture.hold(reduction.weights)
    return None


def _prepare(
    configuration: Configuration,
    meta: PoolMeta,
    reduction: Reduction,
    addresses: dict[str, int],
    rows: int,
    device: int,
) -> _Prepared:
    def argument(name: str) -> int:
        if name == "rows":
            return rows
        if name in addresses or name == "aux":
            return 0
        found = table(meta, reduction, name)
        if found.get_device() != device:
            raise InvalidArgumentError(f"{name} is on {found.device}, the values on cuda:{device}")
        return found.data_ptr()

    names = configuration.kernel.arguments
    arguments = tuple(argument(name) for name in names)
    brought = tuple((place, name) for place, name in enumerate(names) if name in addresses)
    function = load(configuration, device)
    configuration = fitted(configuration, function, device)
    return _Prepared(configuration, function, arguments, brought, can_overlap(device))


def _start(prepared: _Prepared, arguments: list[int], outputs: tuple[Tensor, ...], device: int, overlap: bool) -> None:
    """Launch; where that is due, find out whether the kernel writes everything."""
    function, configuration = prepared.function, prepared.configuration
    if not canary.due(function):
        start(function, configuration, device, arguments, overlap)
        return
    canary.check(
        function, configuration.kernel.name, outputs, lambda: start(function, configuration, device, arguments, overlap)
    )


def problem_of(
    direction: Direction,
    meta: PoolMeta,
    reduction: Reduction,
    dtype: torch.dtype,
    rows: int,
    need_aux: bool,
    aligned: bool,
    layout: AuxLayout = AuxLayout.ROWS,
) -> Problem:
    """What the choice of a kernel depends on."""
    return Problem(
        direction=direction,
        mode=reduction.mode,
        dtype=dtype_name(dtype),
        k=meta.k,
        nin=meta.nin,
        nout=meta.nout,
        rows=rows,
        need_aux=need_aux,
        omit_nan=reduction.omit_nan,
        normalize=reduction.normalize,
        index_bytes=meta.gather_indices.element_size(),
        slot_bytes=meta.first_slot.element_size(),
        entry_bytes=meta.rev_kn.element_size(),
        aligned=aligned,
        blocked_aux=layout is AuxLayout.BLOCKS,
    )


def table(meta: PoolMeta, reduction: Reduction, name: str) -> Tensor:
    """The table, of the plan or of the weights, that the kernel argument ``name`` points to."""
    if name == "weights" and reduction.weights is not None:
        return reduction.weights.weights
    if name == "rev_weights":
        return reverse_weights(reduction)
    found: Tensor = getattr(meta, "gather_indices" if name == "indices" else name)
    return found
