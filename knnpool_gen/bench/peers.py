"""Who is measured beside the kernels: a copy of as many bytes, plain torch, torch.compile, and fovi's kernels.

Each peer turns a case into a contender, or says why it cannot.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from knnpool_gen.bench.baseline import PoolingFunction, torch_baseline
from knnpool_gen.bench.buffers import empty_sets, random_sets
from knnpool_gen.bench.cases import Case
from knnpool_gen.bench.measure import Contender
from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.pooling import backward, forward, pool_forward
from knnpool_gen.reduction import make_reduction
from knnpool_gen.runtime.aux_layout import AuxLayout, block_aux
from knnpool_gen.runtime.execute import aux_layout
from knnpool_gen.runtime.plan import PoolMeta, aux_dtype
from knnpool_gen.vocabulary import Direction, Mode

SLOW_LAUNCHES = 2
"""Launches between two events for peers that take many times as long."""
TORCH_FORWARD, TORCH_BACKWARD = 3, 5
"""How many times the gathered values plain torch holds at once, about."""


class Peer(str, Enum):
    """What is timed, ours first."""

    OURS = "ours"
    COPY = "copy"
    FOVI = "fovi"
    TORCH = "torch"
    COMPILE = "compile"


class UnavailableError(Exception):
    """A peer cannot take part; the message says why."""


@dataclass(frozen=True, eq=False)
class Stage:
    """A case with its tensors on the device, as all peers get them."""

    case: Case
    table: BenchTable
    meta: PoolMeta
    weights: Tensor | None
    inputs: list[Tensor]
    """Sets of x or grad_y."""
    aux: list[Tensor | None]
    """Sets of winning slots, for the backward of max."""
    l2_bytes: int
    limit_bytes: int
    """What plain torch may take of the device's memory."""

    @property
    def sets(self) -> int:
        """Sets of buffers."""
        return len(self.inputs)

    @property
    def shape(self) -> tuple[int, int]:
        """B and C."""
        return self.case.batch, self.case.channels

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.inputs[0].dtype

    @property
    def options(self) -> dict[str, Any]:
        """Keyword options of the public functions."""
        return {} if self.weights is None else {"weights": self.weights, "normalize_weights": True}


