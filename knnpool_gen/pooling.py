"""Pooling without gradients: arguments checked, then the reference for CPU tensors, the kernels for CUDA tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.reduction import Reduction, accumulate_dtype, make_reduction
from knnpool_gen.reference import reference_backward, reference_forward
from knnpool_gen.runtime import execute
from knnpool_gen.runtime.aux_layout import AuxLayout
from knnpool_gen.runtime.plan import PoolMeta, aux_dtype, check_dense
from knnpool_gen.runtime.select import all_tile_heights, check_tile_height
from knnpool_gen.runtime.weights import EPSILON
from knnpool_gen.vocabulary import Mode

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What can be pooled."""


def pool_forward(
    meta: PoolMeta,
    x: Tensor,
    mode: str,
    rs: int | None = None,
    need_aux: bool = True,
    *,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Pool ``x`` over the neighbourhoods of ``meta``. Records no gradient: see :func:`knnpool_gen.pool_function`.

    Args:
        meta: the plan of the neighbour table, on the device of ``x``.
        x: ``[..., Nin]``, usually ``[B, C, Nin]``; float16, bfloat16, float32 or float64; any strides.
        mode: ``"max"``, ``"avg"``, ``"sum"`` or ``"weighted"``. An empty column gives -inf, NaN, 0 and 0.
        rs: rows of a tile, one of those that have a variant; chosen from the problem if None.
        need_aux: for ``"max"``, also return the winning slots, which :func:`pool_backward` needs.
        nan: ``"omit"`` leaves NaN out, of counts and sums of weights too; ``"propagate"`` makes the result NaN. The
            default is omit for max, propagate otherwise.
        empty_value: the value of an empty column instead.
        weights: for ``"weighted"``, ``[K, Nout]``; those of pads are never read.
        normalize_weights: divide by (the sum of the weights used + 1e-8).

    Returns:
        ``(y, aux)``: ``y`` ``[..., Nout]`` in the dtype of ``x``; ``aux`` ``[..., Nout]``, the first slot that holds
        the maximum, or None. ``aux`` is uint8 with 255 for an empty column while K is at most 255, then int16 and
        int32 with -1.

    Raises:
        InvalidArgumentError: a size, device, mode, option or ``rs`` does not fit; names both sides.
        UnsupportedTypeError: not a tensor of a supported dtype.
        KernelError: the kernel cannot be compiled or loaded.
    """
    check_input(meta, x)
    _check_rs(rs)
    reduction = make_reduction(meta, x.dtype, mode, nan, empty_value, weights, normalize_weights)
    return forward(meta, x, reduction, need_aux and reduction.mode is Mode.MAX, rs)


def pool_backward(
    meta: PoolMeta,
    grad_y: Tensor,
    aux: Tensor | None,
    mode: str,
    rs: int | None = None,
    *,
    nan: str | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
    x: Tensor | None = None,
) -> Tensor:
    """The gradient with respect to the input of :func:`pool_forward`. Records no gradient itself.

    Args:
        meta: the plan that the forward used.
        grad_y: ``[..., Nout]``, any strides.
        aux: what the forward returned; required for ``"max"``, ignored otherwise. Its values are not checked, as that
            would wait for the device: a slot that holds no input, or that the table does not have, has not won
            anything, so its output gives no gradient, like an empty column.
        mode, nan, weights, normalize_weights: as in the forward.
        rs: rows of a tile; chosen from the problem if None.
        x: the input of the forward; required for ``nan="omit"`` in all modes but max, ignored otherwise.

    Returns:
        ``[..., Nin]`` in the dtype of ``grad_y``; accumulated in float32 (float64 for float64) in the order of the
        reverse table and rounded once, so the bits are the same on every run.

    Raises:
        InvalidArgumentError, UnsupportedTypeError, KernelError: as :func:`pool_forward`; also for an ``aux`` or ``x``
            that is missing or has another shape, dtype or device than ``grad_y`` asks for.
    """
    check_plan(meta)
    if isinstance(grad_y, Tensor):
        check_dense("grad_y", grad_y)
    _check_tensor("grad_y", grad_y, meta.nout, "Nout", meta)
    _check_rs(rs)
    reduction = make_reduction(meta, grad_y.dtype, mode, nan, None, weights, normalize_weights)
    aux = _check_aux(aux, grad_y, meta) if reduction.mode is Mode.MAX else None
    if reduction.backward_reads_x:
        x = _check_x(x, grad_y, meta)
    return backward(meta, grad_y, aux, reduction, x, rs)


def check_plan(meta: PoolMeta) -> None:
    """Raise unless ``meta`` is a plan; the table itself is what people give instead."""
    if not isinstance(meta, PoolMeta):
        raise UnsupportedTypeError(
            f"meta is a {type(meta).__name__}, not a PoolMeta: build one with pool_meta_from_indices(indices, nin)"
        )


def check_input(meta: PoolMeta, x: Tensor) -> None:
    """Raise unless ``x`` is a tensor that ``meta`` can pool."""
    check_plan(meta)
    _check_tensor("x", x, meta.nin, "Nin", meta)


def check_kind(name: str, tensor: Tensor) -> None:
    """Raise unless ``tensor`` is of a kind that can be pooled, whatever its size."""
    if not isinstance(tensor, Tensor):
        raise UnsupportedTypeError(f"{name} is a {type(tensor).__name__}, not a torch.Tensor")
    if tensor.dtype not in DTYPES:
        raise UnsupportedTypeError(f"{name} has dtype {execute.dtype_name(tensor.dtype)}; supported: {_supported()}")


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless values of ``dtype`` can be pooled."""
    if dtype not in DTYPES:
        shown = execute.dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise UnsupportedTypeError(f"dtype is {shown}; supported: {_supported()}")


def _supported() -> str:
    return ", ".join(execute.dtype_name(dtype) for dtype in DTYPES)


def forward(
    meta: PoolMeta,
    x: Tensor,
    reduction: Reduction,
    need_aux: bool,
    rs: int | None = None,
    layout: AuxLayout = AuxLayout.ROWS,
) -> tuple[Tensor, Tensor | None]:
    """:func:`pool_forward` with arguments that are known to be good; ``layout`` is that of aux.

    ``need_aux`` also says that a backward follows, in modes that have no aux as well.
    """
    if x.requires_grad and torch.is_grad_enabled():
        x = x.detach()  # what is made from it records no gradient, then
    if x.is_cuda:
        y, aux = execute.forward(meta, x, reduction, need_aux, rs, layout)
    else:
        y, aux = reference_forward(meta, x, reduction, need_aux)
    if reduction.empty_value is not None:
        y.index_fill_(-1, meta.empty_columns, reduction.empty_value)
    return y, aux


def backward(
    meta: PoolMeta,
    grad_y: Tensor,
    aux: Tensor | None,
    reduction: Reduction,
    x: Tensor | None,
    rs: int | None = None,
    layout: AuxLayout = AuxLayout.ROWS,
) -> Tensor:
    """:func:`pool_backward` with arguments that are known to be good; ``layout`` is that of ``aux``."""
    if grad_y.is_cuda and not reduction.backward_reads_x:  # a kernel records no gradient
        return execute.backward(meta, grad_y, aux, reduction, rs, layout)
    with torch.no_grad():
        if reduction.backward_reads_x and x is not None:
            return _backward_without_nan(meta, grad_y, reduction, x, rs)
        return reference_backward(meta, grad_y, aux, reduction)


def _backward_without_nan(meta: PoolMeta, grad_y: Tensor, reduction: Reduction, x: Tensor, rs: int | None) -> Tensor:
    """The gradient where NaN inputs were left out: they get none, and what a sum was divided by differs by row."""
    size = divisor_without_nan(meta, x, reduction, accumulate_dtype(grad_y.dtype))
    if size is None:
        grad_x = backward(meta, grad_y, None, undivided(reduction), None, rs)
    else:  # in a wider dtype, for which rs was not meant
        share = grad_y.to(size.dtype) / size
        grad_x = backward(meta, share, None, undivided(reduction), None).to(grad_y.dtype)
    return grad_x.masked_fill_(x.isnan(), 0)


def undivided(reduction: Reduction) -> Reduction:
    """The sum in ``reduction``, of all its terms and before it is divided by anything."""
    mode = Mode.SUM if reduction.mode is Mode.AVG else reduction.mode
    return replace(reduction, mode=mode, omit_nan=False, normalize=False, empty_value=None)


def divisor_without_nan(meta: PoolMeta, x: Tensor, reduction: Reduction, dtype: torch.dtype) -> Tensor | None:
    """What each sum is divided by where NaN inputs are left out, ``[..., Nout]`` in ``dtype``; None if by nothing."""
    if reduction.mode is not Mode.AVG and not reduction.normalize:
        return None
    # Left out here too, not multiplied by 0: their weights may be anything.
    used = torch.ones_like(x, dtype=dtype).masked_fill_(x.isnan(), torch.nan)
    size, _ = forward(meta, used, replace(undivided(reduction), omit_nan=True), False)
    return size + EPSILON if reduction.normalize else size


def _check_rs(rs: int | None) -> None:
    if rs is not None:
        check_tile_height(rs, all_tile_heights())


def _check_tensor(name: str, tensor: Tensor, nodes: int, size_name: str, meta: PoolMeta) -> None:
    check_kind(name, tensor)
    if tensor.dim() == 0 or tensor.shape[-1] != nodes:
        last = tensor.shape[-1] if tensor.dim() else "no dimension"
        raise InvalidArgumentError(
            f"{name} has shape {tuple(tensor.shape)}, its last dimension {last}; the plan has {size_name} = {nodes}"
        )
    if tensor.device != meta.device:
        raise InvalidArgumentError(f"{name} is on {tensor.device}, the plan on {meta.device}")


def _check_aux(aux: Tensor | None, grad_y: Tensor, meta: PoolMeta) -> Tensor:
    if aux is None:
        raise InvalidArgumentError("mode 'max' needs aux, the winning slots: call pool_forward with need_aux=True")
    if not isinstance(aux, Tensor):
        raise UnsupportedTypeError(f"aux is a {type(aux).__name__}, not a torch.Tensor")
    check_dense("aux", aux)
    wanted = aux_dtype(meta.k)
    if aux.dtype != wanted:
        raise UnsupportedTypeError(
            f"aux has dtype {execute.dtype_name(aux.dtype)}; wanted {execute.dtype_name(wanted)} for K = {meta.k}"
        )
    if aux.shape != grad_y.shape:
        raise InvalidArgumentError(f"aux has shape {tuple(aux.shape)}, grad_y {tuple(grad_y.shape)}")
    if aux.device != grad_y.device:
        raise InvalidArgumentError(f"aux is on {aux.device}, grad_y on {grad_y.device}")
    return aux


def _check_x(x: Tensor | None, grad_y: Tensor, meta: PoolMeta) -> Tensor:
    if x is None:
        raise InvalidArgumentError("nan = 'omit' needs x, the input of the forward, to know what was left out")
    _check_tensor("x", x, meta.nin, "Nin", meta)
    if x.shape[:-1] != grad_y.shape[:-1]:
        raise InvalidArgumentError(f"x has shape {tuple(x.shape)}, grad_y {tuple(grad_y.shape)}")
    return x
