"""Recordings and timers that stand in for a device; the numbers are made up, and easy to work with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from knnpool_gen.bench.cases import Case, Group
from knnpool_gen.bench.device import Machine
from knnpool_gen.bench.measure import Contender, Spread, Window
from knnpool_gen.bench.record import (
    CaseResult,
    FirstUse,
    HostResult,
    Recording,
    VariantResult,
    VariantTime,
)
from knnpool_gen.vocabulary import Direction, Mode

MACHINE = Machine(device="Made Up sm_90", multiprocessors=132, l2_bytes=1 << 16, memory_bytes=1 << 30, system="none")


def case(table: str = "alexnet64_pool0", direction: Direction = Direction.FORWARD, **facts: object) -> Case:
    usual = {"nin": 964, "nout": 230, "k": 9, "batch": 512, "channels": 96, "dtype": "float16", "mode": Mode.MAX}
    return Case(table=table, direction=direction, **{**usual, **facts})  # type: ignore[arg-type]


def result(of: Case, **times: float | None) -> CaseResult:
    """A result with these medians in µs."""
    spreads = {
        peer: None if time is None else Spread(time, 0.9 * time, 1.1 * time, repeats=15, launches=20)
        for peer, time in times.items()
    }
    reasons = {peer: "not today" for peer, time in times.items() if time is None}
    return CaseResult(of, "knnpool_forward_max_float16_shared_r8", 6, True, spreads, reasons)


def recording() -> Recording:
    """Something of everything."""
    growing = [
        result(case(f"{group.value}{size}", direction, group=group, **{group.value: size}), ours=float(size), copy=5.0)
        for group in (Group.NIN, Group.K)
        for size in (16, 64)
        for direction in Direction
    ]
    return Recording(
        machine=MACHINE,
        versions={"knnpool-gen": "1.2.3", "torch": "2.11", "fovi": None},
        date="2026-03-04T05:06:07+00:00",
        cases=(
            result(case(), ours=40.0, copy=36.0, fovi=120.0, torch=800.0, compile=240.0),
            result(case(direction=Direction.BACKWARD), ours=50.0, copy=40.0, fovi=40.0, torch=None),
            result(case(batch=8), ours=10.0, copy=1.0, fovi=30.0, torch=50.0),
            result(case("small", nin=16, nout=1), ours=None, copy=1.0),
            *growing,
        ),
        host=(HostResult("forward", "ours", 12.5, 12.0, 1000), HostResult("forward", "fovi", 25.0, 24.0, 1000)),
        first_use=FirstUse(900.0, 600.0, 300.0, 15.0, 2.5, 8.0, 5000.0, 250.0),
        variants=(
            VariantResult(
                case(),
                VariantTime("r8", 1, 256, 44.0),
                (VariantTime("r8", 1, 256, 44.0), VariantTime("r4", 2, 128, 40.0)),
            ),
        ),
        left_out=("a case", "another"),
    )


@dataclass
class FakeTimer:
    """Says how long contenders take, by name, and writes down who was asked."""

    microseconds: Callable[[str], float] = lambda name: 10.0
    windows: list[tuple[str, int]] = field(default_factory=list)

    def window(self, contender: Contender, launches: int) -> Window:
        self.windows.append((contender.name, launches))
        for _ in range(min(launches, 2)):
            contender.launch()
        return Window(self.microseconds(contender.name))


@dataclass
class FakeClock:
    """Goes on by a second each time it is looked at."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now
