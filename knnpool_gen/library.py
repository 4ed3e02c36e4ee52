"""Pooling as operators of torch, for whoever looks at more than values: compilers, exporters, functorch, forward AD.

The operators are closed under differentiation of any order and kind. ``forward`` reduces the columns of a table,
``forward_max`` says which slots won as well, ``backward`` sends a gradient back to the inputs, and ``tangent``, its
transpose, takes a change of the inputs to the outputs. These two are linear: the derivative of each is itself, its
transpose the other. Both read what the forward left: the winning slots of max, or its input for ``nan="omit"``.

An operator takes the table and not its plan, whose very sizes depend on the values of the table, which nobody knows
while tracing. It looks the plan up when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from knnpool_gen import pooling
from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.reduction import Reduction, check_options, make_reduction, rounded
from knnpool_gen.runtime.plan import (
    PoolMeta,
    aux_dtype,
    check_dense,
    check_has_values,
    check_table,
    plan_for,
    plan_of_own_table,
)
from knnpool_gen.runtime.table_cache import same_table
from knnpool_gen.runtime.weights import check_weights
from knnpool_gen.tangent import tangent
from knnpool_gen.vocabulary import Mode

LARGEST = torch.finfo(torch.float64).max
"""The greatest whole number that a schema takes for a float."""

_library: Any = torch.library.Library("knnpool", "DEF")  # type: ignore[no-untyped-call]
_ops = torch.ops.knnpool

# What `backward` and `tangent` have to know of a forward: first the tensors, then the rest.
_FORWARD = "Tensor? aux, Tensor? x, Tensor indices, Tensor? weights, SymInt nin, str mode, str? nan, bool normalize"
_SCHEMAS = (
    "forward(Tensor x, Tensor indices, Tensor? weights, str mode, str? nan, bool normalize, float? empty_value)"
    " -> Tensor",
    "forward_max(Tensor x, Tensor indices, str? nan, float? empty_value) -> (Tensor, Tensor)",
    f"backward(Tensor grad_y, {_FORWARD}) -> Tensor",
    f"tangent(Tensor change, {_FORWARD}) -> Tensor",
)
_KEPT_TENSORS = 4
_Function = Callable[..., Any]

for _schema in _SCHEMAS:
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# Bound once, for `watched` is asked at every call.
_transforms_active = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_ORDINARY = (Tensor, torch.nn.Parameter)
_STRIDED = torch.strided


def watched(x: Tensor) -> bool:
    """Whether pooling ``x`` takes an operator: more than plain autograd looks on, or ``x`` is no ordinary tensor."""
    return (
        is_compiling()  # first: it is all that a compiler is to see of this
        or forward_ad._current_level >= 0
        or _transforms_active()
        or _dispatch_modes() > 0
        or type(x) not in _ORDINARY
        or x.layout is not _STRIDED
        or x.is_nested
        or x.is_meta
    )


def pool(
    x: Tensor,
    indices: Tensor,
    mode: str,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> Tensor:
    """What :func:`knnpool_gen.pool_function` computes, through the operators."""
    _check_dense(x)
    _check_types(indices, mode, nan, weights, normalize_weights)
    empty_value = _number(empty_value, x.dtype)
    y: Tensor = _ops.forward.default(x, indices, weights, mode, nan, normalize_weights, empty_value)
    return y


def pool_max(x: Tensor, indices: Tensor, nan: str | None, empty_value: float | None) -> tuple[Tensor, Tensor]:
    """The maxima, and the slots that won as ``aux`` of :func:`knnpool_gen.pool_forward` has them."""
    _check_dense(x)
    empty_value = _number(empty_value, x.dtype)
    y, slots = _ops.forward_max.default(x, indices, nan, empty_value)
    return y, slots


def _check_dense(x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
        raise UnsupportedTypeError(f"x is {kind}; wanted a dense tensor [..., Nin]")


def _check_types(indices: object, mode: object, nan: object, weights: object, normalize_weights: object) -> None:
    """Refuse what the operators have no schema or no backend for, in the words of eager calls and not in torch's."""
    check_table(indices)
    if not (isinstance(mode, str) and isinstance(nan, (str, type(None))) and isinstance(normalize_weights, bool)):
        check_options(mode, nan, weights, normalize_weights)
    if isinstance(weights, Tensor):
        check_dense("weights", weights)
    elif weights is not None:
        check_weights(weights, 0, 0)


def _number(empty_value: Any, dtype: torch.dtype) -> float | None:
    """``empty_value`` as the schema takes it; what it takes as it is stays as it is, so that compilers see through."""
    known = type(empty_value) in (type(None), float) or (type(empty_value) is int and abs(empty_value) <= LARGEST)
    return empty_value if known else rounded(empty_value, dtype)


