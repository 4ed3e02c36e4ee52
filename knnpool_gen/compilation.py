"""Every variant for every architecture through NVRTC: what ``knnpool-gen compile`` reports."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from knnpool_gen.errors import CompileError, InvalidArgumentError
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime import cuda
from knnpool_gen.runtime.compile import compile_kernel

DEFAULT_NODES = {"x": 964, "y": 230, "grad_y": 230, "grad_x": 964}
"""Nodes of a row of a tensor with the sizes a source has when it is compiled alone."""


@dataclass(frozen=True)
class Compilation:
    """One variant compiled for one architecture, with the table sizes written into its source."""

    variant: str
    arch: str
    cubin_bytes: int = 0
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    """Dynamic shared memory of a tile."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Compiled, and nothing spilled."""
        return self.error is None and self.spill_bytes == 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def as_row(self) -> tuple[object, ...]:
        """For a table."""
        return self.variant, self.arch, self.cubin_bytes, self.registers, self.spill_bytes, self.shared_bytes


def architectures(asked: Sequence[str], usual: Sequence[str]) -> Sequence[str]:
    """Those asked for; if none is, those of the usual ones that this NVRTC knows.

    Raises:
        InvalidArgumentError: NVRTC does not know one that is asked for.
    """
    nvrtc = cuda.nvrtc()
    known = [f"sm_{number}" for number in nvrtc.getSupportedArchs()]
    unknown = [arch for arch in asked if re.sub("[af]$", "", arch) not in known]  # sm_90a is a kind of sm_90
    if unknown:
        version = ".".join(map(str, nvrtc.getVersion()))
        raise InvalidArgumentError(f"no architecture {', '.join(unknown)}; NVRTC {version} knows {', '.join(known)}")
    return asked or [arch for arch in usual if arch in known]


def compile_matrix(kernels: Sequence[Kernel], archs: Sequence[str]) -> Iterator[Compilation]:
    """Compile all combinations on all cores, in order. A refused source is a result, not an exception."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(lambda task: _compile(*task), [(kernel, arch) for kernel in kernels for arch in archs])


def _compile(kernel: Kernel, arch: str) -> Compilation:
    try:
        binary, resources = compile_kernel(kernel, arch)
    except CompileError as error:
        return Compilation(kernel.name, arch, error=str(error))
    staged, written = (DEFAULT_NODES[name] for name in kernel.arguments if name in DEFAULT_NODES)
    return Compilation(
        kernel.name,
        arch,
        cubin_bytes=len(binary),
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        shared_bytes=resources.static_shared_bytes + kernel.shared_bytes(staged, written),
    )
