"""One kernel against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from knnpool_gen.errors import KNNPoolError
from knnpool_gen.kernel import Kernel, KernelKey
from knnpool_gen.verification.backends import Backend
from knnpool_gen.verification.calls import Call, calls
from knnpool_gen.verification.compare import difference
from knnpool_gen.verification.tables import small_tables


@dataclass(frozen=True)
class Verdict:
    """How many calls a kernel was given and what was wrong with them."""

    name: str
    cases: int
    faults: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify_kernel(key: KernelKey, kernel: Kernel, backend: Backend, given: Sequence[Call] | None = None) -> Verdict:
    """Run ``given``, by default every small table, and compare all outputs bit for bit."""
    cases = list(calls(key, small_tables())) if given is None else list(given)
    try:
        results = backend.run(kernel, cases)
    except KNNPoolError as error:
        return Verdict(kernel.name, len(cases), (str(error),))
    faults = []
    for case, outputs in zip(cases, results, strict=True):
        for name, expected in case.expected.items():
            wrong = difference(outputs[name], expected)
            if wrong is not None:
                faults.append(f"{case.name}: {name}: {wrong}")
    return Verdict(kernel.name, len(cases), tuple(faults))
