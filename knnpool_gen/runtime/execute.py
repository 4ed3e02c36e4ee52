"""Pooling of CUDA tensors: outputs allocated, a kernel selected and launched."""

from __future__ import annotations

import torch
from torch import Tensor

from knnpool_gen.runtime import canary
from knnpool_gen.runtime.launch import device_facts, launch
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.runtime.select import Configuration, Problem, select
from knnpool_gen.vocabulary import Direction, Mode


def dtype_name(dtype: torch.dtype) -> str:
    """What specs and dispatch table call ``dtype``."""
    return str(dtype).removeprefix("torch.")


def forward(meta: PoolMeta, x: Tensor, mode: Mode, need_aux: bool, rs: int | None) -> tuple[Tensor, Tensor | None]:
    """Pool ``x`` ``[..., Nin]`` on its device; see :func:`knnpool_gen.pool_forward`."""
    x = x.contiguous()
    shape = (*x.shape[:-1], meta.nout)
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    aux = torch.empty(shape, dtype=torch.uint8, device=x.device) if need_aux and mode is Mode.MAX else None
    outputs = {"y": y} if aux is None else {"y": y, "aux": aux}
    _run(Direction.FORWARD, meta, mode, x.dtype, _rows(x), {"x": x}, outputs, rs)
    return y, aux


def backward(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, mode: Mode, rs: int | None) -> Tensor:
    """The gradient ``[..., Nin]`` of what was pooled; see :func:`knnpool_gen.pool_backward`."""
    grad_y = grad_y.contiguous()
    inputs = {"grad_y": grad_y} if aux is None else {"grad_y": grad_y, "aux": aux.contiguous()}
    grad_x = torch.empty((*grad_y.shape[:-1], meta.nin), dtype=grad_y.dtype, device=grad_y.device)
    _run(Direction.BACKWARD, meta, mode, grad_y.dtype, _rows(grad_y), inputs, {"grad_x": grad_x}, rs)
    return grad_x


def _rows(tensor: Tensor) -> int:
    rows = 1
    for size in tensor.shape[:-1]:
        rows *= size
    return rows


def _run(
    direction: Direction,
    meta: PoolMeta,
    mode: Mode,
    dtype: torch.dtype,
    rows: int,
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    rs: int | None,
) -> None:
    device = next(iter(outputs.values())).device.index
    problem = Problem(direction, mode, dtype_name(dtype), meta.k, meta.nin, meta.nout, rows, aux="aux" in outputs)
    configuration = select(problem, device_facts(device), rs)
    if all(output.numel() == 0 for output in outputs.values()):
        return
    values = _addresses(configuration, meta, {**inputs, **outputs}, rows)
    what = (configuration.kernel, configuration.macros, device)
    with torch.cuda.device(device):
        if canary.due(what):
            canary.check(
                what,
                configuration.kernel.name,
                list(outputs.values()),
                lambda: launch(configuration, device, values),
            )
        else:
            launch(configuration, device, values)


def _addresses(configuration: Configuration, meta: PoolMeta, tensors: dict[str, Tensor], rows: int) -> dict[str, int]:
    """A value for every argument of the kernel: the call's tensors by name, the rest from the plan."""
    values = {"rows": rows, "aux": 0, **{name: tensor.data_ptr() for name, tensor in tensors.items()}}
    for name in configuration.kernel.arguments:
        if name not in values:
            values[name] = getattr(meta, name).data_ptr()
    return values
