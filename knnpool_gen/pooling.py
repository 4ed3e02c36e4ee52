"""Pooling without gradients: arguments checked, then the reference for CPU tensors, the kernels for CUDA tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from knnpool_gen import reference
from knnpool_gen.errors import InvalidArgumentError, UnknownModeError, UnsupportedTypeError
from knnpool_gen.runtime import execute
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.runtime.select import all_tile_heights, check_tile_height
from knnpool_gen.vocabulary import Mode

MODES = (Mode.MAX, Mode.AVG)
"""What can be computed."""
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What can be pooled: all of them by the reference, on CUDA those that have kernels."""


def pool_forward(
    meta: PoolMeta, x: Tensor, mode: str, rs: int | None = None, need_aux: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Pool ``x`` over the neighbourhoods of ``meta``. Records no gradient: see :func:`knnpool_gen.pool_function`.

    Args:
        meta: the plan of the neighbour table, on the device of ``x``.
        x: ``[..., Nin]``, usually ``[B, C, Nin]``; float16, bfloat16, float32 or float64; any strides.
        mode: ``"max"`` (NaN never wins; -inf for an empty column) or ``"avg"`` (NaN for an empty column).
        rs: rows of a tile, one of those that have a variant; chosen from the problem if None.
        need_aux: for ``"max"``, also return the winning slots, which :func:`pool_backward` needs.

    Returns:
        ``(y, aux)``: ``y`` ``[..., Nout]`` in the dtype of ``x``; ``aux`` ``[..., Nout]`` uint8, the first slot that
        holds the maximum, 255 for an empty column, or None.

    Raises:
        InvalidArgumentError: a size, device, mode or ``rs`` does not fit; names both sides.
        UnsupportedTypeError: not a tensor of a supported dtype.
        KernelError: the kernel cannot be compiled or loaded.
    """
    chosen = _mode(mode)
    _check_tensor("x", x, meta.nin, "Nin", meta)
    _check_rs(rs)
    with torch.no_grad():
        if x.is_cuda:
            return execute.forward(meta, x, chosen, need_aux, rs)
        return reference.reference_forward(meta, x, chosen, need_aux)


def pool_backward(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, mode: str, rs: int | None = None) -> Tensor:
    """The gradient with respect to the input of :func:`pool_forward`. Records no gradient itself.

    Args:
        meta: the plan that the forward used.
        grad_y: ``[..., Nout]``, any strides.
        aux: what the forward returned; required for ``"max"``, ignored otherwise.
        mode: as in the forward.
        rs: rows of a tile; chosen from the problem if None.

    Returns:
        ``[..., Nin]`` in the dtype of ``grad_y``; accumulated in float32 (float64 for float64) in the order of the
        reverse table and rounded once, so the bits are the same on every run.

    Raises:
        InvalidArgumentError, UnsupportedTypeError, KernelError: as :func:`pool_forward`; also for an ``aux`` that is
            missing or has another shape, dtype or device than ``grad_y`` asks for.
    """
    chosen = _mode(mode)
    _check_tensor("grad_y", grad_y, meta.nout, "Nout", meta)
    _check_rs(rs)
    winners = _check_aux(aux, grad_y) if chosen is Mode.MAX else None
    with torch.no_grad():
        if grad_y.is_cuda:
            return execute.backward(meta, grad_y, winners, chosen, rs)
        return reference.reference_backward(meta, grad_y, winners, chosen)


def _mode(mode: str) -> Mode:
    for known in MODES:
        if mode == known.value:
            return known
    raise UnknownModeError(f"mode = {mode!r}; there are {', '.join(repr(known.value) for known in MODES)}")


def _check_rs(rs: int | None) -> None:
    if rs is not None:
        check_tile_height(rs, all_tile_heights())


def _check_tensor(name: str, tensor: Tensor, nodes: int, size_name: str, meta: PoolMeta) -> None:
    if not isinstance(tensor, Tensor):
        raise UnsupportedTypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.dtype not in DTYPES:
        supported = ", ".join(execute.dtype_name(dtype) for dtype in DTYPES)
        raise UnsupportedTypeError(f"{name} has dtype {execute.dtype_name(tensor.dtype)}; supported: {supported}")
    if tensor.dim() == 0 or tensor.shape[-1] != nodes:
        last = tensor.shape[-1] if tensor.dim() else "no dimension"
        raise InvalidArgumentError(
            f"{name} has shape {tuple(tensor.shape)}, its last dimension {last}; the plan has {size_name} = {nodes}"
        )
    if tensor.device != meta.device:
        raise InvalidArgumentError(f"{name} is on {tensor.device}, the plan on {meta.device}")


def _check_aux(aux: Tensor | None, grad_y: Tensor) -> Tensor:
    if aux is None:
        raise InvalidArgumentError("mode 'max' needs aux, the winning slots: call pool_forward with need_aux=True")
    if not isinstance(aux, Tensor):
        raise UnsupportedTypeError(f"aux is a {type(aux).__name__}, not a torch.Tensor")
    if aux.dtype != torch.uint8:
        raise UnsupportedTypeError(f"aux has dtype {execute.dtype_name(aux.dtype)}; wanted uint8")
    if aux.shape != grad_y.shape:
        raise InvalidArgumentError(f"aux has shape {tuple(aux.shape)}, grad_y {tuple(grad_y.shape)}")
    if aux.device != grad_y.device:
        raise InvalidArgumentError(f"aux is on {aux.device}, grad_y on {grad_y.device}")
    return aux
