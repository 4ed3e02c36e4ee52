"""A recording as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from knnpool_gen.bench.measure import Spread
from knnpool_gen.bench.record import CaseResult, FirstUse, HostResult, Recording
from knnpool_gen.bench.regret import regrets
from knnpool_gen.bench.summary import COPY, OURS, RIVALS, Summary, ratio, summarize

NAMED_SLOWER = 20
"""Cases in which a peer was faster that are named; the recording has all."""
REGRET = 0.05
"""Share by which a chosen variant may be slower than the best one."""


def tables(recording: Recording) -> Iterator[Table]:
    """One table for each part that was measured."""
    if recording.cases:
        yield cases_table(recording.cases)
    if recording.host:
        yield host_table(recording.host)
    if recording.first_use is not None:
        yield first_use_table(recording.first_use)


def cases_table(results: tuple[CaseResult, ...]) -> Table:
    """Times in µs, with the half distance of the quartiles; ``*`` where the device waited for the host."""
    table = Table("case", "variant", "ours µs", "of the copy", *(f"x {peer}" for peer in RIVALS), box=None)
    for result in results:
        ours = result.times.get(OURS)
        slower = any((value := ratio(result, peer)) is not None and value < 1 for peer in RIVALS)
        table.add_row(
            result.case.name,
            result.variant.removeprefix("knnpool_"),
            _time(ours),
            _number(ratio(result, COPY)),
            *(_number(ratio(result, peer)) for peer in RIVALS),
            style="red" if ours is None else "yellow" if slower else "",
        )
    return table


def host_table(results: tuple[HostResult, ...]) -> Table:
    """Host µs a call: what is called against who is called."""
    peers = list(dict.fromkeys(result.peer for result in results))
    cells = {(result.call, result.peer): result.median for result in results}
    table = Table("host µs a call", *peers, box=None)
    for call in dict.fromkeys(result.call for result in results):
        table.add_row(call, *(_number(cells.get((call, peer))) for peer in peers))
    return table


def first_use_table(first: FirstUse) -> Table:
    """Milliseconds of the first use of tables."""
    table = Table("first use", "ms", box=None)
    for what, value in (
        ("first table of a process, empty cache", f"{first.process_cold:.0f}"),
        ("first table of a process, kernels on disk", f"{first.process_warm:.0f}"),
        ("another table, empty cache (of which the plan)", f"{first.cold:.0f} ({first.plan:.1f})"),
        ("another table, kernels on disk", f"{first.warm:.1f}"),
        ("the same table after clear_pool_cache()", f"{first.again:.1f}"),
        ("20 tables in a row, empty cache", f"{first.twenty_cold:.0f}"),
        ("20 tables in a row, kernels on disk", f"{first.twenty_warm:.0f}"),
    ):
        table.add_row(what, value)
    return table


def lines(recording: Recording) -> Iterator[str]:
    """The summary, in words."""
    yield from _summary_lines(summarize(recording.cases))
    yield from _missing_lines(recording)
    yield from _host_lines(recording.host)
    if (two := recording.two_gpus) is not None:
        yield (
            f"training on two GPUs: {two.throughput:.2f} times the throughput of one "
            f"({two.two:.2f} ms a step with twice the batch, {two.one:.2f} ms on one)"
        )
    if recording.variants:
        found = regrets(recording.variants)
        beyond = [item for item in found if item.share > REGRET]
        within = f"{len(found) - len(beyond)} of {len(found)}"
        yield f"the chosen variant is within {REGRET:.0%} of the best in {within} cases"
        for item in beyond:
            yield f"  {item.case}: {item.chosen} is {item.share:.0%} slower than {item.best}"
    if recording.left_out:
        yield f"{len(recording.left_out)} case(s) left out for want of time"


def _summary_lines(summary: Summary) -> Iterator[str]:
    for headline in summary.headlines:
        ratios = ", ".join(
            f"{value:.2f} of the copy" if peer == COPY else f"{value:.1f}x {peer}"
            for peer, value in headline.ratios.items()
        )
        yield f"alexp0 {headline.direction.value}: {headline.microseconds:.1f} µs, {ratios}"
    for mean in summary.means:
        what = "of the copy" if mean.peer == COPY else f"times as fast as {mean.peer}"
        yield (
            f"{mean.direction.value}: {mean.ratio:.2f} {what} "
            f"(geometric mean of {mean.cases} cases, {mean.worst:.2f} at worst)"
        )
    if summary.means:
        yield f"slower than a peer: {len(summary.slower)} time(s)"
    for slower in summary.slower[:NAMED_SLOWER]:
        yield f"  {slower.case}: {slower.ratio:.2f}x {slower.peer}"
    for failure in summary.failed:
        yield f"FAILED {failure}"


def _missing_lines(recording: Recording) -> Iterator[str]:
    """Why peers did not take part, each reason once."""
    counts: dict[tuple[str, str], int] = {}
    for result in recording.cases:
        for peer, reason in result.reasons.items():
            if peer != OURS:
                counts[peer, reason] = counts.get((peer, reason), 0) + 1
    for (peer, reason), count in counts.items():
        yield f"{peer} left out of {count} case(s): {reason}"


def _host_lines(results: tuple[HostResult, ...]) -> Iterator[str]:
    """Ours against fovi's, for each kind of call."""
    theirs = {result.call: result.median for result in results if result.peer == "fovi"}
    for result in results:
        if result.peer == OURS and result.call in theirs:
            share = result.median / theirs[result.call]
            yield f"host, {result.call}: {result.median:.1f} µs, {share:.2f} of fovi's {theirs[result.call]:.1f}"


def _time(time: Spread | None) -> str:
    if time is None:
        return "failed"
    return f"{time.median:.1f} ± {(time.high - time.low) / 2:.1f}{'' if time.queued else ' *'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