def pull_back(grad_y: Tensor, aux: Tensor | None, x: Tensor | None, meta: PoolMeta, reduction: Reduction) -> Tensor:
    """The gradient of ``x`` for a plan in hand, itself differentiable; the plan's own table leads back to it."""
    weights = None if reduction.weights is None else reduction.weights.weights
    nan = "omit" if reduction.omit_nan else "propagate"
    of_forward = (aux, x, meta.indices, weights, meta.nin, reduction.mode.value, nan, reduction.normalize)
    grad_x: Tensor = _ops.backward.default(grad_y, *of_forward)
    return grad_x


# What runs.


def _tables(indices: Tensor, weights: Tensor | None, nin: int, device: torch.device) -> tuple[PoolMeta, Tensor | None]:
    """The plan, and the weights as the tensor that their derived tables are kept for."""
    plan = plan_of_own_table(indices)
    if plan is None or (plan.nin, plan.device) != (nin, device):
        plan = plan_for(same_table(indices), nin, device)
    return plan, None if weights is None else same_table(weights)


def _forward(
    x: Tensor,
    indices: Tensor,
    weights: Tensor | None,
    mode: str,
    nan: str | None,
    normalize: bool,
    empty_value: float | None,
) -> Tensor:
    meta, weights = _tables(indices, weights, x.shape[-1], x.device)
    options: dict[str, Any] = {"empty_value": empty_value, "weights": weights, "normalize_weights": normalize}
    return pooling.pool_forward(meta, x, mode, need_aux=False, nan=nan, **options)[0]


def _forward_max(
    x: Tensor, indices: Tensor, nan: str | None, empty_value: float | None
) -> tuple[Tensor, Tensor | None]:
    meta, _ = _tables(indices, None, x.shape[-1], x.device)
    return pooling.pool_forward(meta, x, "max", nan=nan, empty_value=empty_value)


def _backward(
    grad_y: Tensor,
    aux: Tensor | None,
    x: Tensor | None,
    indices: Tensor,
    weights: Tensor | None,
    nin: int,
    mode: str,
    nan: str | None,
    normalize: bool,
) -> Tensor:
    meta, weights = _tables(indices, weights, nin, grad_y.device)
    options: dict[str, Any] = {"weights": weights, "normalize_weights": normalize}
    return pooling.pool_backward(meta, grad_y, aux, mode, nan=nan, x=x, **options)


def _tangent(
    change: Tensor,
    aux: Tensor | None,
    x: Tensor | None,
    indices: Tensor,
    weights: Tensor | None,
    nin: int,
    mode: str,
    nan: str | None,
    normalize: bool,
) -> Tensor:
    meta, weights = _tables(indices, weights, nin, change.device)
    pooling.check_input(meta, change)
    reduction = make_reduction(meta, change.dtype, mode, nan, None, weights, normalize)
    return tangent(meta, change, aux, reduction, x)


# What tracing sees: sizes and types.


def _forward_shape(
    x: Tensor,
    indices: Tensor,
    weights: Tensor | None,
    mode: str,
    nan: str | None,
    normalize: bool,
    empty_value: float | None,
) -> Tensor:
    pooling.check_kind("x", x)
    check_options(mode, nan, weights, normalize)
    check_table(indices)
    if weights is not None:
        check_weights(weights, *indices.shape)
    if not x.is_meta:  # then nobody traces, and this is called for the sake of a table without values
        check_has_values("indices", indices, "the plan of a table")
        if weights is not None:
            check_has_values("weights", weights, "what is made of it")
    return x.new_empty((*x.shape[:-1], indices.shape[1]))


def _forward_max_shape(x: Tensor, indices: Tensor, nan: str | None, empty_value: float | None) -> tuple[Tensor, Tensor]:
    y = _forward_shape(x, indices, None, "max", nan, False, empty_value)
    return y, y.new_empty(y.shape, dtype=aux_dtype(indices.shape[0]))


def _backward_shape(
    grad_y: Tensor, aux: Tensor | None, x: Tensor | None, indices: Tensor, weights: Tensor | None, nin: int, *_: object
) -> Tensor:
    return grad_y.new_empty((*grad_y.shape[:-1], nin))


def _tangent_shape(change: Tensor, aux: Tensor | None, x: Tensor | None, indices: Tensor, *_: object) -> Tensor:
    return change.new_empty((*change.shape[:-1], indices.shape[1]))


# How they are differentiated and batched.


def _keep(ctx: Any, kept: tuple[Any, ...]) -> None:
    """Keep the arguments ``_FORWARD`` for a derivative of either kind."""
    tensors, ctx.options = kept[:_KEPT_TENSORS], kept[_KEPT_TENSORS:]
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _kept(ctx: Any) -> tuple[Any, ...]:
    return (*ctx.saved_tensors, *ctx.options)


