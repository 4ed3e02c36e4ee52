"""What a recording says in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from knnpool_gen.bench.cases import HEADLINES, Group
from knnpool_gen.bench.record import CaseResult
from knnpool_gen.vocabulary import Direction

OURS = "ours"
COPY = "copy"
RIVALS = ("fovi", "torch", "compile")
"""Peers that do the same work; a copy does less."""
COMPARED = (Group.REAL, Group.ODD)
"""Groups of cases that means are taken of."""


@dataclass(frozen=True)
class Mean:
    """How many times as fast as a peer, over all cases that both ran."""

    direction: Direction
    peer: str
    ratio: float
    """Geometric mean."""
    worst: float
    cases: int


@dataclass(frozen=True)
class Slower:
    """A case in which a peer was faster."""

    case: str
    peer: str
    ratio: float
    """Time of the peer over ours: below 1."""


@dataclass(frozen=True)
class Headline:
    """alexp0 in one direction; ratios are time of the peer over ours."""

    direction: Direction
    microseconds: float
    ratios: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """The answer of a benchmark."""

    headlines: tuple[Headline, ...]
    means: tuple[Mean, ...]
    slower: tuple[Slower, ...]
    """The worst first."""
    failed: tuple[str, ...]
    """Cases that ours did not run, with the reason."""


def ratio(result: CaseResult, peer: str) -> float | None:
    """Median time of ``peer`` over ours: above 1 if ours is faster. None unless both ran."""
    ours, theirs = result.times.get(OURS), result.times.get(peer)
    return None if ours is None or theirs is None else theirs.median / ours.median


def summarize(results: Sequence[CaseResult]) -> Summary:
    """Means, the cases in which a peer is faster, and the headline."""
    slower = [
        Slower(result.case.name, peer, value)
        for result in results
        for peer in RIVALS
        if (value := ratio(result, peer)) is not None and value < 1
    ]
    return Summary(
        headlines=tuple(_headline(result) for result in results if result.case in HEADLINES and _ran(result)),
        means=tuple(
            mean
            for direction in Direction
            for peer in (COPY, *RIVALS)
            if (mean := _mean(results, direction, peer)) is not None
        ),
        slower=tuple(sorted(slower, key=lambda item: item.ratio)),
        failed=tuple(
            f"{result.case.name}: {result.reasons.get(OURS, 'not run')}"
            for result in results
            if OURS in result.times and not _ran(result)
        ),
    )


def _ran(result: CaseResult) -> bool:
    return result.times.get(OURS) is not None


def _mean(results: Sequence[CaseResult], direction: Direction, peer: str) -> Mean | None:
    values = [
        value
        for result in results
        if result.case.direction is direction and result.case.group in COMPARED
        if (value := ratio(result, peer)) is not None
    ]
    return Mean(direction, peer, geometric_mean(values), min(values), len(values)) if values else None


def _headline(result: CaseResult) -> Headline:
    ours = result.times[OURS]
    assert ours is not None
    ratios = {peer: value for peer in (COPY, *RIVALS) if (value := ratio(result, peer)) is not None}
    return Headline(result.case.direction, ours.median, ratios)
