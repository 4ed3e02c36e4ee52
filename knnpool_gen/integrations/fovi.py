"""fovi's pooling layers on these kernels, without a change to fovi, its models or their checkpoints.

::

    from knnpool_gen.integrations import fovi

    fovi.enable()

From then on every ``KNNPoolingLayer`` of the process, those that exist included, pools with this package, on CPU and
CUDA. NaN is left out, pads are not counted and outputs without a neighbour are 0, as in the layer's own formula; the
results differ from that by rounding, and where all neighbours of a maximum are NaN its gradient goes to the first. What
cannot be done here is left to the layer: dtypes that have no kernel, and gaussian weights that require a gradient.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from knnpool_gen.errors import MissingDependencyError, OutOfReachError, UnsupportedTypeError
from knnpool_gen.functional import pool_function
from knnpool_gen.pooling import DTYPES
from knnpool_gen.vocabulary import Mode, NanRule

MODES = {
    "max": Mode.MAX,
    "avg": Mode.AVG,
    "sum": Mode.SUM,
    "gaussian": Mode.WEIGHTED,
}
"""What the layer's modes are called here."""

_lock = threading.Lock()
_reasons: set[object] = set()
"""What asks for the kernels: the switch, and each block that is open."""
_SWITCH = object()
_restore: Callable[[], None] | None = None


def enable() -> None:
    """Let every ``KNNPoolingLayer`` use these kernels, until :func:`disable`. Once more changes nothing.

    Raises:
        MissingDependencyError: fovi cannot be imported.
        UnsupportedTypeError: its layer is not the one that is known here, of fovi 2.4.
    """
    _hold(_SWITCH)


def disable() -> None:
    """Undo :func:`enable`: the layers are as fovi made them, unless a block of :func:`enabled` is still open."""
    _release(_SWITCH)


@contextmanager
def enabled() -> Iterator[None]:
    """As :func:`enable`, for a block. Blocks may be nested and overlap; the layers change for all threads."""
    reason = object()
    _hold(reason)
    try:
        yield
    finally:
        _release(reason)


def _hold(reason: object) -> None:
    global _restore
    with _lock:
        if not _reasons:
            _restore = _replace_forward(_known_layer())
        _reasons.add(reason)


def _release(reason: object) -> None:
    global _restore
    with _lock:
        _reasons.discard(reason)
        if not _reasons and _restore is not None:
            _restore()
            _restore = None


def _known_layer() -> Any:
    """fovi's class ``KNNPoolingLayer``, if it has what is used of it."""
    try:
        layers = importlib.import_module("fovi.arch.knn")
    except ImportError as error:
        raise MissingDependencyError(f"fovi cannot be imported ({error}): pip install fovi==2.4.0") from error
    layer = getattr(layers, "KNNPoolingLayer", None)
    if not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise UnsupportedTypeError("this fovi has no layer KNNPoolingLayer; known here is that of fovi 2.4.0")
    taken = list(inspect.signature(layer.forward).parameters)
    if taken != ["self", "X_l"] or not hasattr(layer, "_mask_invalid_outputs"):
        raise UnsupportedTypeError(
            f"the KNNPoolingLayer of this fovi, forward({', '.join(taken)}), is not that of fovi 2.4.0, known here"
        )
    return layer


def _replace_forward(kind: Any) -> Callable[[], None]:
    """Put pooling with this package before the layer's own ``forward``; returns what takes it away again."""
    own: Callable[[Any, Tensor], Tensor] = kind.forward

    @functools.wraps(own)
    def forward(self: Any, X_l: Tensor) -> Tensor:  # noqa: N803 (a call may name it)
        y = _pooled(self, X_l)
        if y is None:
            return own(self, X_l)
        self._last_knn_pool_backend = "knnpool_gen"
        masked: Tensor = self._mask_invalid_outputs(y)
        return masked

    def restore() -> None:
        kind.forward = own

    kind.forward = forward
    return restore


def _pooled(layer: Any, x: Tensor) -> Tensor | None:
    """``x`` pooled as ``layer`` asks for, before outputs without a neighbour are set to 0; None if it cannot be."""
    mode = MODES.get(layer.mode)
    weights = layer.gaussian_weights if mode is Mode.WEIGHTED else None
    if mode is None or x.dtype not in DTYPES or x.shape[-1] != layer.knn_pad_token_val:
        return None
    if weights is not None:
        if weights.requires_grad:
            return None
        x = x.to(torch.promote_types(x.dtype, weights.dtype))  # the layer's products have this type too
    try:
        return pool_function(
            x,
            layer.knn_indices_pad_token,
            mode.value,
            nan=NanRule.OMIT.value,
            weights=weights,
            normalize_weights=weights is not None,
        )
    except OutOfReachError:
        return None