def make_stage(
    case: Case, table: BenchTable, meta: PoolMeta, sets: int, l2_bytes: int = 0, limit_bytes: int = 0
) -> Stage:
    """Inputs of ``case`` on the device of ``meta``; winning slots are those of random inputs."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    weights = None
    if case.mode is Mode.WEIGHTED:
        random = torch.rand(case.k, case.nout, generator=torch.Generator().manual_seed(case.k))
        weights = (random if table.weights is None else table.weights).to(meta.device)
    forward = case.direction is Direction.FORWARD
    nodes = case.nin if forward else case.nout
    inputs = random_sets(sets, (case.batch, case.channels, nodes), dtype, meta.device, seed=1)
    aux: list[Tensor | None] = [None] * sets
    if not forward and case.reads_aux:
        x = torch.empty((case.batch, case.channels, case.nin), dtype=dtype, device=meta.device)
        slots = empty_sets(sets, (case.batch, case.channels, case.nout), aux_dtype(case.k), meta.device)
        for target in slots:
            won = pool_forward(meta, x.normal_(), case.mode.value)[1]
            assert won is not None
            target.copy_(won)
        aux = list(slots)
    return Stage(case, table, meta, weights, inputs, aux, l2_bytes, limit_bytes)


def contender(peer: Peer, stage: Stage) -> Contender:
    """``peer`` ready to run the case of ``stage``, and warm.

    Raises:
        UnavailableError: it is not installed, would need too much memory, or fails.
    """
    try:
        made = _MAKERS[peer](stage)
        for _ in range(made.sets + 1):  # as often as it takes the allocator to find memory for all outputs
            made.launch()
        if stage.meta.device.type == "cuda":
            torch.cuda.synchronize()
    except UnavailableError:
        raise
    except Exception as error:  # whatever another's code may raise
        raise UnavailableError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    return made


def _ours(stage: Stage) -> Contender:
    """The kernels as autograd runs them, with aux as it keeps it."""
    meta, inputs = stage.meta, stage.inputs
    reduction = make_reduction(meta, stage.dtype, stage.case.mode.value, **stage.options)
    layout = aux_layout(meta, inputs[0], reduction)
    kept = _Kept(stage.sets)
    if stage.case.direction is Direction.FORWARD:

        def run(i: int) -> None:
            kept.keep(i, forward(meta, inputs[i], reduction, need_aux=True, layout=layout))

    else:
        blocks = layout is AuxLayout.BLOCKS
        slots = [block_aux(aux) if blocks and aux is not None else aux for aux in stage.aux]

        def run(i: int) -> None:
            kept.keep(i, backward(meta, inputs[i], slots[i], reduction, None, layout=layout))

    return Contender(Peer.OURS.value, run, stage.sets)


def _copy(stage: Stage) -> Contender:
    half = -(-stage.case.traffic // 2)
    sources, targets = (empty_sets(stage.sets, (half,), torch.uint8, stage.meta.device) for _ in range(2))
    for source in sources:
        source.random_()
    return Contender(Peer.COPY.value, lambda i: targets[i].copy_(sources[i]), stage.sets)


def _fovi(stage: Stage) -> Contender:
    fovi = fovi_kernels()
    case, mode = stage.case, stage.case.mode.value
    if stage.weights is not None:
        raise UnavailableError("its functions take no weights")
    meta = fovi.pool_meta_from_indices(stage.table.indices.to(stage.meta.device), case.nin)
    kept = _Kept(stage.sets)
    if case.direction is Direction.FORWARD:

        def run(i: int) -> None:
            kept.keep(i, fovi.pool_forward(meta, stage.inputs[i], mode))

    else:
        x = random_sets(1, (*stage.shape, case.nin), stage.dtype, stage.meta.device, seed=2)[0]
        own = [fovi.pool_forward(meta, x.normal_(), mode)[1] for _ in range(stage.sets)]

        def run(i: int) -> None:
            kept.keep(i, fovi.pool_backward(meta, stage.inputs[i], own[i], mode))

    return Contender(Peer.FOVI.value, run, stage.sets)


def fovi_kernels() -> ModuleType:
    """fovi's module of CUDA kernels.

    Raises:
        UnavailableError: fovi is missing, or cannot be imported.
    """
    if importlib.util.find_spec("fovi") is None:
        raise UnavailableError("fovi is not installed")
    # Of the way it takes torch's stream.
    warnings.filterwarnings("ignore", "ExternalStream", DeprecationWarning)
    try:
        return importlib.import_module("fovi.arch.knn_pool_cuda")
    except ImportError as error:
        raise UnavailableError(f"fovi cannot be imported: {error}") from error


def _torch(stage: Stage) -> Contender:
    pool = torch_baseline(_on_device(stage), stage.case.mode, stage.weights, stage.dtype)
    return _differentiable(Peer.TORCH, stage, pool)


def _compile(stage: Stage) -> Contender:
    pool = torch_baseline(_on_device(stage), stage.case.mode, stage.weights, stage.dtype)
    return _differentiable(Peer.COMPILE, stage, compiled(pool))


def compiled(pool: PoolingFunction) -> PoolingFunction:
    """``torch.compile`` of ``pool``, fit to have its backward run again and again."""
    functorch: Any = importlib.import_module("torch._functorch.config")  # an attribute of torch only once imported
    dynamo: Any = importlib.import_module("torch._dynamo")
    functorch.donated_buffer = False  # the backward is run with retain_graph
    if hasattr(dynamo.config, "recompile_limit"):  # it has had another name before torch 2.6
        dynamo.config.recompile_limit = 100
    dynamo.reset()
    result: PoolingFunction = torch.compile(pool, dynamic=False)
    return result


def _differentiable(peer: Peer, stage: Stage, pool: PoolingFunction) -> Contender:
    """``pool`` forward without gradients, or autograd's backward of it."""
    case = stage.case
    forward = case.direction is Direction.FORWARD
    sets = min(stage.sets, 2) if case.gathered > stage.l2_bytes else stage.sets
    needed = case.gathered * (TORCH_FORWARD if forward else TORCH_BACKWARD + sets)
    if needed > stage.limit_bytes:
        raise UnavailableError(f"needs about {needed / 2**30:.0f} GiB, more than the {stage.limit_bytes >> 30} allowed")
    kept = _Kept(sets)
    run: Callable[[int], None]
    if forward:

        def run(i: int) -> None:
            with torch.no_grad():
                kept.keep(i, pool(stage.inputs[i]))

    else:
        shape = (*stage.shape, case.nin)
        leaves = [x.requires_grad_() for x in random_sets(sets, shape, stage.dtype, stage.meta.device, seed=2)]
        outputs = [pool(leaf) for leaf in leaves]

        def run(i: int) -> None:
            kept.keep(i, torch.autograd.grad(outputs[i], leaves[i], stage.inputs[i], retain_graph=True))

    return Contender(peer.value, run, sets, min_launches=SLOW_LAUNCHES)


def _on_device(stage: Stage) -> BenchTable:
    table = stage.table
    return BenchTable(table.name, table.indices.to(stage.meta.device), table.nin, table.mode)


class _Kept:
    """The latest outputs: as long as they are held, the allocator gives other memory to the next ones."""

    def __init__(self, count: int) -> None:
        self._outputs: list[object] = [None] * count

    def keep(self, i: int, output: object) -> None:
        self._outputs[i] = output


_MAKERS: dict[Peer, Callable[[Stage], Contender]] = {
    Peer.OURS: _ours,
    Peer.COPY: _copy,
    Peer.FOVI: _fovi,
    Peer.TORCH: _torch,
    Peer.COMPILE: _compile,
}
