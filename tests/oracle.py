"""The reference, called with a mode and options as the public functions take them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from knnpool_gen import reference
from knnpool_gen.reduction import make_reduction
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.vocabulary import Mode


def reference_forward(
    meta: PoolMeta, x: Tensor, mode: Mode, need_aux: bool = True, **options: Any
) -> tuple[Tensor, Tensor | None]:
    return reference.reference_forward(meta, x, make_reduction(meta, x.dtype, mode.value, **options), need_aux)


def reference_backward(meta: PoolMeta, grad_y: Tensor, aux: Tensor | None, mode: Mode, **options: Any) -> Tensor:
    return reference.reference_backward(meta, grad_y, aux, make_reduction(meta, grad_y.dtype, mode.value, **options))
