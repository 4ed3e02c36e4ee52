"""Calls run in emulation: the generated sources, compiled by g++, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnpool_gen.emulator import EmulationError, Launch, Program, Sanitizer, build
from knnpool_gen.errors import KernelError
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime.compile import GENERATED, read_source
from knnpool_gen.runtime.select import Configuration, DeviceFacts, configure
from knnpool_gen.verification.calls import Call

SMALL_DEVICE = DeviceFacts(
    multiprocessors=1,
    shared_per_block=227 * 1024,
    shared_per_multiprocessor=228 * 1024,
    threads_per_multiprocessor=128,
)
"""Few blocks, so that each has several tiles to do."""
UNWRITTEN = 0x55
"""What outputs are filled with beforehand."""

MISALIGNMENT = 4
"""Bytes off a vector's alignment, yet right for every element type."""
MACROS = ("KNNPOOL_K", "KNNPOOL_NIN", "KNNPOOL_NOUT", "KNNPOOL_THREADS", "KNNPOOL_BLOCKS", "KNNPOOL_AUX")


class EmulatedBackend:
    """Builds each source once for all tables and runs all calls in one process."""

    def __init__(self, sanitizer: Sanitizer) -> None:
        """Run under ``sanitizer``."""
        self._sanitizer = sanitizer

    @property
    def name(self) -> str:
        """What checks are on."""
        return "emulation" if self._sanitizer is Sanitizer.NONE else f"emulation, {self._sanitizer.value} sanitizer"

    def run(self, kernel: Kernel, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
        """The outputs of every call.

        Raises:
            KernelError: the source does not build, or a sanitizer or the emulated device found a fault.
        """
        read_source(kernel)  # the file must be the one the table was generated with
        try:
            program: Program = build(GENERATED / kernel.file, self._sanitizer, parameters=MACROS)
            launches, outputs = [], []
            for call in calls:
                launch, output = _prepare(kernel, call)
                launches.append(launch)
                outputs.append(output)
            program.run(kernel.name, launches)
        except EmulationError as error:
            raise KernelError(f"{kernel.name} in emulation: {error}") from error
        return outputs


def _prepare(kernel: Kernel, call: Call) -> tuple[Launch, dict[str, Tensor]]:
    problem = call.problem
    configuration: Configuration = configure(problem, SMALL_DEVICE, call.key.rows, kernel)
    outputs = {name: torch.empty_like(expected) for name, expected in call.expected.items()}
    for output in outputs.values():
        _array(output).fill(UNWRITTEN)
    arguments: list[np.ndarray[Any, Any] | np.generic] = []
    for name in kernel.arguments:
        if name == "rows":
            arguments.append(np.int64(call.rows))
        elif name in outputs:
            arguments.append(_array(outputs[name]))
        elif name in call.inputs:
            arguments.append(_array(call.inputs[name]))
        elif name == "aux":
            arguments.append(np.empty(0, np.uint8))  # not written, not read
        else:
            arguments.append(_array(getattr(call.meta, name)))
    launch = Launch(
        grid=configuration.grid,
        block=configuration.threads,
        shared_bytes=configuration.shared_bytes,
        arguments=tuple(arguments),
        concurrent=configuration.grid,
        misalign=MISALIGNMENT if call.misaligned else 0,
        parameters={**dict.fromkeys(MACROS, 0), **dict(configuration.macros)},
    )
    return launch, outputs


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of ``tensor``; of its own memory if it is contiguous, so writes arrive there."""
    array: np.ndarray[Any, Any] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array
