"""The main job on a real table: compile every variant, pool forward and backward, compare with plain torch.

    python tools/demo.py

Runs the kernels on a GPU if there is one, otherwise in emulation beside the torch reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from knnpool_gen import pool_function
from knnpool_gen.cli import ARCHITECTURES
from knnpool_gen.compilation import compile_matrix
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.verification import calls, choose_backend, verify_kernel
from knnpool_gen.verification.tables import Table as NeighbourTable
from knnpool_gen.vocabulary import Direction, Mode, Staging

TABLES = Path(__file__).parent.parent / "tests" / "data" / "fovi_tables.npz"
CHANNELS = 96

console = Console(highlight=False, soft_wrap=True)


def alexp0() -> NeighbourTable:
    """The first pool of fovi's AlexNet at 64 pixels: 964 inputs, 230 outputs, 9 neighbours."""
    with np.load(TABLES) as arrays:
        indices = torch.from_numpy(arrays["alexnet64_pool0__nin964__max"].astype(np.int64))
    return NeighbourTable("alexp0", indices, 964)


def torch_baseline(x: Tensor, indices: Tensor, mode: str) -> Tensor:
    """What people write today: gather to ``[B, C, K, Nout]``, pads as NaN, then reduce."""
    padded = torch.cat([x, x.new_full((*x.shape[:-1], 1), torch.nan)], -1)
    gathered = padded[..., indices.clamp(max=x.shape[-1])]
    if mode == "avg":
        return gathered.float().nanmean(-2).to(x.dtype)
    return gathered.masked_fill(gathered.isnan(), -torch.inf).amax(-2)


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of the fastest of five runs."""
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def compile_all() -> bool:
    """Every variant for every architecture."""
    total = len(KERNELS) * len(ARCHITECTURES)
    start = time.perf_counter()
    results = list(
        track(
            compile_matrix(list(KERNELS.values()), ARCHITECTURES),
            "compiling",
            total=total,
            console=console,
            transient=True,
        )
    )
    bad = [result for result in results if not result.ok]
    elapsed = time.perf_counter() - start
    console.print(
        f"compiled {len(KERNELS)} variants for {len(ARCHITECTURES)} architectures in {elapsed:.0f} s: "
        f"{len(bad)} failed or spilled, at most {max(result.registers for result in results)} registers"
    )
    for result in bad:
        console.print(result.error or f"{result.variant} for {result.arch}: {result.spill_bytes} bytes spilled")
    return not bad


def pool_real_table() -> bool:
    """alexp0 through the public function and through plain torch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = alexp0()
    indices = table.indices.to(device)
    batch = 512 if device.type == "cuda" else 8
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    # Distinct values: where several neighbours hold the maximum, amax splits the gradient and pooling does not.
    generator = torch.Generator().manual_seed(0)
    rows = torch.stack([torch.randperm(table.nin, generator=generator) for _ in range(batch * CHANNELS)])
    x = ((rows - table.nin / 2) / 32).view(batch, CHANNELS, table.nin).to(device, dtype).requires_grad_()
    report = Table("mode", "direction", "knnpool ms", "torch ms", "ratio", "agrees", box=None)
    fine = True
    for mode in ("max", "avg"):
        grad = torch.randn(batch, CHANNELS, table.nout, generator=generator).to(device, dtype)
        ours, theirs = pool_function(x, indices, mode), torch_baseline(x, indices, mode)
        (ours_grad,) = torch.autograd.grad(ours, x, grad, retain_graph=True)
        (theirs_grad,) = torch.autograd.grad(theirs, x, grad, retain_graph=True)
        tolerance = 2e-2 if dtype is torch.float16 else 1e-5
        forward_agrees = torch.allclose(ours, theirs, atol=tolerance, rtol=1e-3)
        backward_agrees = torch.allclose(ours_grad, theirs_grad, atol=tolerance, rtol=1e-3)
        fine &= forward_agrees and backward_agrees
        timings = (
            ("forward", forward_agrees, lambda mode=mode: pool_function(x, indices, mode),
             lambda mode=mode: torch_baseline(x, indices, mode)),
            ("backward", backward_agrees,
             lambda y=ours, g=grad: torch.autograd.grad(y, x, g, retain_graph=True),
             lambda y=theirs, g=grad: torch.autograd.grad(y, x, g, retain_graph=True)),
        )  # fmt: skip
        for direction, agrees, run_ours, run_theirs in timings:
            a, b = 1e3 * seconds(run_ours, device), 1e3 * seconds(run_theirs, device)
            report.add_row(mode, direction, f"{a:.3f}", f"{b:.3f}", f"{b / a:.1f}x", "yes" if agrees else "NO")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, torch reference"
    console.print(f"\nalexp0 [{batch}, {CHANNELS}, {table.nin}] -> {table.nout}, K {table.k}, {dtype}, on {where}")
    console.print(report)
    return fine


def verify_real_table() -> bool:
    """The generated kernels on alexp0, bit for bit against the reference."""
    backend = choose_backend(emulate=not torch.cuda.is_available(), sanitizer="none")
    report = Table("kernel", "calls", "bit-equal to the reference", box=None)
    fine = True
    for direction in Direction:
        for mode in (Mode.MAX, Mode.AVG):
            key = KernelKey(direction, mode, "float16", Staging.SHARED, 8)
            verdict = verify_kernel(key, KERNELS[key], backend, list(calls(key, [alexp0()])))
            fine &= not verdict.faults
            report.add_row(verdict.name, str(verdict.cases), "; ".join(verdict.faults) or "yes")
    console.print(f"\ngenerated kernels, run on: {backend.name}")
    console.print(report)
    return fine


if __name__ == "__main__":
    steps = [compile_all(), pool_real_table(), verify_real_table()]
    console.print("\nall agree" if all(steps) else "\nSOMETHING DISAGREES")
    raise SystemExit(0 if all(steps) else 1)
