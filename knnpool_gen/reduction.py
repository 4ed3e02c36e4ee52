"""How a call reduces a column: the mode, and the rules that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError, UnknownModeError, UnsupportedTypeError
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.runtime.weights import PoolWeights, prepare_weights
from knnpool_gen.vocabulary import Mode, NanRule

DEFAULT_NAN = {
    Mode.MAX: NanRule.OMIT,
    Mode.AVG: NanRule.PROPAGATE,
    Mode.SUM: NanRule.PROPAGATE,
    Mode.WEIGHTED: NanRule.PROPAGATE,
}
"""What becomes of NaN if the caller does not say."""

MODES, NAN_RULES = tuple(Mode), tuple(NanRule)
"""As tuples, because compilers that trace a call do not look into the class of an enum."""


@dataclass(frozen=True, eq=False)
class Reduction:
    """A mode with its options, checked."""

    mode: Mode
    omit_nan: bool
    """Whether a NaN is left out (of the max, the sum, the count and the sum of the weights)."""
    weights: PoolWeights | None = None
    normalize: bool = False
    """Whether a weighted sum is divided by (the sum of the weights used + 1e-8)."""
    empty_value: float | None = None
    """The value of an empty column, if not the mode's own; one that the dtype of the call can hold."""

    @property
    def plain(self) -> bool:
        """Whether mode and NaN rule are all there is to it."""
        return self.weights is None and self.empty_value is None

    @property
    def backward_reads_x(self) -> bool:
        """Whether the gradient depends on which inputs are NaN; for max, ``aux`` knows."""
        return self.omit_nan and self.mode is not Mode.MAX


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are added up."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def make_reduction(
    meta: PoolMeta,
    dtype: torch.dtype,
    mode: str,
    nan: str | None = None,
    empty_value: float | None = None,
    weights: Tensor | None = None,
    normalize_weights: bool = False,
) -> Reduction:
    """Check the options of a call on values of ``dtype``.

    Raises:
        UnknownModeError: no such mode.
        InvalidArgumentError, UnsupportedTypeError: an option that does not exist or does not go with the mode.
    """
    plain = weights is None and empty_value is None and normalize_weights is False
    if plain and isinstance(mode, str) and isinstance(nan, (str, type(None))):
        known = _PLAIN.get((mode, nan))
        if known is not None:
            return known
    chosen, omit_nan = check_options(mode, nan, weights, normalize_weights)
    return Reduction(
        mode=chosen,
        omit_nan=omit_nan,
        weights=None if weights is None else prepare_weights(meta, weights, accumulate_dtype(dtype)),
        normalize=normalize_weights,
        empty_value=None if empty_value is None else rounded(empty_value, dtype),
    )


def check_options(mode: object, nan: object, weights: object, normalize_weights: object) -> tuple[Mode, bool]:
    """Check what goes with what, without looking into ``weights``; returns the mode and whether NaN is left out."""
    chosen = next((known for known in MODES if mode == known.value), None)
    if chosen is None:
        raise UnknownModeError(f"mode = {mode!r}; there are {', '.join(repr(known.value) for known in MODES)}")
    rule = DEFAULT_NAN[chosen] if nan is None else next((known for known in NAN_RULES if nan == known.value), None)
    if rule is None:
        raise InvalidArgumentError(f"nan = {nan!r}; there are {', '.join(repr(known.value) for known in NAN_RULES)}")
    if (chosen is Mode.WEIGHTED) != (weights is not None):
        raise InvalidArgumentError(
            "mode 'weighted' needs weights [K, Nout]" if weights is None else f"mode {mode!r} takes no weights"
        )
    if not isinstance(normalize_weights, bool):
        raise UnsupportedTypeError(f"normalize_weights must be True or False, not {normalize_weights!r}")
    if normalize_weights and weights is None:
        raise InvalidArgumentError(f"normalize_weights goes with mode 'weighted', not {mode!r}")
    return chosen, rule is NanRule.OMIT


_PLAIN = {
    (mode.value, nan): Reduction(*check_options(mode.value, nan, None, False))
    for mode in MODES
    for nan in (None, *(rule.value for rule in NAN_RULES))
    if mode is not Mode.WEIGHTED
}
"""The one reduction that a mode and a NaN rule alone make: checked once, recognised by its identity."""


def rounded(empty_value: Any, dtype: torch.dtype) -> float:
    """``empty_value`` as ``dtype`` holds it: -1e9 is -inf in float16."""
    if isinstance(empty_value, (bool, str, bytes, bytearray)):  # some of which float() reads
        raise UnsupportedTypeError(f"empty_value must be a number, not {empty_value!r}")
    if isinstance(empty_value, Tensor) and empty_value.requires_grad:
        raise InvalidArgumentError("an empty_value that requires a gradient is not supported: detach it")
    try:
        return torch.tensor(float(empty_value), dtype=torch.float64, device="cpu").to(dtype).item()
    except OverflowError:
        raise InvalidArgumentError("empty_value is a whole number that float64 does not reach") from None
    except (TypeError, ValueError, RuntimeError):
        raise UnsupportedTypeError(f"empty_value must be a number, not {empty_value!r}") from None
