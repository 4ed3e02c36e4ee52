"""The fastest configuration of a case, as a choice that the runtime keeps."""

from __future__ import annotations

from knnpool_gen.bench.record import VariantResult
from knnpool_gen.runtime.tuned import TunedChoice


def best_choice(result: VariantResult) -> TunedChoice:
    """What was fastest; the model's own choice where nothing was faster."""
    best = min((result.chosen, *result.times), key=lambda time: time.microseconds)
    case = result.case
    return TunedChoice(
        direction=case.direction.value,
        mode=case.mode.value,
        dtype=case.dtype,
        k=case.k,
        nin=case.nin,
        nout=case.nout,
        rows=case.rows,
        variant=best.variant,
        stack=best.stack,
        threads=best.threads,
        microseconds=best.microseconds,
        model_microseconds=result.chosen.microseconds,
    )
