"""Pooling as a layer of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from knnpool_gen import library
from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.functional import pool_function
from knnpool_gen.neighbours import Points, knn_table
from knnpool_gen.pooling import check_dtype, check_kind
from knnpool_gen.reduction import make_reduction
from knnpool_gen.runtime.plan import DeviceLike, no_slot, ordinary_tensors, plan_for, pool_meta_from_indices
from knnpool_gen.vocabulary import Mode

if TYPE_CHECKING:
    from typing_extensions import Self


class KNNPool(nn.Module):
    """Pools ``x`` ``[..., Nin]`` to ``y`` ``[..., Nout]`` over a neighbour table, with gradients.

    The table, and the weights where there are any, are buffers: they move with the module and are all that its
    ``state_dict`` holds. Their dtype is not that of the model: ``.half()`` and the like leave it alone, and the dtype
    of ``y`` is that of ``x``. What is derived from them is built on first use and again when they are changed.

    Args:
        indices: ``[K, Nout]``, any integer dtype; for each output the input nodes that it reads. An entry ``>= nin`` is
            padding. Copied, to int64, pads as ``nin``: a state is for layers of the same ``nin``.
        nin: number of input nodes.
        mode: ``"max"``, ``"avg"``, ``"sum"`` or ``"weighted"``.
        weights: for ``"weighted"``, ``[K, Nout]``, floating point, no gradient; those of pads are never read. Copied.
        nan: ``"omit"`` or ``"propagate"``; the default is omit for max, propagate otherwise.
        empty_value: the value of an empty column, instead of -inf (max), NaN (avg) or 0.
        normalize_weights: divide by (the sum of the weights used + 1e-8).
        return_indices: for ``"max"``, return ``(y, nodes)``: ``nodes`` ``[..., Nout]``, int64, is the input node that
            each maximum was read from, -1 for an empty column.

    Raises:
        InvalidArgumentError: a shape, entry, mode or option does not fit; names both sides.
        UnsupportedTypeError: not a tensor, or of a dtype that is not supported.
    """

    indices: Tensor
    weights: Tensor | None

    def __init__(
        self,
        indices: Tensor,
        nin: SupportsIndex,
        mode: str,
        *,
        weights: Tensor | None = None,
        nan: str | None = None,
        empty_value: float | None = None,
        normalize_weights: bool = False,
        return_indices: bool = False,
    ) -> None:
        super().__init__()
        plan = pool_meta_from_indices(_with_values(indices), nin)
        make_reduction(plan, torch.float32, mode, nan, empty_value, _with_values(weights), normalize_weights)
        if not isinstance(return_indices, bool):
            raise UnsupportedTypeError(f"return_indices must be True or False, not {return_indices!r}")
        if return_indices and mode != Mode.MAX.value:
            raise InvalidArgumentError(f"return_indices goes with mode 'max', not {mode!r}")
        self.nin = plan.nin
        self.mode = mode
        self.nan = nan
        self.empty_value = empty_value
        self.normalize_weights = normalize_weights
        self.return_indices = return_indices
        with ordinary_tensors():
            self.register_buffer("indices", plan.indices_i64.to(indices.device))
            self.register_buffer("weights", None if weights is None else weights.detach().clone())

    @classmethod
    def from_points(
        cls,
        points_in: Points,
        points_out: Points,
        k: SupportsIndex,
        mode: str,
        metric: str = "euclidean",
        **options: Any,
    ) -> Self:
        """Pool over the ``k`` input points nearest to each output point.

        Args:
            points_in, points_out, k, metric: as for :func:`knnpool_gen.knn_table`; slots beyond the number of
                ``points_in`` are pads.
            mode, options: as for :class:`KNNPool`.
        """
        indices = knn_table(points_in, points_out, k, metric)
        return cls(indices, len(points_in), mode, **options)

    @property
    def k(self) -> int:
        """Number of slots of a column."""
        return self.indices.shape[0]

    @property
    def nout(self) -> int:
        """Number of output nodes."""
        return self.indices.shape[1]

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Pool ``x`` ``[..., Nin]``, float16, bfloat16, float32 or float64, of any strides.

        Raises:
            InvalidArgumentError: ``x`` has another last dimension, or a changed table or option does not fit.
            UnsupportedTypeError: ``x`` is not a tensor of a supported dtype.
            KernelError: the kernel cannot be compiled or loaded.
        """
        check_kind("x", x)
        if x.shape[-1:] != (self.nin,):
            raise InvalidArgumentError(f"x has shape {tuple(x.shape)}; its last dimension must be Nin = {self.nin}")
        if not self.return_indices:
            return pool_function(x, self.indices, **self._options())
        y, slots = library.pool_max(x, self.indices, self.nan, self.empty_value)
        return y, self._nodes(slots)

    def prepare(self, device: DeviceLike | None = None, dtype: torch.dtype = torch.float32) -> None:
        """Build ahead what the first call on ``device`` (by default, that of the table) with ``dtype`` would build.

        To be called before a CUDA graph is captured: inside the capture, building fails with a ``CaptureError``.

        Raises:
            InvalidArgumentError: no such device, or table or weights do not fit.
            UnsupportedTypeError: ``dtype`` cannot be pooled.
        """
        check_dtype(dtype)
        make_reduction(plan_for(self.indices, self.nin, device), dtype, **self._options())

    def extra_repr(self) -> str:
        """Sizes and mode, and the options that are not their defaults."""
        defaults = {"nan": None, "empty_value": None, "normalize_weights": False, "return_indices": False}
        shown = ["nin", "nout", "k", "mode", *(name for name in defaults if getattr(self, name) != defaults[name])]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)

    def _options(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "nan": self.nan,
            "empty_value": self.empty_value,
            "weights": self.weights,
            "normalize_weights": self.normalize_weights,
        }

    def _nodes(self, slots: Tensor) -> Tensor:
        """The input node in each of ``slots`` ``[..., Nout]``."""
        table = pad(self.indices.to(slots.device, torch.int64), (0, 0, 0, 1), value=-1)  # one more slot: none
        slots = slots.long().masked_fill(slots == no_slot(self.k), self.k)
        return table[slots, torch.arange(self.nout, device=slots.device)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the buffers, and leave their dtype: in that of a half-precision model they would lose what they say."""

        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self


def _with_values(tensor: Any) -> Any:
    """``tensor``, or for a meta tensor zeros in its place, which can be checked as far as there is something to."""
    return torch.zeros_like(tensor, device="cpu") if isinstance(tensor, Tensor) and tensor.is_meta else tensor
