"""What most users call: pooling with gradients, straight from a table or a layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, OutOfReachError, UnknownModeError, UnsupportedTypeError
from knnpool_gen.ops import KNNPoolFunction
from knnpool_gen.pooling import pool_forward
from knnpool_gen.runtime import canary, launch
from knnpool_gen.runtime.plan import PoolMeta, clear_plans, ensure_pool_metadata, plan_for


def pool_function(x: Tensor, indices: Tensor, mode: str) -> Tensor:
    """Pool ``x`` ``[..., Nin]`` over the table ``indices`` ``[K, Nout]``, with gradients.

    The plan of a table is built on first use and kept as long as the table lives; a table changed in place gets a new
    one. Raises what :func:`pool_meta_from_indices` and :func:`pool_forward` raise.
    """
    if not isinstance(x, Tensor):
        raise UnsupportedTypeError(f"x is a {type(x).__name__}, not a torch.Tensor")
    if x.dim() == 0:
        raise InvalidArgumentError("x has no dimensions; wanted [..., Nin]")
    return apply(x, plan_for(indices, x.shape[-1], x.device), mode)


def apply(x: Tensor, meta: PoolMeta, mode: str) -> Tensor:
    """Pool with a plan in hand, with gradients where ``x`` wants them."""
    if torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad:
        y: Tensor = KNNPoolFunction.apply(x, meta, mode, True)  # type: ignore[no-untyped-call]
        return y
    return pool_forward(meta, x, mode, need_aux=False)[0]


def optimized_pool_forward(layer: Any, x: Tensor) -> Tensor | None:
    """Pool ``x`` as ``layer`` (a fovi ``KNNPoolingLayer`` or one like it) would, with gradients.

    Reads ``layer.mode``, ``layer.knn_indices_pad_token`` and ``layer.knn_pad_token_val`` (or the number of
    ``layer.in_coords``). Returns None when the caller should use its own path: a mode, dtype or size that has no
    kernel.
    """
    try:
        meta = ensure_pool_metadata(layer, x.device)
        return apply(x, meta, layer.mode)
    except (OutOfReachError, UnsupportedTypeError, UnknownModeError):
        return None


def clear_pool_cache() -> None:
    """Forget plans of tables, loaded kernels and canary state; plans kept on layers and cubins on disk stay."""
    clear_plans()
    launch.forget_kernels()
    canary.forget()
