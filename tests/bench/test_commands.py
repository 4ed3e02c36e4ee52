"""``bench`` and ``tune`` from the command line, with a made-up device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commands import Ended, Run
from knnpool_gen.bench import device, session
from knnpool_gen.bench.cases import Case, Selection
from knnpool_gen.bench.host import HostCall
from knnpool_gen.bench.peers import Peer
from knnpool_gen.bench.record import CaseResult, TwoGpus, VariantResult, VariantTime, read_recording, write_recording
from knnpool_gen.bench.run import Options
from knnpool_gen.bench.session import Parts, Tables, find_tables, measure
from knnpool_gen.bench.tables import made_table
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.runtime.select import H200, forget_choices, select
from knnpool_gen.runtime.tuned import read_tuned
from measurements import MACHINE, FakeClock, recording, result

NO_DEVICE = (
    "knnpool-gen: there is no CUDA device to measure on; "
    "`knnpool-gen bench --report FILE` shows another machine's times"
    "\n"
)
NO_TABLES = "the tables of real networks are part of the repository, not of an installed package; give --tables FILE"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Everything of the session that touches a device is made up; the cases that were measured."""
    cases: list[Case] = []

    class Measure:
        def __init__(self, *_: object) -> None: ...

        def __call__(self, case: Case) -> CaseResult:
            cases.append(case)
            return result(case, ours=10.0, copy=9.0)

    monkeypatch.setattr(device, "require_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(session, "machine", lambda: MACHINE)
    monkeypatch.setattr(session, "versions", lambda: {"torch": "2.11"})
    monkeypatch.setattr(session, "device_facts", lambda index: H200)
    monkeypatch.setattr(session, "CudaTimer", lambda: None)
    monkeypatch.setattr(session, "CaseMeasure", Measure)
    monkeypatch.setattr(session, "host_calls", lambda table, say: [HostCall(table.name, "ours", lambda: None)])
    monkeypatch.setattr(session, "measure_first_use", lambda: recording().first_use)
    monkeypatch.setattr(session, "measure_two_gpus", lambda: TwoGpus(one=3.0, two=4.0))
    monkeypatch.setattr(session, "measure_variants", lambda case, *_, **__: variant_result(case))
    return cases


def variant_result(case: Case) -> VariantResult:
    chosen = VariantTime("knnpool_forward_max_float16_shared_r8", 1, 256, 20.0)
    return VariantResult(case, chosen, (chosen, VariantTime(f"knnpool_{case.direction.value}_x", 2, 128, 16.0)))


# bench


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    "options", [(), ("--host",), ("--first-use",), ("--two-gpus",), ("--variants", "--quick")], ids=str
)
def test_bench_without_a_gpu(run: Run, options: tuple[str, ...]) -> None:
    assert run("bench", *options) == Ended(2, "", NO_DEVICE)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--mode", "median"), "no mode median; there are max, avg, sum, weighted"),
        (("--direction", "up"), "no direction up; there are forward, backward"),
        (("--peer", "you"), "no peer you; there are ours, copy, fovi, torch, compile"),
        (("--dtype", "int8"), "no dtype int8; there are float16, bfloat16, float32, float64"),
        (("--batch", "0"), "batch 0: at least 1 is measured"),
        (("--tables", "none.npz"), "none.npz cannot be read as .npz: "),
        (("--report", "none.json"), "none.json cannot be read: "),
    ],
    ids=str,
)
def test_bench_of_what_is_not_there(run: Run, options: tuple[str, ...], message: str) -> None:
    ended = run("bench", *options)
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"knnpool-gen: {message}")
    assert len(ended.stderr.splitlines()) == 1


