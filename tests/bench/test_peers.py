"""Those who are measured, on the CPU: that they compute what they should, and who is left out."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

import knnpool_gen
from knnpool_gen import pool_backward, pool_forward, pool_meta_from_indices
from knnpool_gen.bench import peers
from knnpool_gen.bench.baseline import torch_baseline
from knnpool_gen.bench.cases import Case
from knnpool_gen.bench.host import HostCall, host_calls
from knnpool_gen.bench.peers import Peer, Stage, UnavailableError, contender, fovi_kernels, make_stage
from knnpool_gen.bench.run import CaseMeasure, Options, run_cases
from knnpool_gen.bench.tables import BenchTable, made_table
from knnpool_gen.errors import KernelError
from knnpool_gen.runtime.select import H200
from knnpool_gen.vocabulary import Direction, Mode
from measurements import MACHINE, FakeClock, FakeTimer

CPU = torch.device("cpu")
TABLE = made_table("made", 40, 12, 5)
FULL = BenchTable("full", TABLE.indices.clamp(max=39), 40, Mode.MAX)


def case_of(table: BenchTable, mode: Mode, direction: Direction, dtype: str = "float32") -> Case:
    return Case(table.name, table.nin, table.nout, table.k, 3, 2, dtype, mode, direction)


def stage_of(
    mode: Mode = Mode.MAX, direction: Direction = Direction.FORWARD, dtype: str = "float32", limit: int = 1 << 30
) -> Stage:
    meta = pool_meta_from_indices(TABLE.indices, TABLE.nin)
    return make_stage(case_of(TABLE, mode, direction, dtype), TABLE, meta, 4, l2_bytes=1 << 30, limit_bytes=limit)


@pytest.mark.parametrize("table", [TABLE, FULL], ids=lambda table: table.name)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_the_baseline_computes_the_same(table: BenchTable, mode: Mode) -> None:
    assert bool((TABLE.indices < 40).any(0).all())  # rules for empty columns are no part of it
    meta = pool_meta_from_indices(table.indices, table.nin)
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(table.k, table.nout, generator=generator) if mode is Mode.WEIGHTED else None
    options: dict[str, Any] = {} if weights is None else {"weights": weights, "normalize_weights": True}
    x = torch.randn(3, 2, 40, generator=generator).requires_grad_()
    grad = torch.randn(3, 2, 12, generator=generator)

    y = torch_baseline(table, mode, weights, torch.float32)(x)
    (grad_x,) = torch.autograd.grad(y, x, grad)

    expected, aux = pool_forward(meta, x, mode.value, **options)
    torch.testing.assert_close(y, expected)
    if mode is Mode.MAX:  # where a node is read twice by a column, amax sends it the gradient twice by halves
        torch.testing.assert_close(grad_x, pool_backward(meta, grad, aux, "max"))
    else:
        torch.testing.assert_close(grad_x, pool_backward(meta, grad, None, mode.value, **options))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_buffers_are_as_large_as_the_traffic_says(mode: Mode, direction: Direction, dtype: str) -> None:
    """What the tensors of a call take is what a copy of as many bytes is made for."""
    stage = stage_of(mode, direction, dtype)
    if direction is Direction.FORWARD:
        outputs = pool_forward(stage.meta, stage.inputs[0], mode.value, **stage.options)
    else:
        outputs = (pool_backward(stage.meta, stage.inputs[0], stage.aux[0], mode.value, **stage.options), None)
    tensors = [stage.inputs[0], stage.aux[0], *outputs]
    assert stage.case.traffic == sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("peer", [Peer.OURS, Peer.COPY, Peer.TORCH], ids=lambda peer: peer.value)
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_everyone_runs_with_every_set(peer: Peer, direction: Direction, mode: Mode) -> None:
    made = contender(peer, stage_of(mode, direction))
    assert (made.name, made.sets) == (peer.value, 4)
    for _ in range(made.sets):
        made.launch()


def test_the_sets_hold_different_inputs_and_winners() -> None:
    stage = stage_of(direction=Direction.BACKWARD)
    first, second = stage.aux[:2]
    assert first is not None
    assert second is not None
    assert not torch.equal(first, second)
    assert not torch.equal(stage.inputs[0], stage.inputs[1])


def test_torch_compile_is_set_up_for_repeated_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def compile(pool: Any, **options: object) -> Any:
        seen.update(options)
        return pool

    monkeypatch.setattr(torch, "compile", compile)
    contender(Peer.COMPILE, stage_of(direction=Direction.BACKWARD))
    assert seen == {"dynamic": False}
    assert importlib.import_module("torch._functorch.config").donated_buffer is False


def test_plain_torch_is_left_out_where_it_would_take_too_much_memory() -> None:
    """[3, 2, 5, 12] float32 are 1440 bytes; about three times that forward, and the graphs besides backward."""
    contender(Peer.TORCH, stage_of(limit=3 * 1440))
    for direction, limit in ((Direction.FORWARD, 3 * 1440 - 1), (Direction.BACKWARD, 9 * 1440 - 1)):
        with pytest.raises(UnavailableError, match="GiB, more than the 0 allowed"):
            contender(Peer.TORCH, stage_of(direction=direction, limit=limit))
    contender(Peer.TORCH, stage_of(direction=Direction.BACKWARD, limit=9 * 1440))


def test_who_fails_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KernelError("no such luck\nin many lines")

    monkeypatch.setattr(peers, "forward", fail)
    with pytest.raises(UnavailableError, match=r"^KernelError: no such luck$"):
        contender(Peer.OURS, stage_of())


# fovi: another's package, of which only the names of its functions are known here.


@pytest.fixture
def fovi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name whose functions are ours."""
    module: Any = ModuleType("fovi.arch.knn_pool_cuda")
    module.pool_meta_from_indices = pool_meta_from_indices
    module.pool_forward = pool_forward
    module.pool_backward = pool_backward
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name == "fovi")
    for name in ("fovi", "fovi.arch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module  # type: ignore[no-any-return]


@pytest.mark.usefixtures("fovi")
@pytest.mark.parametrize("direction", Direction, ids=lambda direction: direction.value)
def test_fovi(direction: Direction) -> None:
    contender(Peer.FOVI, stage_of(Mode.AVG, direction)).launch()
    contender(Peer.FOVI, stage_of(Mode.MAX, direction)).launch()
    with pytest.raises(UnavailableError, match=r"^its functions take no weights$"):
        contender(Peer.FOVI, stage_of(Mode.WEIGHTED, direction))


def test_fovi_that_refuses(fovi: Any) -> None:
    fovi.pool_forward = lambda *_: 1 / 0
    with pytest.raises(UnavailableError, match=r"^ZeroDivisionError: division by zero$"):
        contender(Peer.FOVI, stage_of())


def test_fovi_that_is_missing_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"^fovi is not installed$"):
        fovi_kernels()
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    for name in ("fovi", *(name for name in sys.modules if name.startswith("fovi."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnavailableError, match=r"^fovi cannot be imported: "):
        fovi_kernels()


def called(calls: list[HostCall]) -> dict[str, list[str]]:
    for call in calls:
        call.run()
    return {peer: [call.call for call in calls if call.peer == peer] for peer in dict.fromkeys(c.peer for c in calls)}


ALL_CALLS = ["forward, plan in hand", "forward", "forward with gradients", "forward and backward"]


def test_calls_of_the_host(fovi: Any) -> None:
    fovi.pool_function = knnpool_gen.pool_function
    fovi.KNNPoolFunction = knnpool_gen.KNNPoolFunction
    assert called(host_calls(TABLE, pytest.fail, "cpu")) == {
        "ours": ALL_CALLS,
        "fovi": ALL_CALLS,
        "max_pool2d": ALL_CALLS[1:],
        "torch.add": ["forward"],
    }
    del fovi.pool_function
    assert called(host_calls(TABLE, pytest.fail, "cpu"))["fovi"] == [ALL_CALLS[0], *ALL_CALLS[2:]]


def test_calls_of_the_host_without_fovi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    assert list(called(host_calls(TABLE, said.append, "cpu"))) == ["ours", "max_pool2d", "torch.add"]
    assert said == ["fovi left out: fovi is not installed"]


# Cases as a whole.


def measure_of(cases: list[Case], timer: FakeTimer, options: Options, memory_bytes: int = 1 << 30) -> CaseMeasure:
    machine = replace(MACHINE, memory_bytes=memory_bytes)
    return CaseMeasure([TABLE], cases, options, machine, H200, timer, CPU)


def test_a_case_is_measured_beside_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    case = case_of(TABLE, Mode.MAX, Direction.FORWARD)
    timer = FakeTimer({"ours": 10.0, "copy": 9.0, "torch": 600.0}.__getitem__)
    asked = (Peer.OURS, Peer.COPY, Peer.TORCH, Peer.FOVI)

    result = measure_of([case], timer, Options(peers=asked, repeats=3))(case)

    medians = {peer: None if time is None else time.median for peer, time in result.times.items()}
    assert medians == {"ours": 10.0, "copy": 9.0, "torch": 600.0, "fovi": None}
    assert result.reasons == {"fovi": "fovi is not installed"}
    assert result.variant == "knnpool_forward_max_float32_shared_r1"
    # 6 rows of 40 + 12 float32 and 12 slots are 1320 bytes: 100 of them are twice 64 KiB.
    assert (result.sets, result.exceeds_l2) == (100, True)
    assert [launches for name, launches in timer.windows if name == "torch"] == [3, 5, 5, 5]


def test_torch_compile_takes_part_in_few_cases_unless_it_is_asked_for() -> None:
    cases = [case_of(TABLE, Mode.MAX, Direction.FORWARD, dtype) for dtype in ("float16", "float32")]
    usual = measure_of(cases, FakeTimer(), Options())
    assert [Peer.COMPILE in usual._peers(case) for case in cases] == [True, False]
    asked = measure_of(cases, FakeTimer(), Options(peers=(Peer.COMPILE,)))
    assert [asked._peers(case) for case in cases] == [[Peer.COMPILE]] * 2


def test_a_case_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(TABLE, Mode.MAX, Direction.FORWARD)
    asked = Options(peers=(Peer.OURS, Peer.COPY))
    expected = {"ours": None, "copy": None}, dict.fromkeys(("ours", "copy"), "too little memory")
    # Two sets of 1320 bytes, in an eighth of the memory.
    result = measure_of([case], FakeTimer(), asked, memory_bytes=8 * 2 * 1320 - 1)(case)
    assert (result.times, result.reasons) == expected

    def fail(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("knnpool_gen.bench.run.make_stage", fail)
    result = measure_of([case], FakeTimer(), asked)(case)
    assert (result.times, result.reasons) == expected


def test_cases_end_with_the_time() -> None:
    cases = [case_of(TABLE, mode, Direction.FORWARD) for mode in Mode]
    done: list[Case] = []
    found = list(run_cases(cases, lambda case: done.append(case), 2.5, FakeClock()))  # type: ignore[func-returns-value]
    assert [case for case, _ in found] == cases
    assert done == cases[:2]
    done.clear()
    list(run_cases(cases, lambda case: done.append(case), None, FakeClock()))  # type: ignore[func-returns-value]
    assert done == cases
