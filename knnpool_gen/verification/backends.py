"""Where calls are run: the kernels on a GPU, or their sources in emulation on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.kernel import Kernel
from knnpool_gen.pooling import pool_backward, pool_forward
from knnpool_gen.runtime import execute
from knnpool_gen.runtime.aux_layout import AuxLayout
from knnpool_gen.runtime.plan import PoolMeta
from knnpool_gen.verification.calls import Call
from knnpool_gen.vocabulary import Direction

Outputs = dict[str, Tensor]


class Backend(Protocol):
    """Runs calls of one kernel."""

    @property
    def name(self) -> str:
        """What a report calls it."""

    def run(self, kernel: Kernel, calls: Sequence[Call]) -> list[Outputs]:
        """The outputs of every call, on the CPU, by the names of the kernel's arguments."""


class DeviceBackend:
    """The public functions on a CUDA device, each call with the tile height of its kernel."""

    def __init__(self, device: str = "cuda") -> None:
        """Run on ``device``."""
        self._device = torch.device(device, torch.cuda.current_device())

    @property
    def name(self) -> str:
        """Name of the GPU."""
        return torch.cuda.get_device_name(self._device)

    def run(self, kernel: Kernel, calls: Sequence[Call]) -> list[Outputs]:
        """Run every call through :func:`pool_forward` or :func:`pool_backward`."""
        return [self._run(call) for call in calls]

    def _run(self, call: Call) -> Outputs:
        meta = call.meta.to(self._device)
        inputs = {name: self._place(tensor, call.misaligned) for name, tensor in call.inputs.items()}
        mode, rs, options = call.key.mode.value, call.key.rows, call.options
        if call.layout is AuxLayout.BLOCKS:
            return self._run_blocked(call, meta, inputs)
        if call.key.direction is Direction.BACKWARD:
            grad_x = pool_backward(meta, inputs["grad_y"], inputs.get("aux"), mode, rs, **options)  # type: ignore[arg-type]
            return {"grad_x": grad_x.cpu()}
        need_aux = "aux" in call.expected
        y, aux = pool_forward(meta, inputs["x"], mode, rs, need_aux, **options)  # type: ignore[arg-type]
        return {"y": y.cpu()} if aux is None else {"y": y.cpu(), "aux": aux.cpu()}

    def _run_blocked(self, call: Call, meta: PoolMeta, inputs: Outputs) -> Outputs:
        """The layer that autograd uses: the public functions know no aux in blocks."""
        reduction, rs = call.reduction, call.key.rows
        if call.key.direction is Direction.BACKWARD:
            grad_x = execute.backward(meta, inputs["grad_y"], inputs["aux"], reduction, rs, call.layout)
            return {"grad_x": grad_x.cpu()}
        y, aux = execute.forward(meta, inputs["x"], reduction, True, rs, call.layout)
        assert aux is not None
        return {"y": y.cpu(), "aux": aux.cpu()}

    def _place(self, tensor: Tensor, misaligned: bool) -> Tensor:
        offset = int(misaligned)
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=self._device)
        return memory[offset:].view(tensor.shape).copy_(tensor)


def choose_backend(emulate: bool, sanitizer: str) -> Backend:
    """The backend the command line asks for.

    Raises:
        InvalidArgumentError: no such sanitizer, a sanitizer without emulation, or no GPU without it.
    """
    from knnpool_gen.emulator import Sanitizer
    from knnpool_gen.verification.emulated import EmulatedBackend

    known = [member.value for member in Sanitizer]
    if sanitizer not in known:
        raise InvalidArgumentError(f"--sanitizer {sanitizer}: there are {', '.join(known)}")
    if emulate:
        return EmulatedBackend(Sanitizer(sanitizer))
    if sanitizer != Sanitizer.NONE.value:
        raise InvalidArgumentError("--sanitizer needs --emulate")
    if not torch.cuda.is_available():
        raise InvalidArgumentError("there is no CUDA device here; --emulate runs the kernels on the CPU")
    return DeviceBackend()