def _in_front(tensor: Tensor | None, dim: int | None, size: int) -> Tensor | None:
    """``tensor`` with the batch dimension ``dim`` first; repeated where it has none."""
    if tensor is None:
        return None
    return tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _check_not_batched(**dims: int | None) -> None:
    for name, dim in dims.items():
        if dim is not None:
            raise InvalidArgumentError(f"vmap over {name}: every table has a plan of its own, so loop over them")


def _check_constant(differentiated: bool) -> None:
    if differentiated:
        raise InvalidArgumentError("weights are differentiated by a transform, which is not supported: detach them")


class _Forward(torch.autograd.Function):
    """All modes but max."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _ops.forward.default(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, indices, weights, mode, nan, normalize, _ = inputs
        _check_constant(ctx.needs_input_grad[2])
        ctx.set_materialize_grads(False)
        reduction = Reduction(*check_options(mode, nan, weights, normalize))
        wanted = x if reduction.backward_reads_x else None
        _keep(ctx, (None, wanted, indices, weights, x.shape[-1], mode, nan, normalize))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (_ops.backward.default(grads[0], *_kept(ctx)), *[None] * 6)

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> Any:
        _check_constant(changes[2] is not None)
        return _ops.tangent.default(changes[0], *_kept(ctx))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Any, int]:
        _check_not_batched(indices=in_dims[1], weights=in_dims[2])
        return _ops.forward.default(x.movedim(in_dims[0], 0), *others), 0


class _ForwardMax(torch.autograd.Function):
    """Max, which has to know the winning slots."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return _ops.forward_max.default(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, indices, nan, _ = inputs
        ctx.mark_non_differentiable(output[1])
        _keep(ctx, (output[1], None, indices, None, x.shape[-1], "max", nan, False))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _ops.backward.default(grads[0], *_kept(ctx)), None, None, None

    @staticmethod
    def jvp(ctx: Any, *changes: Any) -> Any:
        return _ops.tangent.default(changes[0], *_kept(ctx)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *others: Any) -> tuple[Any, tuple[int, int]]:
        _check_not_batched(indices=in_dims[1])
        return _ops.forward_max.default(x.movedim(in_dims[0], 0), *others), (0, 0)


def _linear(name: str, transposed: str) -> type[torch.autograd.Function]:
    """The operator ``name``, linear in its first argument, and differentiated through its transpose."""
    operator, transpose = getattr(_ops, name).default, getattr(_ops, transposed).default

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            _keep(ctx, inputs[1:])

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (transpose(grads[0], *_kept(ctx)), *[None] * 8)

        @staticmethod
        def jvp(ctx: Any, *changes: Any) -> Any:
            return operator(changes[0], *_kept(ctx))

        @staticmethod
        def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[Any, int]:
            _check_not_batched(indices=in_dims[3], weights=in_dims[4])
            moved = [_in_front(*pair, info.batch_size) for pair in zip(inputs[:3], in_dims[:3], strict=True)]
            return operator(*moved, *inputs[3:]), 0

    return Linear


def _pooled(x: Tensor, indices: Tensor, weights: Tensor | None, mode: str, *others: Any) -> Any:
    """``forward``, so that it can be differentiated: for max, an operator that gives the winning slots as well."""
    if mode == Mode.MAX.value:
        nan, normalize, empty_value = others
        check_options(mode, nan, weights, normalize)
        return _ops.forward_max.default(x, indices, nan, empty_value)[0]
    return _Forward.apply(x, indices, weights, mode, *others)  # type: ignore[no-untyped-call]


def _register(name: str, run: _Function, shape: _Function, differentiable: _Function) -> None:
    operator = getattr(_ops, name).default

    def plain_or_differentiable(values: Tensor, *others: Any) -> Any:
        if forward_ad._current_level >= 0 or (values.requires_grad and torch.is_grad_enabled()):
            return differentiable(values, *others)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(values, *others)

    for device in ("CPU", "CUDA"):
        _library.impl(name, run, device)
    torch.library.register_fake(f"knnpool::{name}", shape, lib=_library)
    # Not torch.library.register_autograd, which neither functorch nor forward AD gets through: under torch.func.grad it
    # raises, and a tangent is silently dropped.
    _library.impl(name, plain_or_differentiable, "Autograd")
    _library.impl(name, differentiable, "FuncTorchDynamicLayerFrontMode")


_register("forward", _forward, _forward_shape, _pooled)
_register("forward_max", _forward_max, _forward_max_shape, _ForwardMax.apply)
_register("backward", _backward, _backward_shape, _linear("backward", "tangent").apply)
_register("tangent", _tangent, _tangent_shape, _linear("tangent", "backward").apply)
