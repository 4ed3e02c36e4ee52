"""What was measured, as dataclasses and as JSON. All times are in microseconds."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from knnpool_gen.bench.cases import Case, Group
from knnpool_gen.bench.device import Machine
from knnpool_gen.bench.measure import Spread
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.vocabulary import Direction, Mode

FORMAT = 1


@dataclass(frozen=True)
class CaseResult:
    """All that was measured of one case."""

    case: Case
    variant: str
    """The kernel that was chosen."""
    sets: int
    """Sets of buffers taken in turns."""
    exceeds_l2: bool
    """Whether all sets together are larger than the L2 cache; the smallest cases are not."""
    times: Mapping[str, Spread | None]
    """By the name of the peer; None for one that could not take part."""
    reasons: Mapping[str, str]
    """Why not."""


@dataclass(frozen=True)
class HostResult:
    """Host time of one kind of call."""

    call: str
    peer: str
    median: float
    best: float
    calls: int
    """Calls of each repeat."""


@dataclass(frozen=True)
class FirstUse:
    """What the first use of tables takes, in milliseconds: plan, choice, compilation, loading, a launch each way."""

    process_cold: float
    """The first table of a process, with an empty cache: CuPy and NVRTC are loaded too."""
    process_warm: float
    """The same with the kernels on disk."""
    cold: float
    """Another table in that process, with an empty cache."""
    warm: float
    """The same with the kernels on disk."""
    plan: float
    """What the plan takes of it."""
    again: float
    """The same table once more, after :func:`~knnpool_gen.clear_pool_cache`."""
    twenty_cold: float
    """Twenty more tables in a row, with an empty cache."""
    twenty_warm: float
    """The same with the kernels on disk."""


@dataclass(frozen=True)
class TwoGpus:
    """Milliseconds of a training step with a batch for each GPU."""

    one: float
    """On one GPU."""
    two: float
    """On two."""

    @property
    def throughput(self) -> float:
        """That of two GPUs in units of that of one."""
        return 2 * self.one / self.two


@dataclass(frozen=True)
class VariantTime:
    """One way to run a problem."""

    variant: str
    stack: int
    threads: int
    microseconds: float
    """Median."""


@dataclass(frozen=True)
class VariantResult:
    """Every way to run one case."""

    case: Case
    chosen: VariantTime
    """What the model chose when this was recorded."""
    times: tuple[VariantTime, ...]


@dataclass(frozen=True)
class Recording:
    """One run of the benchmark."""

    machine: Machine
    versions: Mapping[str, str | None]
    date: str
    """ISO 8601, UTC."""
    cases: tuple[CaseResult, ...] = ()
    host: tuple[HostResult, ...] = ()
    first_use: FirstUse | None = None
    variants: tuple[VariantResult, ...] = ()
    two_gpus: TwoGpus | None = None
    left_out: tuple[str, ...] = ()
    """Names of cases for which there was no time or memory."""
    format: int = field(default=FORMAT, init=False)

    def with_case(self, result: CaseResult) -> Recording:
        """This and one more case."""
        return replace(self, cases=(*self.cases, result))


def write_recording(recording: Recording, path: Path) -> None:
    """Write JSON to ``path``, whole or not at all.

    Raises:
        InvalidArgumentError: the file cannot be written.
    """
    text = json.dumps(asdict(recording), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise InvalidArgumentError(f"{path} cannot be written: {error}") from error


def read_recording(path: Path) -> Recording:
    """What :func:`write_recording` wrote.

    Raises:
        InvalidArgumentError: the file cannot be read, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InvalidArgumentError(f"{path} is not a recording of format {FORMAT}")
    try:
        return Recording(
            machine=Machine(**content.pop("machine")),
            cases=tuple(_case_result(entry) for entry in content.pop("cases")),
            host=tuple(HostResult(**entry) for entry in content.pop("host")),
            first_use=None if (first := content.pop("first_use")) is None else FirstUse(**first),
            variants=tuple(_variant_result(entry) for entry in content.pop("variants")),
            # Recordings from before there was this part lack it.
            two_gpus=None if (two := content.pop("two_gpus", None)) is None else TwoGpus(**two),
            left_out=tuple(content.pop("left_out")),
            **content,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidArgumentError(f"{path} is not a recording of format {FORMAT}: {error!r}") from error


def _case(entry: Mapping[str, Any]) -> Case:
    enums = {"mode": Mode(entry["mode"]), "direction": Direction(entry["direction"]), "group": Group(entry["group"])}
    return Case(**{**entry, **enums})


def _case_result(entry: dict[str, Any]) -> CaseResult:
    times = {peer: None if time is None else Spread(**time) for peer, time in entry.pop("times").items()}
    return CaseResult(case=_case(entry.pop("case")), times=times, **entry)


def _variant_result(entry: dict[str, Any]) -> VariantResult:
    return VariantResult(
        case=_case(entry["case"]),
        chosen=VariantTime(**entry["chosen"]),
        times=tuple(VariantTime(**time) for time in entry["times"]),
    )
