"""Calls run in emulation: the generated sources, compiled by g++, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from knnpool_gen.emulator import EmulationError, Launch, Program, Sanitizer, build
from knnpool_gen.errors import KernelError
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime.compile import GENERATED, read_source
from knnpool_gen.runtime.execute import table
from knnpool_gen.runtime.select import DeviceFacts, configure, fits
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
"""Bytes off a vector's alignment, yet right for the elements of every table but one of wide entries."""
TYPES = ("KNNPOOL_INDEX", "KNNPOOL_SLOT", "KNNPOOL_ENTRY", "KNNPOOL_VECTOR", "KNNPOOL_OUT_VECTOR")
"""Macros that are fixed when a source is built; all others change from launch to launch."""


class EmulatedBackend:
    """Builds each source once for all tables and runs all calls in one process."""

    def __init__(self, sanitizer: Sanitizer, stack: int = 2) -> None:
        """Run under ``sanitizer``, in tiles of ``stack`` groups of rows where they fit, of one otherwise."""
        self._sanitizer = sanitizer
        self._stack = stack

    @property
    def name(self) -> str:
        """What checks are on."""
        return "emulation" if self._sanitizer is Sanitizer.NONE else f"emulation, {self._sanitizer.value} sanitizer"

    def run(self, kernel: Kernel, calls: Sequence[Call]) -> list[dict[str, Tensor]]:
        """The outputs of every call.

        Raises:
            KernelError: the source does not build, or a sanitizer or the emulated device found a fault.
        """
        source = read_source(kernel)  # the file must be the one the table was generated with
        prepared = [_prepare(kernel, call, self._stack) for call in calls]
        try:
            for types in dict.fromkeys(item.types for item in prepared):
                launches = [item.launch for item in prepared if item.types == types]
                program: Program = build(
                    GENERATED / kernel.file,
                    self._sanitizer,
                    parameters=tuple(launches[0].parameters),
                    defines={name: value for name, value in types if name in source},
                )
                program.run(kernel.name, launches)
        except EmulationError as error:
            raise KernelError(f"{kernel.name} in emulation: {error}") from error
        return [item.outputs for item in prepared]


@dataclass(frozen=True)
class _Prepared:
    """One call as a launch."""

    launch: Launch
    types: tuple[tuple[str, str], ...]
    outputs: dict[str, Tensor]


def _prepare(kernel: Kernel, call: Call, stack: int) -> _Prepared:
    problem = call.problem
    # Plain tiles and stacked ones, whatever the choice for this problem would be.
    stacked = not call.misaligned and fits(problem, SMALL_DEVICE, kernel, stack)
    configuration = configure(problem, SMALL_DEVICE, call.key.rows, kernel, stack if stacked else 1)
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
            arguments.append(_array(table(call.meta, call.reduction, name)))
    launch = Launch(
        grid=configuration.grid,
        block=configuration.threads,
        shared_bytes=configuration.shared_bytes,
        arguments=tuple(arguments),
        concurrent=configuration.grid,
        misalign=max(MISALIGNMENT, problem.entry_bytes, _widest(call)) if call.misaligned else 0,
        parameters={
            name: value for name, value in configuration.macros if isinstance(value, int) and name not in TYPES
        },
    )
    types = tuple((name, str(value)) for name, value in configuration.macros if name in TYPES)
    return _Prepared(launch, types, outputs)


def _widest(call: Call) -> int:
    return max(tensor.element_size() for tensor in call.expected.values())


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of ``tensor``; of its own memory if it is contiguous, so writes arrive there."""
    array: np.ndarray[Any, Any] = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return array
