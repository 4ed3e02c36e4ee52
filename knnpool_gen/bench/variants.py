"""Every way to run a case - variant, stacking, threads - measured side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from knnpool_gen.bench.buffers import empty_sets, sets_needed
from knnpool_gen.bench.cases import Case
from knnpool_gen.bench.device import CudaTimer, Machine
from knnpool_gen.bench.measure import REPEATS, Contender, Timer, interleave
from knnpool_gen.bench.peers import Stage, make_stage
from knnpool_gen.bench.record import VariantResult, VariantTime
from knnpool_gen.bench.tables import BenchTable
from knnpool_gen.errors import KNNPoolError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.reduction import DEFAULT_NAN, Reduction, make_reduction
from knnpool_gen.runtime import compile
from knnpool_gen.runtime.choices import problem_of_sizes
from knnpool_gen.runtime.execute import table as plan_table
from knnpool_gen.runtime.launch import device_facts, launch
from knnpool_gen.runtime.plan import aux_dtype, pool_meta_from_indices
from knnpool_gen.runtime.select import BLOCK_SIZES, Configuration, DeviceFacts, Problem, configure, fits, select
from knnpool_gen.vocabulary import Direction, Mode, NanRule

MAX_STACK = 256
TRIAL_REPEATS = 3
PROMISING = 1.5
"""What takes this many times as long as the fastest in a trial is not measured further."""
TENSORS_A_SET = 2


def problem_of_case(case: Case) -> Problem:
    """What the choice of a kernel depends on, with the usual options of each mode."""
    return problem_of_sizes(
        case.direction,
        case.mode,
        case.dtype,
        (case.nin, case.nout, case.k, case.rows),
        omit_nan=DEFAULT_NAN[case.mode] is NanRule.OMIT,
        normalize=case.mode is Mode.WEIGHTED,
    )


def candidates(problem: Problem, device: DeviceFacts, all_threads: bool = False) -> list[Configuration]:
    """Every configuration that can serve ``problem``: all variants that fit, stacked as far as that makes sense.

    With ``all_threads`` also in blocks of half and of twice the usual size.
    """
    found: dict[Configuration, None] = {}
    for key, kernel in KERNELS.items():
        if key[:3] != (problem.direction, problem.mode, problem.dtype):
            continue
        for stack in _stacks(problem, key.rows, bool(kernel.node_bytes)):
            if not fits(problem, device, kernel, stack):
                break
            usual = configure(problem, device, key.rows, kernel, stack)
            found[usual] = None
            others = (usual.threads // 2, usual.threads * 2) if all_threads else ()
            for threads in sorted(set(others) & set(BLOCK_SIZES)):
                found[configure(problem, device, key.rows, kernel, stack, threads)] = None
    return list(found)


def described(configuration: Configuration, microseconds: float = 0.0) -> VariantTime:
    """Variant, stack and threads of ``configuration``, with its time."""
    stack = int(dict(configuration.macros).get("KNNPOOL_STACK", 1))
    return VariantTime(configuration.kernel.name, stack, configuration.threads, microseconds)


def model_choice(case: Case, device: DeviceFacts) -> tuple[str, int, int]:
    """Variant, stack and threads that the model chooses for ``case``, whatever was tuned."""
    chosen = described(select(problem_of_case(case), replace(device, label="")))
    return chosen.variant, chosen.stack, chosen.threads


def time_candidates(contenders: Sequence[Contender], timer: Timer, repeats: int = REPEATS) -> dict[str, float]:
    """Median µs of each: all in a short trial, and those that did well again in a long one."""
    trial = interleave(contenders, timer, TRIAL_REPEATS)
    limit = PROMISING * min((time.median for time in trial.values()), default=0.0)
    promising = [contender for contender in contenders if trial[contender.name].median <= limit]
    final = interleave(promising, timer, repeats)
    return {name: final.get(name, time).median for name, time in trial.items()}


def measure_variants(
    case: Case, table: BenchTable, machine: Machine, all_threads: bool = False, repeats: int = REPEATS
) -> VariantResult | None:
    """Measure every candidate for ``case`` on the current CUDA device; None if there is too little memory."""
    device = torch.cuda.current_device()
    facts = replace(device_facts(device), label="")
    problem = problem_of_case(case)
    chosen = select(problem, facts)
    sets = sets_needed(case.traffic, machine.l2_bytes, machine.memory_bytes // (2 * TENSORS_A_SET))
    if sets == 0:
        return None
    configurations = list(dict.fromkeys([chosen, *candidates(problem, facts, all_threads)]))
    _compile_all(configurations, device)
    stage = make_stage(case, table, pool_meta_from_indices(table.indices, table.nin, "cuda"), sets)
    contenders = list(_contenders(stage, configurations, device))
    by_name = {str(index): configuration for index, configuration in enumerate(configurations)}
    measured = time_candidates(contenders, CudaTimer(), repeats)
    times = tuple(described(by_name[name], microseconds) for name, microseconds in measured.items())
    return VariantResult(case, described(chosen, measured["0"]), times)


def _stacks(problem: Problem, rows: int, staged: bool) -> Iterator[int]:
    """1, 2, 4, ... groups of rows, as long as a tile is not much larger than the input."""
    stack = 1
    yield stack
    while staged and stack < MAX_STACK and stack * rows < problem.rows:
        stack *= 2
        yield stack


def _compile_all(configurations: Sequence[Configuration], device: int) -> None:
    """Fill the cache of cubins, on all cores. A candidate that does not compile says so when it is loaded."""
    major, minor = torch.cuda.get_device_capability(device)

    def compile_one(configuration: Configuration) -> None:
        try:
            compile.cubin(configuration.kernel, f"sm_{major}{minor}", configuration.macros)
        except KNNPoolError:
            return

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_one, configurations))


def _contenders(stage: Stage, configurations: Sequence[Configuration], device: int) -> Iterator[Contender]:
    """Launches of each configuration, named by its number, all on the same buffers."""
    case, where = stage.case, stage.meta.device
    reduction = make_reduction(stage.meta, stage.dtype, case.mode.value, **stage.options)
    forward = case.direction is Direction.FORWARD
    outputs = empty_sets(stage.sets, (*stage.shape, case.nout if forward else case.nin), stage.dtype, where)
    aux = stage.aux
    if forward and case.reads_aux:
        aux = list(empty_sets(stage.sets, (*stage.shape, case.nout), aux_dtype(case.k), where))
    names = ("x", "y") if forward else ("grad_y", "grad_x")
    tensors = [
        {names[0]: stage.inputs[i], names[1]: outputs[i]} | ({} if (slots := aux[i]) is None else {"aux": slots})
        for i in range(stage.sets)
    ]
    for number, configuration in enumerate(configurations):
        values = [_values(stage, reduction, configuration, given) for given in tensors]
        contender = Contender(
            str(number),
            lambda i, configuration=configuration, values=values: launch(configuration, device, values[i]),  # type: ignore[misc]
            stage.sets,
        )
        try:
            contender.launch()
        except Exception:  # a candidate may ask for more than the device has; the model's choice may not
            if number == 0:
                raise
            continue
        yield contender


def _values(
    stage: Stage, reduction: Reduction, configuration: Configuration, tensors: dict[str, Tensor]
) -> dict[str, int]:
    """An address or number for every argument of the kernel."""
    values = {"rows": stage.case.rows, "aux": 0} | {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for name in configuration.kernel.arguments:
        if name not in values:
            values[name] = plan_table(stage.meta, reduction, name).data_ptr()
    return values
