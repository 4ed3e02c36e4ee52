"""``knnpool-gen tune``: measure every way to run a problem here, and keep the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from knnpool_gen.cli.bench import DirectionOption, DtypeOption, ModeOption, TableOption, words
from knnpool_gen.cli.shared import JsonOption, errors, print_json, progress, stderr, stdout
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Direction, Mode

if TYPE_CHECKING:
    from knnpool_gen.bench.cases import Case
    from knnpool_gen.bench.tables import BenchTable


def tune(
    problem: Annotated[
        list[str], typer.Argument(metavar="FILE | NIN NOUT K", help="A .npy or .npz of tables [K, Nout], or sizes.")
    ],
    rows: Annotated[list[int] | None, typer.Option(help="Rows of the input (B * C); may be repeated.")] = None,
    nin: Annotated[int | None, typer.Option(help="Inputs of the table of a .npy file.")] = None,
    table: TableOption = None,
    dtype: DtypeOption = None,
    mode: ModeOption = None,
    direction: DirectionOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure, and keep nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure every variant, stacking and block size for a problem on this GPU, and keep the fastest.

    Kept in the user's config folder, or in KNNPOOL_TUNED=FILE; KNNPOOL_TUNED=off leaves every choice to the model. A
    choice serves inputs of half to twice as many rows.
    """
    with errors():
        tables = _tables(problem, nin, words(Mode, "mode", mode or []))
        directions = words(Direction, "direction", direction or []) or tuple(Direction)

        from knnpool_gen.bench.cases import Selection, tuned_cases
        from knnpool_gen.bench.device import machine, require_device
        from knnpool_gen.bench.tables import named
        from knnpool_gen.bench.tune import best_choice
        from knnpool_gen.bench.variants import measure_variants
        from knnpool_gen.runtime.select import forget_choices
        from knnpool_gen.runtime.tuned import read_tuned, tuned_file, write_tuned

        selection = Selection(tuple(rows or (4096,)), tuple(dtype or ("float16",)), (), directions)
        chosen = named(tables, table or [])
        path = tuned_file()
        if path is None and not dry_run:
            raise InvalidArgumentError("KNNPOOL_TUNED=off: there is no file to keep choices in; give --dry-run")
        if path is not None and not dry_run:
            read_tuned(path)  # what cannot be kept is not worth measuring
        require_device()
        here = machine()
        choices = []
        todo: list[tuple[Case, BenchTable]] = [(case, item) for item in chosen for case in tuned_cases(item, selection)]
        for case, item in progress(todo, len(todo), "tuning"):
            result = measure_variants(case, item, here, all_threads=True)
            if result is None:
                stderr.print(f"{case.name}: too little memory", markup=False)
                continue
            choices.append(best_choice(result))
        if path is not None and not dry_run:
            write_tuned(path, here.device, choices)
            forget_choices()
    if as_json:
        print_json([vars(choice) for choice in choices])
        return
    shown = Table("direction", "mode", "dtype", "rows", "fastest", "stack", "threads", "µs", "model µs", box=None)
    for choice in choices:
        shown.add_row(
            choice.direction,
            choice.mode,
            choice.dtype,
            str(choice.rows),
            choice.variant,
            str(choice.stack),
            str(choice.threads),
            f"{choice.microseconds:.1f}",
            f"{choice.model_microseconds:.1f}",
        )
    stdout.print(shown)
    stderr.print(f"{len(choices)} choice(s), " + ("not kept" if dry_run else f"kept in {path}"), markup=False)


def _tables(problem: Sequence[str], nin: int | None, modes: Sequence[Mode]) -> list[BenchTable]:
    """The tables that ``problem`` names, each in every one of ``modes``, or in its own."""
    from dataclasses import replace

    from knnpool_gen.bench.tables import load_table, made_table

    if len(problem) == 1:
        tables = load_table(Path(problem[0]), nin, Mode.MAX)
    elif len(problem) == 3 and all(size.isdecimal() for size in problem) and int(problem[0]) > 0:
        inputs, outputs, k = map(int, problem)
        tables = [made_table(f"{inputs}to{outputs}", inputs, outputs, k)]
    else:
        raise InvalidArgumentError(f"{' '.join(problem)}: give the file of a table, or its sizes NIN NOUT K")
    return [replace(table, mode=mode) for table in tables for mode in modes or (table.mode,)]
