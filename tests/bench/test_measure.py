"""Repeats, quartiles and turns, with a timer that makes up its times."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from knnpool_gen.bench.buffers import ALIGNMENT, empty_sets, exceeds_l2, random_sets, sets_needed
from knnpool_gen.bench.host import HostCall, time_calls
from knnpool_gen.bench.measure import Contender, Spread, Window, interleave, launches_for, spread
from measurements import FakeTimer

MIB = 1 << 20


def windows(*times: float) -> list[Window]:
    return [Window(time) for time in times]


def test_median_and_quartiles() -> None:
    assert spread(windows(5, 1, 3, 2, 4), launches=20) == Spread(3, 2, 4, repeats=5, launches=20)
    assert spread(windows(1, 2, 3, 10), 7) == Spread(2.5, 1.75, 4.75, 4, 7)
    assert spread(windows(6), 7) == Spread(6, 6, 6, 1, 7)


def test_a_time_of_the_host_is_marked() -> None:
    late = Window(1.0, queued=False)
    assert not spread([late, late, Window(1.0)], 20).queued
    assert spread([late, Window(1.0), Window(1.0)], 20).queued


@pytest.mark.parametrize(
    ("microseconds", "min_launches", "launches"),
    [(0.0, 2, 20), (40.0, 20, 20), (100_000.0, 20, 20), (500.0, 2, 6), (1000.0, 2, 3), (100_000.0, 2, 2)],
)
def test_slow_peers_are_launched_less_often(microseconds: float, min_launches: int, launches: int) -> None:
    assert launches_for(microseconds, min_launches) == launches


def test_contenders_take_turns() -> None:
    used: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    contenders = [
        Contender("a", used["a"].append, sets=3),
        Contender("b", used["b"].append, sets=2),
        Contender("c", used["c"].append, sets=2, min_launches=2),
    ]
    times = iter([1.0, 2.0, 1500.0, *range(1, 10)])
    timer = FakeTimer(lambda name: float(next(times)))

    measured = interleave(contenders, timer, repeats=3)

    names = [name for name, _ in timer.windows]
    assert names == [*"abc", *"abc", *"bca", *"cab"]
    assert timer.windows[3:6] == [("a", 20), ("b", 20), ("c", 2)]
    assert used == {"a": [0, 1, 2, 0, 1, 2, 0, 1], "b": [0, 1] * 4, "c": [0, 1] * 4}
    # a got 1, 6 and 8; b got 2, 4 and 9; c got 3, 5 and 7.
    assert {name: time.median for name, time in measured.items()} == {"a": 6, "b": 4, "c": 5}
    assert interleave([], timer) == {}


@pytest.mark.parametrize(
    ("a_set", "limit", "sets"),
    [
        (64 * MIB, 1 << 40, 6),
        (10 * MIB, 1 << 40, 10),
        (1, 1 << 40, 256),
        (0, 1 << 40, 256),
        (64 * MIB, 300 * MIB, 4),
        (64 * MIB, 127 * MIB, 0),
    ],
)
def test_sets_that_exceed_the_l2(a_set: int, limit: int, sets: int) -> None:
    assert sets_needed(a_set, 50 * MIB, limit) == sets
    assert exceeds_l2(a_set, sets, 50 * MIB) == (a_set > MIB and sets > 0)


def test_sets_are_aligned_and_apart() -> None:
    first, second, third = empty_sets(3, (5, 7), torch.float16, torch.device("cpu"))
    assert second.data_ptr() - first.data_ptr() == third.data_ptr() - second.data_ptr() == ALIGNMENT
    assert first.shape == (5, 7)
    assert [tensor.shape for tensor in empty_sets(2, (3, 0), torch.float32, torch.device("cpu"))] == [(3, 0), (3, 0)]
    a, b = random_sets(2, (1000,), torch.float32, torch.device("cpu"), seed=1)
    assert torch.equal(a, random_sets(2, (1000,), torch.float32, torch.device("cpu"), seed=1)[0])
    assert not torch.equal(a, b)
    assert abs(float(a.std()) - 1) < 0.1


def test_host_times_are_taken_call_after_call() -> None:
    said: list[str] = []

    def ticks() -> Iterator[float]:
        # Start and end of each: 100 calls in 2, 4, 3 ms of one kind and in 10 ms of the other.
        for first, second in ((2e-3, 1e-2), (4e-3, 1e-2), (3e-3, 1e-2)):
            yield from (0.0, first, 0.0, second)

    clock = ticks()
    calls = [HostCall("call", "ours", lambda: said.append("o")), HostCall("call", "them", lambda: said.append("t"))]
    ours, theirs = time_calls(calls, lambda: said.append("|"), count=100, repeats=3, clock=lambda: next(clock))
    assert "".join(said) == "o" * 10 + "t" * 10 + ("|" + "o" * 100 + "||" + "t" * 100 + "|") * 3
    assert (ours.median, ours.best, ours.calls) == (pytest.approx(30), pytest.approx(20), 100)
    assert (theirs.peer, theirs.median) == ("them", pytest.approx(100))