def test_bench_of_one_table(run: Run, measured: list[Case], tmp_path: Path) -> None:
    kept, pictures = tmp_path / "r.json", tmp_path / "plots"
    ended = run(
        "bench", "--table", "alexnet64_pool0", "--batch", "8", "--dtype", "float32", "--mode", "avg",
        "--json", kept, "--plots", pictures,
    )  # fmt: skip
    assert ended.code == 0
    names = [f"alexnet64_pool0 8x96 float32 avg {direction}" for direction in ("forward", "backward")]
    assert [case.name for case in measured] == names
    assert [item.case.name for item in read_recording(kept).cases] == names
    assert "forward: 0.90 of the copy (geometric mean of 1 cases, 0.90 at worst)\n" in ended.stdout
    assert ended.stdout.endswith("Made Up sm_90, " + read_recording(kept).date + ": torch 2.11\n")
    assert f"1/2 {names[0]}\n" in ended.stderr
    assert f"wrote {pictures}/copy_fraction.png\n" in ended.stderr
    assert (pictures / "copy_fraction.png").stat().st_size > 1000


def test_bench_of_two_gpus(run: Run, measured: list[Case], tmp_path: Path) -> None:
    kept = tmp_path / "r.json"
    ended = run("bench", "--two-gpus", "--json", kept)
    line = (
        "training on two GPUs: 1.50 times the throughput of one (4.00 ms a step with twice the batch, 3.00 ms on one)"
    )
    assert ended.code == 0
    assert ended.stdout.startswith(line + "\n")
    assert run("bench", "--report", kept).stdout == ended.stdout
    assert measured == []
    # A recording from before there was this part.
    content = json.loads(kept.read_text())
    del content["two_gpus"]
    kept.write_text(json.dumps(content))
    assert read_recording(kept).two_gpus is None


@pytest.mark.usefixtures("measured")
def test_bench_of_the_other_parts(run: Run, measured: list[Case], tmp_path: Path) -> None:
    kept = tmp_path / "r.json"
    ended = run("bench", "--host", "--first-use", "--variants", "--quick", "--table", "alexnet64_pool4", "--json", kept)
    assert ended.code == 0
    found = read_recording(kept)
    assert measured == []
    assert [item.call for item in found.host] == ["made"]
    assert found.first_use == recording().first_use
    assert [item.case.name for item in found.variants] == [
        f"alexnet64_pool4 512x256 float16 max {direction}" for direction in ("forward", "backward")
    ]
    assert "the chosen variant is within 5% of the best in 0 of 2 cases\n" in ended.stdout


def test_a_recording_is_shown_anywhere(run: Run, tmp_path: Path, no_gpu: None) -> None:
    write_recording(recording(), tmp_path / "r.json")
    ended = run("bench", "--report", tmp_path / "r.json", "--plots", tmp_path / "plots")
    assert ended.code == 1  # a kernel failed in it
    assert "alexp0 forward: 40.0 µs, 0.90 of the copy, 3.0x fovi, 20.0x torch, 6.0x compile\n" in ended.stdout
    assert "Made Up sm_90, 2026-03-04T05:06:07+00:00: knnpool-gen 1.2.3, torch 2.11\n" in ended.stdout
    assert len(list((tmp_path / "plots").iterdir())) == 7
    healthy = replace(recording(), cases=recording().cases[:2])
    write_recording(healthy, tmp_path / "r.json")
    assert run("bench", "--report", tmp_path / "r.json").code == 0


# session


def test_what_came_in_is_kept_when_the_time_is_over(measured: list[Case]) -> None:
    said: list[str] = []
    tables = Tables([made_table("a", 30, 7, 3), made_table("b", 30, 7, 3)], [], [], [])
    selection = Selection(batches=(2,), dtypes=("float32",))
    # The clock strikes for the start, for what is left, for the start of the cases, and before each of them.
    options = Options(peers=(Peer.OURS,), seconds=5.5)
    found = list(measure(Parts(variants=True), tables, selection, options, said.append, FakeClock()))
    counts = [(len(item.cases), len(item.variants), len(item.left_out)) for item in found]
    assert counts[0] == (1, 0, 0)
    assert counts[-1][0] + counts[-1][1] + counts[-1][2] == 4 + 4
    assert [case.name for case in measured] == [item.case.name for item in found[-1].cases]
    assert found[-1].left_out[-1] == "variants of b 2x64 float32 max backward"
    assert said[0] == "1/4 a 2x64 float32 max forward"


