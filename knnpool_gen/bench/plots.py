"""A recording as pictures."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from knnpool_gen.bench.cases import Case, Group
from knnpool_gen.bench.record import CaseResult, Recording
from knnpool_gen.bench.summary import COPY, OURS, RIVALS, ratio
from knnpool_gen.errors import MissingDependencyError
from knnpool_gen.vocabulary import Direction

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Direction.FORWARD: "tab:blue", Direction.BACKWARD: "tab:orange"}
LINES = {OURS: "-", COPY: ":", "fovi": "--", "compile": "-.", "torch": (0, (1, 4))}
DPI = 120


def write_plots(recording: Recording, folder: Path) -> list[Path]:
    """Write one PNG for each picture the recording has numbers for; their paths.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("plots need matplotlib, which is missing: pip install 'knnpool-gen[bench]'")
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in PICTURES.items():
        figure = draw(recording.cases)
        if figure is not None:
            figure.axes[0].set_title(f"{recording.machine.device}, {recording.date[:10]}", fontsize=9)
            written.append(folder / f"{name}.png")
            figure.savefig(written[-1], dpi=DPI, bbox_inches="tight")
    return written


def copy_fraction(results: Sequence[CaseResult]) -> Figure | None:
    """Time of a copy of as many bytes over ours, for every case of a real or odd table: 1 is as fast as memory."""
    return _dots(results, COPY, "share of a copy of as many bytes", logarithmic=False)


def _dots(results: Sequence[CaseResult], peer: str, label: str, logarithmic: bool) -> Figure | None:
    shown = [(result, value) for result in _compared(results) if (value := ratio(result, peer)) is not None]
    if not shown:
        return None
    names = list(dict.fromkeys(_without_direction(result.case) for result, _ in shown))
    figure, axes = _figure(8, 1.5 + 0.16 * len(names))
    for direction, colour in COLOURS.items():
        points = [
            (value, names.index(_without_direction(result.case)))
            for result, value in shown
            if result.case.direction is direction
        ]
        axes.scatter([x for x, _ in points], [y for _, y in points], s=14, color=colour, label=direction.value)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set_ylim(len(names) - 0.5, -0.5)
    if logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xlim(0, 1.05 * max(1, *(value for _, value in shown)))
    axes.axvline(1, color="grey", linewidth=1)
    axes.grid(axis="x", alpha=0.3)
    axes.set_xlabel(label)
    axes.legend(fontsize=7)
    return figure


def _versus(peer: str) -> Callable[[Sequence[CaseResult]], Figure | None]:
    return lambda results: _dots(results, peer, f"times as fast as {peer}", logarithmic=True)


def growth_with_batch(results: Sequence[CaseResult]) -> Figure | None:
    """Time against the batch size: one line a table, in the dtype and mode that was measured most."""
    real = [result for result in results if result.case.group is Group.REAL and result.times.get(OURS)]
    first: dict[str, Case] = {}
    for result in real:
        first.setdefault(result.case.table, result.case)
    lines: dict[tuple[str, Direction], list[tuple[int, float]]] = {}
    for result in real:
        case, ours = result.case, result.times[OURS]
        if ours is not None and (case.dtype, case.mode) == (first[case.table].dtype, first[case.table].mode):
            lines.setdefault((case.table, case.direction), []).append((case.batch, ours.median))
    if not any(len(points) > 1 for points in lines.values()):
        return None
    figure, axes = _figure(7, 5)
    tables = list(first)
    for (table, direction), points in lines.items():
        points.sort()
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            marker="o" if direction is Direction.FORWARD else "s",
            linestyle="-" if direction is Direction.FORWARD else "--",
            color=f"C{tables.index(table)}",
            markersize=3,
            label=f"{table} {direction.value}",
        )
    _logarithmic(axes, "batch", "µs")
    return figure


def _growth(group: Group, size: Callable[[Case], int], label: str) -> Callable[[Sequence[CaseResult]], Figure | None]:
    """Time of every peer against one size of the table."""

    def draw(results: Sequence[CaseResult]) -> Figure | None:
        shown = sorted((result for result in results if result.case.group is group), key=lambda r: size(r.case))
        if len(shown) < 2:
            return None
        figure, axes = _figure(7, 5)
        for direction, colour in COLOURS.items():
            for peer in (OURS, COPY, *RIVALS):
                points = [
                    (size(result.case), time.median)
                    for result in shown
                    if result.case.direction is direction and (time := result.times.get(peer)) is not None
                ]
                if points:
                    axes.plot(
                        [x for x, _ in points],
                        [y for _, y in points],
                        linestyle=LINES[peer],
                        color=colour,
                        marker="o",
                        markersize=3,
                        label=f"{peer} {direction.value}",
                    )
        _logarithmic(axes, label, "µs")
        return figure

    return draw


PICTURES: dict[str, Callable[[Sequence[CaseResult]], Figure | None]] = {
    "copy_fraction": copy_fraction,
    **{f"versus_{peer}": _versus(peer) for peer in RIVALS},
    "growth_batch": growth_with_batch,
    "growth_nin": _growth(Group.NIN, lambda case: case.nin, "Nin (Nout = Nin / 4, K 9, 4096 rows)"),
    "growth_k": _growth(Group.K, lambda case: case.k, "K (Nin 1024, Nout 256, 4096 rows)"),
}
"""By the name of the file."""


def _compared(results: Sequence[CaseResult]) -> list[CaseResult]:
    return [result for result in results if result.case.group in (Group.REAL, Group.ODD)]


def _without_direction(case: Case) -> str:
    return case.name.removesuffix(f" {case.direction.value}")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure that nothing else knows of, so that it needs not be closed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()


def _logarithmic(axes: Axes, x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6)
