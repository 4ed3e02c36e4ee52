"""How far the choice of a variant is from the best one measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from knnpool_gen.bench.cases import Case
from knnpool_gen.bench.record import VariantResult, VariantTime
from knnpool_gen.errors import InvalidArgumentError

Choose = Callable[[Case], tuple[str, int, int]]
"""Variant, stack and threads for a case."""


@dataclass(frozen=True)
class Regret:
    """What a choice costs in one case."""

    case: str
    chosen: str
    best: str
    share: float
    """Time of the chosen over time of the best, less 1: 0 for the best choice."""
    microseconds: float
    """The same as a difference."""


def regrets(results: Iterable[VariantResult], choose: Choose | None = None) -> list[Regret]:
    """The regret of every case, the largest first.

    Args:
        results: recorded times of every way to run a case.
        choose: what is judged; by default the choice that was recorded with the times.

    Raises:
        InvalidArgumentError: a choice is not among those that were measured, so the recording is out of date.
    """
    found = []
    for result in results:
        chosen = result.chosen if choose is None else _measured(result, choose(result.case))
        best = min(result.times, key=lambda time: time.microseconds)
        lost = chosen.microseconds - best.microseconds
        share = lost / best.microseconds
        found.append(Regret(result.case.name, _described(chosen), _described(best), share, lost))
    return sorted(found, key=lambda regret: -regret.share)


def _measured(result: VariantResult, choice: tuple[str, int, int]) -> VariantTime:
    for time in result.times:
        if (time.variant, time.stack, time.threads) == choice:
            return time
    variant, stack, threads = choice
    raise InvalidArgumentError(
        f"{result.case.name}: {variant} with stack {stack} and {threads} threads was not measured; "
        "record again with `knnpool-gen bench --variants`"
    )


def _described(time: VariantTime) -> str:
    return f"{time.variant}, stack {time.stack}, {time.threads} threads"
