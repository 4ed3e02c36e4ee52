"""``knnpool-gen bench``: how fast everything is on this machine, or was on another."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from knnpool_gen.cli.shared import errors, stderr, stdout
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Direction, Mode

if TYPE_CHECKING:
    from knnpool_gen.bench.record import Recording

E = TypeVar("E", bound=Enum)

TableOption = Annotated[list[str] | None, typer.Option("--table", help="Only this table; may be repeated.")]
BatchOption = Annotated[list[int] | None, typer.Option("--batch", help="Batch size; may be repeated.")]
DtypeOption = Annotated[list[str] | None, typer.Option("--dtype", help="Such as float16; may be repeated.")]
ModeOption = Annotated[list[str] | None, typer.Option("--mode", help="max, avg, sum, weighted; may be repeated.")]
DirectionOption = Annotated[list[str] | None, typer.Option("--direction", help="forward or backward; both if absent.")]


def bench(
    kernels: Annotated[bool, typer.Option("--kernels", help="Measure kernels; so it is if no part is named.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Measure the host's time for a call.")] = False,
    first_use: Annotated[bool, typer.Option("--first-use", help="Measure the first use of a table.")] = False,
    variants: Annotated[bool, typer.Option("--variants", help="Measure every variant, not only the chosen.")] = False,
    two_gpus: Annotated[bool, typer.Option("--two-gpus", help="Measure how training spreads over two GPUs.")] = False,
    tables: Annotated[Path | None, typer.Option(help=".npz of arrays NAME__ninNIN__MODE [K, Nout].")] = None,
    table: TableOption = None,
    batch: BatchOption = None,
    dtype: DtypeOption = None,
    mode: ModeOption = None,
    direction: DirectionOption = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="ours, copy, fovi, torch, compile; all if absent; may be repeated.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Only the largest batch in float16, real tables.")] = False,
    seconds: Annotated[float | None, typer.Option(help="Begin no case after this time.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats of each measurement.")] = 15,
    memory: Annotated[int, typer.Option(min=0, help="GiB that plain torch may take; it is left out above.")] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Keep all numbers here.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write PNG pictures here.")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Show a recording; measure nothing.")] = None,
) -> None:
    """Measure the kernels beside a copy of as many bytes, plain torch, torch.compile and fovi; needs a GPU.

    What is measured is kept in --json FILE as it comes in. Exit 1 if a kernel fails.
    """
    with errors():
        if report is not None:
            from knnpool_gen.bench.record import read_recording

            recording = read_recording(report)
        else:
            recording = _measure(
                parts=(kernels, host, first_use, variants, two_gpus),
                tables=tables,
                names=table or [],
                selection=(batch or [], dtype or [], mode or [], direction or [], quick),
                options=(peer or [], repeats, memory, seconds),
                keep=json_file,
            )
        _show(recording, plots)


def _measure(
    parts: tuple[bool, bool, bool, bool, bool],
    tables: Path | None,
    names: Sequence[str],
    selection: tuple[Sequence[int], Sequence[str], Sequence[str], Sequence[str], bool],
    options: tuple[Sequence[str], int, int, float | None],
    keep: Path | None,
) -> Recording:
    """Check what was asked for, measure it and keep what comes in."""
    batches, dtypes, modes, directions, quick = selection
    peers, repeats, memory, seconds = options
    chosen_modes = words(Mode, "mode", modes)
    chosen_directions = words(Direction, "direction", directions) or tuple(Direction)

    from knnpool_gen.bench.cases import Selection
    from knnpool_gen.bench.device import require_device
    from knnpool_gen.bench.peers import Peer
    from knnpool_gen.bench.record import write_recording
    from knnpool_gen.bench.run import Options
    from knnpool_gen.bench.session import Parts, find_tables, measure

    chosen = Selection(tuple(batches), tuple(dtypes), chosen_modes, chosen_directions, quick)
    how = Options(words(Peer, "peer", peers), repeats, memory << 30, seconds)
    found = find_tables(tables, _say).named(names)
    require_device()
    wanted = Parts(*parts) if any(parts) else Parts()
    recording = None
    for recording in measure(wanted, found, chosen, how, _say):
        if keep is not None:
            write_recording(recording, keep)
    if recording is None:
        raise InvalidArgumentError("nothing to measure: no table is left")
    return recording


def words(kind: type[E], what: str, asked: Sequence[str]) -> tuple[E, ...]:
    """The members of ``kind`` with the values ``asked``, each once.

    Raises:
        InvalidArgumentError: there is none of a value.
    """
    known = {str(member.value): member for member in kind}
    unknown = [word for word in asked if word not in known]
    if unknown:
        raise InvalidArgumentError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")
    return tuple(dict.fromkeys(known[word] for word in asked))


def _show(recording: Recording, plots: Path | None) -> None:
    from knnpool_gen.bench.plots import write_plots
    from knnpool_gen.bench.report import lines, tables
    from knnpool_gen.bench.summary import summarize

    for table in tables(recording):
        stdout.print(table)
        stdout.print()
    for line in lines(recording):
        stdout.print(line, markup=False)
    known = [f"{name} {version}" for name, version in recording.versions.items() if version]
    stdout.print(f"{recording.machine.device}, {recording.date}: {', '.join(known)}", markup=False)
    for path in write_plots(recording, plots) if plots is not None else ():
        stderr.print(f"wrote {path}", markup=False)
    if summarize(recording.cases).failed:
        raise typer.Exit(1)


def _say(line: str) -> None:
    stderr.print(line, markup=False)
