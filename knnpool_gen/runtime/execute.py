"""Pooling of CUDA tensors: outputs allocated, a kernel selected and launched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from knnpool_gen.kernel import AUX_ROWS
from knnpool_gen.reduction import Reduction
from knnpool_gen.reference import reverse_weights
from knnpool_gen.runtime import canary, capture
from knnpool_gen.runtime.aux_layout import AuxLayout, can_block_aux
from knnpool_gen.runtime.launch import device_facts, launch
from knnpool_gen.runtime.plan import PoolMeta, aux_dtype
from knnpool_gen.runtime.select import Problem, select
from knnpool_gen.vocabulary import Direction, Mode

WIDEST_ACCESS = 16
"""Bytes of the widest access to global memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """What specs and dispatch table call ``dtype``."""
    return str(dtype).removeprefix("torch.")


def aux_layout(meta: PoolMeta, x: Tensor, reduction: Reduction) -> AuxLayout:
    """The layout of aux that suits the forward and the backward of ``x`` both."""
    rows = math.prod(x.shape[:-1])
    if reduction.mode is not Mode.MAX or not x.is_cuda or rows % AUX_ROWS:
        return AuxLayout.ROWS
    facts = device_facts(x.device.index)
    problems = (problem_of(direction, meta, reduction, x.dtype, rows, True, True) for direction in Direction)
    blocks = all(can_block_aux(select(problem, facts).kernel) for problem in problems)
    return AuxLayout.BLOCKS if blocks else AuxLayout.ROWS


def forward(
    meta: PoolMeta,
    x: Tensor,
    reduction: Reduction,
    need_aux: bool,
    rs: int | None,
    layout: AuxLayout = AuxLayout.ROWS,
) -> tuple[Tensor, Tensor | None]:
    """Reduce every column of the table: :func:`knnpool_gen.reference.reference_forward`, as one kernel."""
    x = x.contiguous()
    shape = (*x.shape[:-1], meta.nout)
    tensors = {"x": x, "y": torch.empty(shape, dtype=x.dtype, device=x.device)}
    aux = None
    if need_aux and reduction.mode is Mode.MAX:
        blocks = (math.prod(x.shape[:-1]) // AUX_ROWS, meta.nout, AUX_ROWS)
        aux_shape = blocks if layout is AuxLayout.BLOCKS else shape
        aux = tensors["aux"] = torch.empty(aux_shape, dtype=aux_dtype(meta.k), device=x.device)
    outputs = [tensors["y"]] if aux is None else [tensors["y"], aux]
    _run(Direction.FORWARD, meta, reduction, tensors, outputs, math.prod(x.shape[:-1]), rs, layout)
    return tensors["y"], aux


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
    grad_x = torch.empty((*grad_y.shape[:-1], meta.nin), dtype=grad_y.dtype, device=grad_y.device)
    tensors = {"grad_y": grad_y, "grad_x": grad_x}
    if aux is not None:
        tensors["aux"] = aux.contiguous()
    _run(Direction.BACKWARD, meta, reduction, tensors, [grad_x], math.prod(grad_y.shape[:-1]), rs, layout)
    return grad_x


def _run(
    direction: Direction,
    meta: PoolMeta,
    reduction: Reduction,
    tensors: dict[str, Tensor],
    outputs: list[Tensor],
    rows: int,
    rs: int | None,
    layout: AuxLayout,
) -> None:
    """Select and launch; ``tensors`` holds what the call brings, by the names of the kernel's arguments."""
    device: int = outputs[0].device.index
    aligned = all(tensor.data_ptr() % WIDEST_ACCESS == 0 for tensor in tensors.values())
    problem = problem_of(direction, meta, reduction, outputs[0].dtype, rows, "aux" in tensors, aligned, layout)
    configuration = select(problem, device_facts(device), rs)
    if all(output.numel() == 0 for output in outputs):
        return
    values = {"rows": rows, "aux": 0, **{name: tensor.data_ptr() for name, tensor in tensors.items()}}
    for name in configuration.kernel.arguments:
        if name not in values:
            values[name] = table(meta, reduction, name).data_ptr()
    what = (configuration.kernel, configuration.macros, device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            capture.hold(meta)
            capture.hold(reduction.weights)
        if canary.due(what):
            name = configuration.kernel.name
            canary.check(what, name, outputs, lambda: launch(configuration, device, values))
        else:
            launch(configuration, device, values)


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
