"""What most users call: pooling with gradients, straight from a table or a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knnpool_gen import library
from knnpool_gen.errors import InvalidArgumentError, OutOfReachError, UnknownModeError, UnsupportedTypeError
from knnpool_gen.ops import pool_recorded
from knnpool_gen.pooling import DTYPES, check_input, check_kind, forward
from knnpool_gen.reduction import MODES, Reduction, make_reduction
from knnpool_gen.runtime import canary, capture, execute, launch
from knnpool_gen.runtime.plan import PoolMeta, clear_plans, ensure_pool_metadata, plan_for, table_of
from knnpool_gen.runtime.select import forget_choices
from knnpool_gen.runtime.weights import clear_weights
from knnpool_gen.vocabulary import Mode

_unwrap_if_dead = torch._C._functorch.unwrap_if_dead


def pool_function(
    x: Tensor,
    indices: Tensor,
    mode: str,
    *,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> Tensor:
    """Pool ``x`` ``[..., Nin]`` over the table ``indices`` ``[K, Nout]``, with gradients.

    The plan of a table is built on first use and kept as long as the table lives; a table changed in place gets a new
    one. What torch does not count as a change (writes through ``.data`` or a numpy view) goes unnoticed until
    :func:`clear_pool_cache`; the same holds for ``weights``. Options and errors are those of
    :func:`pool_meta_from_indices` and :func:`pool_forward`.
    """
    if not isinstance(x, Tensor):
        raise UnsupportedTypeError(f"x is a {type(x).__name__}, not a torch.Tensor")
    if x.dim() == 0:
        raise InvalidArgumentError("x has no dimensions; wanted [..., Nin]")
    if library.watched(x):
        return library.pool(x, indices, mode, nan, empty_value, weights, normalize_weights)
    check_kind("x", x)
    meta = plan_for(indices, x.shape[-1], x.device)  # which fits it
    return apply(x, meta, make_reduction(meta, x.dtype, mode, nan, empty_value, weights, normalize_weights))


def prepare(
    x: Tensor,
    indices: Tensor,
    mode: str,
    *,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> None:
    """Do ahead what the first :func:`pool_function` of such arguments and its backward would: build, compile, load.

    A CUDA graph capture needs the plan of the table to be there, and finds out faster if the kernels are. ``x`` may
    hold anything; it is its shape, dtype and device that choose the kernels.

    Raises:
        CaptureError: a capture is under way.
        Others: as :func:`pool_function`.
    """
    check_kind("x", x)
    capture.refuse("prepare waits for the device")
    options: dict[str, Any] = {"nan": nan, "empty_value": empty_value}
    options |= {"weights": weights, "normalize_weights": normalize_weights}
    with torch.inference_mode(False), torch.enable_grad():
        like_x = torch.zeros_like(x, requires_grad=True)
        # This first: the kernel of its backward is compiled while the others are.
        y = pool_function(like_x, indices, mode, **options)
        pool_function(like_x.detach(), indices, mode, **options)
        torch.autograd.grad(y, like_x, torch.zeros_like(y))


def apply(x: Tensor, meta: PoolMeta, reduction: Reduction) -> Tensor:
    """Pool what nobody watches (:func:`knnpool_gen.library.watched`), with gradients where ``x`` wants them."""
    x = _unwrap_if_dead(x)  # what has left a transform has no memory of its own
    if torch.is_grad_enabled() and x.requires_grad:
        return pool_recorded(x, meta, reduction)
    return forward(meta, x, reduction, need_aux=False)[0]


def optimized_pool_forward(layer: Any, x: Tensor) -> Tensor | None:
    """Pool ``x`` as ``layer`` (a fovi ``KNNPoolingLayer`` or one like it) would, with gradients.

    Reads ``layer.mode``, ``layer.knn_indices_pad_token`` and ``layer.knn_pad_token_val`` (or the number of
    ``layer.in_coords``); for the mode gaussian, ``layer.gaussian_weights``. Returns None when the caller should use
    its own path: a mode, dtype or size that has no kernel, or weights that are to be learnt. A layer without a table,
    a bad table and an ``x`` of another size are errors.
    """
    if not isinstance(x, Tensor):
        raise UnsupportedTypeError(f"x is a {type(x).__name__}, not a torch.Tensor")
    options = _options_of(layer)
    if library.watched(x):
        return _pool_watched_layer(layer, x, options)
    meta = ensure_pool_metadata(layer, x.device)
    try:
        check_input(meta, x)
        return None if options is None else apply(x, meta, make_reduction(meta, x.dtype, **options))
    except (OutOfReachError, UnsupportedTypeError, UnknownModeError):
        return None


def _pool_watched_layer(layer: Any, x: Tensor, options: dict[str, Any] | None) -> Tensor | None:
    """The same for compilers, which see no plan: what has a kernel for no size is found out when it runs."""
    indices, nin = table_of(layer)
    if x.shape[-1:] != (nin,):
        raise InvalidArgumentError(f"x has shape {tuple(x.shape)}; the layer has Nin = {nin}")
    if options is None or x.dtype not in DTYPES or options["mode"] not in [mode.value for mode in MODES]:
        return None
    return library.pool(x, indices, **options)


def _options_of(layer: Any) -> dict[str, Any] | None:
    """Mode and options of a layer; None where its weights are missing or to be learnt."""
    if layer.mode != "gaussian":
        return {"mode": layer.mode}
    weights = getattr(layer, "gaussian_weights", None)
    if weights is None or (weights.requires_grad and torch.is_grad_enabled()):
        return None
    # A detached tensor is a new one on every call, and nothing derived would be found again.
    weights = weights.detach() if weights.requires_grad else weights
    return {"mode": Mode.WEIGHTED.value, "weights": weights, "normalize_weights": True}


def clear_pool_cache() -> None:
    """Forget plans of tables, loaded kernels, tuned choices and canary state; plans kept on layers and files on disk
    stay."""
    clear_plans()
    clear_weights()
    forget_choices()
    execute.forget_prepared()
    launch.forget_kernels()
    canary.forget()
