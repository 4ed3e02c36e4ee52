"""One run of the benchmark: which parts, in which order, and the recording that grows on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from knnpool_gen import folders
from knnpool_gen.bench.cases import HEADLINE_TABLE, Selection, standard_cases, variant_cases
from knnpool_gen.bench.device import CudaTimer, machine, versions
from knnpool_gen.bench.first_use import measure_first_use
from knnpool_gen.bench.host import host_calls, time_calls
from knnpool_gen.bench.peers import Peer, UnavailableError, fovi_kernels
from knnpool_gen.bench.record import Recording
from knnpool_gen.bench.run import CaseMeasure, Options, run_cases
from knnpool_gen.bench.tables import (
    BenchTable,
    growing_k,
    growing_nin,
    load_tables,
    made_table,
    named,
    odd_tables,
)
from knnpool_gen.bench.two_gpus import measure_two_gpus
from knnpool_gen.bench.variants import measure_variants
from knnpool_gen.runtime.launch import device_facts

Say = Callable[[str], None]


@dataclass(frozen=True)
class Parts:
    """What to measure."""

    kernels: bool = True
    host: bool = False
    first_use: bool = False
    variants: bool = False
    two_gpus: bool = False


@dataclass(frozen=True)
class Tables:
    """Everything there is to measure with."""

    real: list[BenchTable]
    odd: list[BenchTable] = field(default_factory=odd_tables)
    nin: list[BenchTable] = field(default_factory=growing_nin)
    k: list[BenchTable] = field(default_factory=growing_k)

    @property
    def all(self) -> list[BenchTable]:
        """All of them."""
        return [*self.real, *self.odd, *self.nin, *self.k]

    def named(self, names: Sequence[str]) -> Tables:
        """Only those with these names, or all if there are none.

        Raises:
            InvalidArgumentError: no table has one of the names.
        """
        kept = set(map(id, named(self.all, names)))
        return Tables(*([t for t in group if id(t) in kept] for group in (self.real, self.odd, self.nin, self.k)))


def find_tables(file: Path | None, say: Say) -> Tables:
    """The real tables of ``file`` or, without one, of the checkout; made ones alone where there are none.

    Raises:
        InvalidArgumentError: ``file`` cannot be read or holds no table.
    """
    path = file or folders.real_tables()
    if path is None:
        say("the tables of real networks are part of the repository, not of an installed package; give --tables FILE")
    return Tables([] if path is None else load_tables(path))


def measure(
    parts: Parts,
    tables: Tables,
    selection: Selection,
    options: Options,
    say: Say,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Recording]:
    """Measure ``parts``, and hand over the recording each time that something came in."""
    end = None if options.seconds is None else clock() + options.seconds

    def left() -> float | None:
        return None if end is None else end - clock()

    here = machine()
    recording = Recording(here, versions(), datetime.now(timezone.utc).isoformat(timespec="seconds"))
    if parts.two_gpus:
        say("training on two GPUs")
        recording = replace(recording, two_gpus=measure_two_gpus())
        yield recording
    if parts.host:
        table = next((table for table in tables.real if table.name == HEADLINE_TABLE), made_table("made", 964, 230, 9))
        say("host time")
        recording = replace(recording, host=tuple(time_calls(host_calls(table, say), torch.cuda.synchronize)))
        yield recording
    if parts.first_use:
        say("first use of tables")
        recording = replace(recording, first_use=measure_first_use())
        yield recording
    if parts.kernels:
        _say_who_is_missing(options, say)
        cases = standard_cases(tables.real, tables.odd, tables.nin, tables.k, selection)
        device = torch.device("cuda", torch.cuda.current_device())
        facts = device_facts(device.index)
        measure_case = CaseMeasure(tables.all, cases, options, here, facts, CudaTimer(), device)
        for number, (case, result) in enumerate(run_cases(cases, measure_case, left(), clock), 1):
            if result is None:
                recording = replace(recording, left_out=(*recording.left_out, case.name))
            else:
                say(f"{number}/{len(cases)} {case.name}")
                recording = recording.with_case(result)
            yield recording
    if parts.variants:
        by_name = {table.name: table for table in tables.all}
        for case in variant_cases(tables.real, selection):
            if (remaining := left()) is not None and remaining <= 0:
                recording = replace(recording, left_out=(*recording.left_out, f"variants of {case.name}"))
            elif (found := measure_variants(case, by_name[case.table], here, repeats=options.repeats)) is not None:
                say(f"variants of {case.name}")
                recording = replace(recording, variants=(*recording.variants, found))
            yield recording


def _say_who_is_missing(options: Options, say: Say) -> None:
    if not options.peers or Peer.FOVI in options.peers:
        try:
            fovi_kernels()
        except UnavailableError as error:
            say(f"fovi left out: {error}")