def test_who_is_missing_is_said_once(measured: list[Case], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("knnpool_gen.bench.peers.importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    tables = Tables([made_table("a", 30, 7, 3)], [], [], [])
    list(measure(Parts(), tables, Selection(quick=True), Options(), said.append))
    assert [line for line in said if "fovi" in line] == ["fovi left out: fovi is not installed"]


def test_tables_of_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.folders, "real_tables", lambda: None)
    said: list[str] = []
    found = find_tables(None, said.append)
    assert (found.real, said) == ([], [NO_TABLES])
    assert [table.name for table in found.named(["long166716", "k8"]).all] == ["long166716", "k8"]
    with pytest.raises(InvalidArgumentError, match="no table alexnet64_pool0; there are global1000, "):
        found.named(["alexnet64_pool0"])


def test_what_is_known_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="Made Up", major=9, minor=0, multi_processor_count=132, L2_cache_size=60 << 20, total_memory=1 << 37
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    found = device.machine()
    assert (found.device, found.multiprocessors, found.l2_bytes) == ("Made Up sm_90", 132, 60 << 20)
    assert device.versions()["torch"] == torch.__version__


class Queue:
    """torch's events, on a device that sleeps for a millisecond at 2 GHz and a host that takes its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_cycles: int) -> None:
        self.now = self.slept = 0
        self.sleeps: list[int] = []
        self.host_cycles = host_cycles
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep, raising=False)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: self)

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.slept = self.now + cycles

    def launch(self, i: int) -> None:
        self.now += self.host_cycles

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return self.now >= self.slept

    def elapsed_time(self, other: object) -> float:
        return 0.5


@pytest.mark.parametrize(
    ("host_cycles", "sleeps", "queued"),
    [
        (10_000, [2], True),
        (150_000, [2, 4], True),
        (1_000_000, [2, 4, 8, 16, 32], True),
        (10**7, [2, 4, 8, 16, 32], False),
    ],
)
def test_launches_wait_for_the_device(
    monkeypatch: pytest.MonkeyPatch, host_cycles: int, sleeps: list[int], queued: bool
) -> None:
    queue = Queue(monkeypatch, host_cycles)
    timer = device.CudaTimer()
    contender = device.Contender("slow", queue.launch, 1)
    window = timer.window(contender, 20)
    assert (window.microseconds, window.queued) == (25.0, queued)
    assert queue.sleeps == [1_000_000 * count for count in sleeps]
    queue.sleeps.clear()
    timer.window(contender, 20)
    assert queue.sleeps == [1_000_000 * sleeps[-1]]  # what was learnt is kept


# tune


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KNNPOOL_TUNED", str(tmp_path / "tuned.json"))
    forget_choices()
    yield tmp_path / "tuned.json"
    forget_choices()


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """A device on which tiles of two rows win; the cases that were tuned."""
    cases: list[Case] = []

    def measure_variants(case: Case, *_: object, all_threads: bool) -> VariantResult:
        assert all_threads
        cases.append(case)
        chosen = VariantTime("chosen", 1, 256, 20.0)
        name = f"knnpool_{case.direction.value}_{case.mode.value}_{case.dtype}_shared_r2"
        return VariantResult(case, chosen, (chosen, VariantTime(name, 1, 128, 16.0)))

    monkeypatch.setattr(device, "require_device", lambda: None)
    monkeypatch.setattr(device, "machine", lambda: MACHINE)
    monkeypatch.setattr("knnpool_gen.bench.variants.measure_variants", measure_variants)
    return cases


def test_what_is_tuned_is_used(run: Run, tunable: list[Case], file: Path) -> None:
    from knnpool_gen.bench.variants import problem_of_case

    ended = run("tune", "964", "230", "9", "--rows", "49152", "--direction", "forward")
    assert (ended.code, ended.stderr) == (0, f"1 choice(s), kept in {file}\n")
    assert ended.stdout.split()[-9:] == (
        ["forward", "max", "float16", "49152", "knnpool_forward_max_float16_shared_r2", "1", "128", "16.0", "20.0"]
    )
    (case,) = tunable
    assert (case.nin, case.nout, case.k, case.rows) == (964, 230, 9, 49152)
    configuration = select(problem_of_case(case), replace(H200, label=MACHINE.device))
    assert (configuration.kernel.name, configuration.threads) == ("knnpool_forward_max_float16_shared_r2", 128)
    assert select(problem_of_case(case), H200).kernel.name != configuration.kernel.name


def test_tuning_a_file(run: Run, tunable: list[Case], file: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a__nin3__max=np.zeros((2, 5), int), b__nin4__avg=np.zeros((2, 5), int))
    ended = run("tune", tmp_path / "t.npz", "--table", "b", "--rows", 8, "--rows", 64, "--dtype", "float32", "--json")
    assert ended.code == 0
    assert [(choice["mode"], choice["rows"], choice["direction"]) for choice in json.loads(ended.stdout)] == [
        ("avg", rows, direction) for rows in (8, 64) for direction in ("forward", "backward")
    ]
    (choices,) = read_tuned(file).values()
    assert len(choices) == len(tunable) == 4

    np.save(tmp_path / "t.npy", np.zeros((2, 5), int))
    assert run("tune", tmp_path / "t.npy", "--nin", 7, "--mode", "sum", "--mode", "max").code == 0
    assert [(case.nin, case.mode.value) for case in tunable[4:]] == [(7, "sum")] * 2 + [(7, "max")] * 2


def test_a_dry_run_keeps_nothing(run: Run, tunable: list[Case], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("tune", "64", "16", "9", "--dry-run").stderr == "2 choice(s), not kept\n"
    assert not file.exists()
    monkeypatch.setenv("KNNPOOL_TUNED", "off")
    assert run("tune", "64", "16", "9", "--dry-run").code == 0
    assert len(tunable) == 4
    message = "knnpool-gen: KNNPOOL_TUNED=off: there is no file to keep choices in; give --dry-run\n"
    assert run("tune", "64", "16", "9") == Ended(2, "", message)
    assert len(tunable) == 4


def test_nothing_is_measured_that_cannot_be_kept(run: Run, tunable: list[Case], file: Path) -> None:
    file.write_text("nonsense")
    ended = run("tune", "64", "16", "9")
    assert (ended.code, tunable) == (2, [])
    assert ended.stderr.startswith(f"knnpool-gen: {file} cannot be read: ")


@pytest.mark.usefixtures("no_gpu", "file")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("64", "16", "9"), NO_DEVICE.removeprefix("knnpool-gen: ").rstrip()),
        (("64", "16"), "64 16: give the file of a table, or its sizes NIN NOUT K"),
        (("0", "16", "9"), "0 16 9: give the file of a table, or its sizes NIN NOUT K"),
        (("64", "x", "9"), "64 x 9: give the file of a table, or its sizes NIN NOUT K"),
        (("t.npy",), "t.npy does not say how many inputs its table has: give --nin"),
        (("64", "16", "9", "--mode", "x"), "no mode x; there are max, avg, sum, weighted"),
        (("64", "16", "9", "--dtype", "x"), "no dtype x; there are float16, bfloat16, float32, float64"),
        (("64", "16", "9", "--table", "x"), "no table x; there are 64to16"),
    ],
    ids=str,
)
def test_what_cannot_be_tuned(run: Run, arguments: tuple[Any, ...], message: str) -> None:
    assert run("tune", *arguments) == Ended(2, "", f"knnpool-gen: {message}\n")
