"""Times of several contenders, interleaved; what a timer is, and what becomes of its numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

MIN_LAUNCHES = 20
"""Launches between two events, so that an event's own time does not count."""
WINDOW_US = 3000.0
"""Contenders that take long are launched less often: for about as long as this."""
TRIAL_LAUNCHES = 3
REPEATS = 15
DECIMALS = 3
"""Of a microsecond: events are no more exact."""


@dataclass(eq=False)
class Contender:
    """Something to be timed, with sets of buffers that it takes turns with."""

    name: str
    run: Callable[[int], object]
    """Launches once, with the set of buffers of that number."""
    sets: int
    min_launches: int = MIN_LAUNCHES
    _next: int = field(default=0, init=False)

    def launch(self) -> None:
        """Launch once, with the next set of buffers."""
        self.run(self._next)
        self._next = (self._next + 1) % self.sets


@dataclass(frozen=True)
class Window:
    """What was measured between two events."""

    microseconds: float
    """Time of one launch."""
    queued: bool = True
    """Whether the device never waited for the host."""


class Timer(Protocol):
    """Measures the time of launches on a device."""

    def window(self, contender: Contender, launches: int) -> Window:
        """Time so many launches, one after the other."""


@dataclass(frozen=True)
class Spread:
    """Repeated measurements of one time, in microseconds a launch."""

    median: float
    low: float
    """The first quartile."""
    high: float
    """The third."""
    repeats: int
    launches: int
    """Launches of each repeat."""
    queued: bool = True
    """False where the device waited for the host in most repeats: then this is the time of the host."""


def spread(windows: Sequence[Window], launches: int) -> Spread:
    """Median and quartiles of ``windows``."""
    times = [window.microseconds for window in windows]
    quartiles = statistics.quantiles(times * 2 if len(times) == 1 else times, n=4, method="inclusive")
    low, median, high = (round(quartile, DECIMALS) for quartile in quartiles)
    queued = 2 * sum(window.queued for window in windows) >= len(windows)
    return Spread(median, low, high, len(times), launches, queued)


def launches_for(microseconds: float, min_launches: int) -> int:
    """How often to launch between two events what takes about so long."""
    return max(min_launches, min(MIN_LAUNCHES, int(WINDOW_US // max(microseconds, 1e-3))))


def interleave(contenders: Sequence[Contender], timer: Timer, repeats: int = REPEATS) -> dict[str, Spread]:
    """Time all contenders in turn, ``repeats`` times, beginning each time with another one."""
    launches = {
        contender.name: launches_for(timer.window(contender, TRIAL_LAUNCHES).microseconds, contender.min_launches)
        for contender in contenders
    }
    times: dict[str, list[Window]] = {contender.name: [] for contender in contenders}
    for repeat in range(repeats):
        for place in range(len(contenders)):
            contender = contenders[(repeat + place) % len(contenders)]
            times[contender.name].append(timer.window(contender, launches[contender.name]))
    return {name: spread(measured, launches[name]) for name, measured in times.items()}
