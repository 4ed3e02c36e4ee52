"""Every way to run a case: which there are, how they are measured, and what is kept of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from knnpool_gen import folders
from knnpool_gen.bench import variants
from knnpool_gen.bench.cases import Case, Selection, variant_cases
from knnpool_gen.bench.measure import Contender
from knnpool_gen.bench.peers import make_stage
from knnpool_gen.bench.record import VariantResult, VariantTime
from knnpool_gen.bench.tables import load_tables, made_table
from knnpool_gen.bench.tune import best_choice
from knnpool_gen.bench.variants import candidates, described, model_choice, problem_of_case, time_candidates
from knnpool_gen.errors import CompileError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel
from knnpool_gen.reduction import make_reduction
from knnpool_gen.runtime import execute
from knnpool_gen.runtime.plan import PoolMeta, pool_meta_from_indices
from knnpool_gen.runtime.select import H200, Configuration, Problem, select
from knnpool_gen.runtime.tuned import TunedChoice, write_tuned
from knnpool_gen.vocabulary import Direction, Mode, Staging
from measurements import MACHINE, FakeTimer, case

KEYS = {kernel.name: key for key, kernel in KERNELS.items()}
SMALL = replace(H200, shared_per_block=48 * 1024, shared_per_multiprocessor=64 * 1024)


@pytest.mark.parametrize("device", [H200, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"batch": 1, "channels": 1},
        {"nin": 1, "nout": 1, "k": 1},
        {"nin": 54326, "nout": 5977},
        {"nin": 166716, "nout": 18413},
        {"nin": 230, "nout": 1, "k": 230, "mode": Mode.AVG},
    ],
    ids=str,
)
def test_candidates_can_be_launched(device: Any, direction: Direction, facts: dict[str, Any]) -> None:
    problem = problem_of_case(case(direction=direction, **facts))
    found = candidates(problem, device, all_threads=True)
    assert len(set(found)) == len(found)
    for configuration in found:
        key = KEYS[configuration.kernel.name]
        assert key[:3] == (direction, problem.mode, "float16")
        assert configuration.shared_bytes <= device.shared_per_block
        assert 64 <= configuration.threads <= 1024
        assert dict(configuration.macros)["KNNPOOL_THREADS"] == configuration.threads
    heights = {(KEYS[item.kernel.name].staging, KEYS[item.kernel.name].rows) for item in found}
    assert {(Staging.DIRECT, 1), (Staging.DIRECT, 4)} <= heights
    usual = candidates(problem, device)
    assert set(usual) < set(found) or len(usual) == len(found)


def test_candidates_of_alexp0() -> None:
    """4 heights of staged tiles and 2 of direct ones; tiles of 965 nodes stacked up to 227 KiB."""
    found = [described(item) for item in candidates(problem_of_case(case()), H200)]
    stacks = {
        rows: sorted(item.stack for item in found if item.variant == f"knnpool_forward_max_float16_shared_r{rows}")
        for rows in (1, 2, 4, 8)
    }
    assert stacks == {
        1: [1, 2, 4, 8, 16, 32, 64],
        2: [1, 2, 4, 8, 16, 32],
        4: [1, 2, 4, 8, 16],
        8: [1, 2, 4, 8],
    }
    assert len(found) == 7 + 6 + 5 + 4 + 2


def test_the_models_choice_is_no_tuned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KNNPOOL_TUNED", str(tmp_path / "tuned.json"))
    device = replace(H200, label="Made Up sm_90")
    expected = described(select(problem_of_case(case()), H200))
    best = VariantTime("knnpool_forward_max_float16_shared_r1", 1, 64, 1.0)
    write_tuned(tmp_path / "tuned.json", device.label, [best_choice(VariantResult(case(), expected, (best,)))])
    assert model_choice(case(), device) == (expected.variant, expected.stack, expected.threads)
    assert model_choice(case(), device)[0] != best.variant


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_the_problem_is_the_one_that_a_call_poses(
    mode: Mode, direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the runtime would be asked for by the peer ``ours``, against what candidates are looked for by."""
    table = made_table("made", 40, 12, 300)
    of = Case("made", 40, 12, 300, 3, 2, "float32", mode, direction)
    meta = pool_meta_from_indices(table.indices, table.nin)
    stage = make_stage(of, table, meta, 1)
    reduction = make_reduction(meta, stage.dtype, mode.value, **stage.options)
    asked: list[Problem] = []
    monkeypatch.setattr(execute, "select", lambda problem, *_: asked.append(problem) or select(problem, H200))
    monkeypatch.setattr(execute, "device_facts", lambda index: H200)
    monkeypatch.setattr(execute.canary, "due", lambda what: False)
    monkeypatch.setattr(execute.torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(execute.torch.cuda, "current_device", lambda: -1)  # that of a tensor on the CPU
    monkeypatch.setattr(execute, "load", lambda *_: 1)
    monkeypatch.setattr(execute, "start", lambda *_: None)
    monkeypatch.setattr(execute, "compile_ahead", lambda *_: None)
    monkeypatch.setattr(execute, "can_overlap", lambda device: False)
    monkeypatch.setattr(execute, "fitted", lambda configuration, *_: configuration)
    if direction is Direction.FORWARD:
        execute.forward(meta, stage.inputs[0], reduction, True, None)
    else:
        execute.backward(meta, stage.inputs[0], stage.aux[0], reduction, None)
    assert asked[0] == problem_of_case(of)  # a forward asks for the backward as well


def test_what_does_well_in_a_trial_is_measured_longer() -> None:
    times = {"fast": 10.0, "near": 15.0, "slow": 15.1}
    timer = FakeTimer(times.__getitem__)
    contenders = [Contender(name, lambda i: None, 1) for name in times]
    assert time_candidates(contenders, timer, repeats=7) == times
    asked = [name for name, _ in timer.windows]
    assert {name: asked.count(name) for name in times} == {"fast": 1 + 3 + 1 + 7, "near": 12, "slow": 4}
    assert time_candidates([], timer) == {}


A, B = VariantTime("a", 1, 256, 44.0), VariantTime("b", 2, 128, 40.0)


@pytest.mark.parametrize(("times", "best"), [((A, B), B), ((A,), A), ((), A)])
def test_the_fastest_is_kept(times: tuple[VariantTime, ...], best: VariantTime) -> None:
    assert best_choice(VariantResult(case(), A, times)) == TunedChoice(
        "forward", "max", "float16", 9, 964, 230, 49152, best.variant, best.stack, best.threads, best.microseconds, 44.0
    )


def test_arguments_of_a_candidate() -> None:
    """Every parameter of every kernel gets an address, and rows their number."""
    table = made_table("made", 40, 12, 5)
    meta = pool_meta_from_indices(table.indices, table.nin)
    for key in KERNELS:
        of = Case("made", 40, 12, 5, 3, 2, key.dtype, key.mode, key.direction)
        stage = make_stage(of, table, meta, 1)
        reduction = make_reduction(meta, stage.dtype, key.mode.value, **stage.options)
        (configuration, *_) = candidates(problem_of_case(of), H200)
        tensor = torch.empty(0)
        names = ("x", "y") if key.direction is Direction.FORWARD else ("grad_y", "grad_x")
        values = variants._values(stage, reduction, configuration, dict.fromkeys(names, tensor))
        assert set(configuration.kernel.arguments) <= set(values)
        assert values["rows"] == 6


@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_a_case_is_measured_with_every_candidate(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up device, on which candidates of 512 threads fail and those with taller tiles are faster."""
    launched: list[tuple[str, int]] = []

    def launch(configuration: Configuration, device: int, values: dict[str, int]) -> None:
        if configuration.threads == 512:
            raise RuntimeError("too many resources requested for launch")
        launched.append((configuration.kernel.name, values["y" if direction is Direction.FORWARD else "grad_x"]))

    def rows_of(name: str) -> float:
        return 100.0 / KEYS[configurations[int(name)].kernel.name].rows

    def on_the_cpu(indices: torch.Tensor, nin: int, device: str) -> PoolMeta:
        return pool_meta_from_indices(indices, nin)

    table = made_table("made", 40, 300, 5)
    of = Case("made", 40, 300, 5, 64, 64, "float16", Mode.MAX, direction)
    chosen = select(problem_of_case(of), H200)
    configurations = list(dict.fromkeys([chosen, *candidates(problem_of_case(of), H200, all_threads=True)]))
    monkeypatch.setattr(variants, "launch", launch)
    monkeypatch.setattr(variants, "CudaTimer", lambda: FakeTimer(rows_of))
    monkeypatch.setattr(variants, "device_facts", lambda index: replace(H200, label=MACHINE.device))
    monkeypatch.setattr(variants, "_compile_all", lambda *_: None)
    monkeypatch.setattr(
        variants, "pool_meta_from_indices", lambda indices, nin, _: pool_meta_from_indices(indices, nin)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    found = variants.measure_variants(of, table, MACHINE, all_threads=True, repeats=2)

    assert found is not None
    assert found.chosen == described(chosen, rows_of("0"))
    assert {(time.variant, time.stack, time.threads) for time in found.times} == {
        (item.variant, item.stack, item.threads) for item in map(described, configurations) if item.threads != 512
    }
    assert all(time.microseconds == 100.0 / KEYS[time.variant].rows for time in found.times)
    assert KEYS[best_choice(found).variant].rows == 8
    outputs = {address for name, address in launched if name == chosen.kernel.name}
    assert len(outputs) > 1
    assert variants.measure_variants(of, table, replace(MACHINE, memory_bytes=1 << 10)) is None


def test_what_fails_to_compile_is_found_out_by_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def cubin(kernel: Kernel, arch: str, macros: object) -> bytes:
        tried.append(f"{kernel.name} {arch}")
        raise CompileError("no")

    monkeypatch.setattr(variants.compile, "cubin", cubin)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    configurations = candidates(problem_of_case(case()), H200)[:3]
    variants._compile_all(configurations, 0)
    assert sorted(tried) == sorted(f"{item.kernel.name} sm_90" for item in configurations)


def test_a_recording_of_all_variants_holds_every_choice_of_the_model() -> None:
    path = folders.real_tables()
    assert path is not None
    for of in variant_cases(load_tables(path), Selection()):
        configurations = candidates(problem_of_case(of), H200)
        measured = {(item.variant, item.stack, item.threads) for item in map(described, configurations)}
        assert model_choice(of, H200) in measured, of.name
