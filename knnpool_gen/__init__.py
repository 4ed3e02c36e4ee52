"""k-nearest-neighbour pooling for PyTorch, with generated CUDA kernels.

The names below are loaded on first use: importing the package alone loads nothing, using it loads torch, and only a
CUDA tensor loads CuPy. That also keeps torch out of the generator.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from knnpool_gen.errors import (
        CaptureError,
        CompileError,
        InvalidArgumentError,
        KernelError,
        KNNPoolError,
        MissingDependencyError,
        OutOfReachError,
        SpecError,
        StaleDispatchError,
        UnknownModeError,
        UnsupportedTypeError,
    )
    from knnpool_gen.functional import clear_pool_cache, optimized_pool_forward, pool_function, prepare
    from knnpool_gen.module import KNNPool
    from knnpool_gen.neighbours import knn_table
    from knnpool_gen.ops import KNNPoolFunction
    from knnpool_gen.pooling import pool_backward, pool_forward
    from knnpool_gen.runtime.plan import PoolMeta, ensure_pool_metadata, pool_meta_from_indices

__all__ = [
    "CaptureError",
    "CompileError",
    "InvalidArgumentError",
    "KNNPool",
    "KNNPoolError",
    "KNNPoolFunction",
    "KernelError",
    "MissingDependencyError",
    "OutOfReachError",
    "PoolMeta",
    "SpecError",
    "StaleDispatchError",
    "UnknownModeError",
    "UnsupportedTypeError",
    "clear_pool_cache",
    "ensure_pool_metadata",
    "knn_table",
    "optimized_pool_forward",
    "pool_backward",
    "pool_forward",
    "pool_function",
    "pool_meta_from_indices",
    "prepare",
]

_HOMES = {
    "KNNPool": "knnpool_gen.module",
    "KNNPoolFunction": "knnpool_gen.ops",
    "PoolMeta": "knnpool_gen.runtime.plan",
    "clear_pool_cache": "knnpool_gen.functional",
    "ensure_pool_metadata": "knnpool_gen.runtime.plan",
    "knn_table": "knnpool_gen.neighbours",
    "optimized_pool_forward": "knnpool_gen.functional",
    "pool_backward": "knnpool_gen.pooling",
    "pool_forward": "knnpool_gen.pooling",
    "pool_function": "knnpool_gen.functional",
    "pool_meta_from_indices": "knnpool_gen.runtime.plan",
    "prepare": "knnpool_gen.functional",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES.get(name, "knnpool_gen.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
