"""Cases measured one after the other, within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from knnpool_gen.bench.buffers import exceeds_l2, sets_needed
from knnpool_gen.bench.cases import Case, compiled_cases
from knnpool_gen.bench.device import Machine
from knnpool_gen.bench.measure import REPEATS, Contender, Spread, Timer, interleave
from knnpool_gen.bench.peers import Peer, UnavailableError, contender, make_stage
from knnpool_gen.bench.record import CaseResult
from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.bench.variants import problem_of_case
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import DeviceFacts, select

TOO_LARGE = "too little memory"
TENSORS_A_SET = 4
"""What a set takes of memory, as a multiple of the bytes that the pool moves: inputs, outputs, and those of a copy."""


@dataclass(frozen=True)
class Options:
    """How to measure."""

    peers: tuple[Peer, ...] = ()
    """All if empty; ``torch.compile`` is then measured for some cases only, because it takes seconds for each."""
    repeats: int = REPEATS
    limit_bytes: int = 24 << 30
    """Peers that would take more memory than this are left out."""
    seconds: float | None = None
    """Cases that begin later than this are left out."""


Measure = Callable[[Case], CaseResult]


def run_cases(
    cases: Sequence[Case],
    measure: Measure,
    seconds: float | None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[tuple[Case, CaseResult | None]]:
    """Measure ``cases`` in order; None for those for which no time is left."""
    end = None if seconds is None else clock() + seconds
    for case in cases:
        yield case, measure(case) if end is None or clock() < end else None


class CaseMeasure:
    """Measures cases on one device, beside their peers."""

    def __init__(
        self,
        tables: Sequence[BenchTable],
        cases: Sequence[Case],
        options: Options,
        machine: Machine,
        facts: DeviceFacts,
        timer: Timer,
        device: torch.device,
    ) -> None:
        """Be ready to measure ``cases`` of ``tables`` on ``device``, which ``machine`` and ``facts`` describe."""
        self._tables = {table.name: table for table in tables}
        self._plans: dict[str, PoolMeta] = {}
        self._compiled = compiled_cases(cases)
        self._options = options
        self._machine = machine
        self._facts = facts
        self._timer = timer
        self._device = device

    def __call__(self, case: Case) -> CaseResult:
        """Measure ``case``; what goes wrong is told in the result."""
        chosen = select(problem_of_case(case), self._facts).kernel.name
        names = [peer.value for peer in self._peers(case)]
        l2_bytes = self._machine.l2_bytes
        sets = sets_needed(case.traffic, l2_bytes, self._machine.memory_bytes // (2 * TENSORS_A_SET))
        times: dict[str, Spread | None] = dict.fromkeys(names)
        if sets == 0:
            return CaseResult(case, chosen, 0, True, times, dict.fromkeys(names, TOO_LARGE))
        try:
            contenders, reasons = self._contenders(case, sets)
            times |= interleave(contenders, self._timer, self._options.repeats)
        except torch.cuda.OutOfMemoryError:
            reasons = dict.fromkeys(names, TOO_LARGE)
        contenders = []
        if self._device.type == "cuda" and torch.cuda.memory_reserved() > self._machine.memory_bytes // 2:
            torch.cuda.empty_cache()
        return CaseResult(case, chosen, sets, exceeds_l2(case.traffic, sets, l2_bytes), times, reasons)

    def _peers(self, case: Case) -> list[Peer]:
        asked = self._options.peers
        return [peer for peer in asked or Peer if asked or peer is not Peer.COMPILE or case in self._compiled]

    def _contenders(self, case: Case, sets: int) -> tuple[list[Contender], dict[str, str]]:
        """Those who can run the case, and why the others cannot."""
        table = self._tables[case.table]
        stage = make_stage(
            case, table, self._plan(table), sets, self._machine.l2_bytes, self._options.limit_bytes
        )  # fmt: skip
        ready: list[Contender] = []
        reasons: dict[str, str] = {}
        for peer in self._peers(case):
            try:
                ready.append(contender(peer, stage))
            except UnavailableError as error:
                reasons[peer.value] = str(error)
        return ready, reasons

    def _plan(self, table: BenchTable) -> PoolMeta:
        if table.name not in self._plans:
            self._plans[table.name] = pool_meta_from_indices(table.indices, table.nin, self._device)
        return self._plans[table.name]
