"""What is wrong with specs, and where: collected, and raised together."""

from __future__ import annotations

from dataclasses import dataclass, field

from knnpool_gen.errors import SpecError


@dataclass(frozen=True)
class Place:
    """A line of a file, counted from one."""

    file: str
    line: int


@dataclass(order=True, frozen=True)
class Fault:
    """One thing that is wrong, and where."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass
class Faults:
    """Everything that is wrong in one run."""

    found: list[Fault] = field(default_factory=list)

    def add(self, at: Place, message: str) -> None:
        """Note a fault at the position of ``at``."""
        self.found.append(Fault(at.file, at.line, message))

    def raise_if_any(self) -> None:
        """Raise one SpecError that names every fault, a line each, sorted by file and line."""
        if self.found:
            raise SpecError("\n".join(map(str, sorted(set(self.found)))))
