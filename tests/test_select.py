"""The choice of a kernel, as the pure function it is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from knnpool_gen.errors import InvalidArgumentError, OutOfReachError, UnsupportedTypeError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel, KernelKey
from knnpool_gen.runtime import select as module
from knnpool_gen.runtime.select import PLACES_SHARED, Configuration, DeviceFacts, Problem, all_tile_heights, select
from knnpool_gen.vocabulary import Direction, Mode, Staging

KIB = 1024
DEVICES = {
    "sm_75_small": DeviceFacts(40, 48 * KIB, 64 * KIB, 1024),
    "sm_75": DeviceFacts(40, 64 * KIB, 64 * KIB, 1024),
    "sm_86": DeviceFacts(84, 99 * KIB, 100 * KIB, 1536),
    "sm_90": DeviceFacts(132, 227 * KIB, 228 * KIB, 2048),
    "sm_120": DeviceFacts(170, 99 * KIB, 100 * KIB, 1536),
}
H200 = DEVICES["sm_90"]
KEYS = {kernel: key for key, kernel in KERNELS.items()}
ALEXP0 = Problem(Direction.FORWARD, Mode.MAX, "float16", k=9, nin=964, nout=230, rows=512 * 96, need_aux=True)


def check(configuration: Configuration, problem: Problem, device: DeviceFacts, rs: int | None = None) -> None:
    """Everything that a launch of ``configuration`` relies on."""
    key, kernel, macros = KEYS[configuration.kernel], configuration.kernel, dict(configuration.macros)
    assert key[:3] == (problem.direction, problem.mode, problem.dtype)
    assert rs in (None, key.rows)
    assert problem.k <= (kernel.max_k or problem.k)

    threads, shared = configuration.threads, configuration.shared_bytes
    assert threads % 32 == 0
    assert 64 <= threads <= 1024
    if key.staging is Staging.SHARED:
        stack = macros["KNNPOOL_STACK"]
        assert isinstance(stack, int)
        assert stack == 1 or rs is None
        tile = kernel.shared_bytes(problem.staged_nodes, problem.written_nodes, stack, problem.slot_bytes)
        places = 4 * problem.k * problem.nout if macros.get("KNNPOOL_PLACES") else 0
        assert shared == (-(-tile // 16) * 16 + places if places else tile)
        assert places <= PLACES_SHARED
        check_vectors(macros, kernel, problem)
        tiles = -(-problem.rows // (key.rows * stack))
    else:
        assert "KNNPOOL_STACK" not in macros
        assert shared == 0
        tiles = -(-problem.rows // key.rows) * -(-problem.written_nodes // threads)
    assert shared <= device.shared_per_block
    assert 1 <= configuration.grid <= max(1, tiles)

    per_multiprocessor = -(-configuration.grid // device.multiprocessors)
    assert per_multiprocessor * shared <= device.shared_per_multiprocessor
    assert per_multiprocessor * threads <= device.threads_per_multiprocessor
    blocks = macros["KNNPOOL_BLOCKS"]
    assert isinstance(blocks, int)
    assert blocks >= 1
    assert blocks * shared <= device.shared_per_multiprocessor
    assert blocks * threads <= device.threads_per_multiprocessor

    assert macros["KNNPOOL_THREADS"] == threads
    assert [macros[f"KNNPOOL_{name}"] for name in ("K", "NIN", "NOUT")] == [problem.k, problem.nin, problem.nout]
    switches = {
        "KNNPOOL_OMIT_NAN": problem.omit_nan,
        "KNNPOOL_AUX": problem.need_aux,
        "KNNPOOL_NORMALIZE": problem.normalize,
        "KNNPOOL_AUX_BLOCKED": problem.blocked_aux,
        "KNNPOOL_PLACES": 0 < kernel.held_slots < problem.k and 0 < 4 * problem.k * problem.nout <= PLACES_SHARED,
    }
    assert {name: macros[name] for name in switches if name in macros} == {
        name: int(switches[name]) for name in kernel.switches
    }
    types = {
        "KNNPOOL_INDEX": problem.index_bytes,
        "KNNPOOL_SLOT": problem.slot_bytes,
        "KNNPOOL_ENTRY": problem.entry_bytes,
    }
    sizes = {"unsigned char": 1, "short": 2, "unsigned short": 2, "int": 4, "unsigned": 4, "unsigned long long": 8}
    assert {name: sizes[str(macros[name])] for name in types} == types


def check_vectors(macros: dict[str, int | str], kernel: Kernel, problem: Problem) -> None:
    """Rows are made of whole vectors, which begin where vectors may."""
    vectors = [(macros["KNNPOOL_VECTOR"], problem.staged_nodes, kernel.vector)]
    if problem.direction is Direction.BACKWARD:
        vectors.append((macros["KNNPOOL_OUT_VECTOR"], problem.written_nodes, kernel.out_vector))
    for vector, nodes, most in vectors:
        assert isinstance(vector, int)
        assert nodes % vector == 0
        assert most % vector == 0
        assert vector == 1 or problem.aligned


@pytest.mark.parametrize("key", KERNELS, ids=lambda key: KERNELS[key].name)
def test_every_variant_can_be_asked_for(key: KernelKey) -> None:
    """By its number of rows, on a small table if it stages and on one too large to stage if it does not."""
    nodes = 100 if key.staging is Staging.SHARED else 1_000_000
    problem = Problem(key.direction, key.mode, key.dtype, k=3, nin=nodes, nout=nodes, rows=10_000, index_bytes=4)
    for device in DEVICES.values():
        configuration = select(problem, device, key.rows)
        check(configuration, problem, device, key.rows)
        assert KEYS[configuration.kernel] == key


def problems() -> st.SearchStrategy[Problem]:
    sizes = st.one_of(st.integers(0, 40), st.integers(0, 4000), st.integers(0, 2**31 - 1))
    modes = sorted({(key.direction, key.mode, key.dtype) for key in KERNELS})

    def make(what: tuple[Direction, Mode, str], **facts: Any) -> Problem:
        return Problem(*what, **facts)

    return st.builds(
        make,
        st.sampled_from(modes),
        k=st.one_of(st.integers(0, 40), st.integers(0, 70_000)),
        nin=sizes,
        nout=sizes,
        rows=st.one_of(st.integers(0, 300), st.integers(0, 2**33)),
        need_aux=st.booleans(),
        omit_nan=st.booleans(),
        normalize=st.booleans(),
        index_bytes=st.sampled_from([2, 4]),
        slot_bytes=st.sampled_from([1, 2, 4]),
        entry_bytes=st.sampled_from([4, 8]),
        blocked_aux=st.booleans(),
        aligned=st.booleans(),
    )


@settings(deadline=None, max_examples=600)
@given(problems(), st.sampled_from(list(DEVICES.values())), st.sampled_from([None, *sorted(all_tile_heights())]))
def test_every_choice_is_valid(problem: Problem, device: DeviceFacts, rs: int | None) -> None:
    heights = {key.rows for key in KERNELS if key[:3] == (problem.direction, problem.mode, problem.dtype)}
    assume(rs is None or rs in heights)
    try:
        configuration = select(problem, device, rs)
    except OutOfReachError:
        assert not [
            key
            for key, kernel in KERNELS.items()
            if key[:3] == (problem.direction, problem.mode, problem.dtype)
            and rs in (None, key.rows)
            and kernel.shared_bytes(problem.staged_nodes, problem.written_nodes, 1, problem.slot_bytes)
            <= device.shared_per_block
            and problem.k <= (kernel.max_k or problem.k)
        ]
    else:
        check(configuration, problem, device, rs)
        assert select(problem, device, rs) is configuration


def test_alexp0_on_an_h200() -> None:
    """The size that everything is measured at: tall tiles in shared memory, on every multiprocessor."""
    configuration = select(ALEXP0, H200)
    check(configuration, ALEXP0, H200)
    key = KEYS[configuration.kernel]
    assert key.staging is Staging.SHARED
    assert key.rows >= 8
    assert configuration.grid >= 2 * H200.multiprocessors


def test_few_rows_get_low_tiles() -> None:
    few = replace(ALEXP0, rows=H200.multiprocessors)
    assert KEYS[select(few, H200).kernel].rows == 1


def test_stacked_groups_begin_in_different_banks() -> None:
    """Threads at one node of several groups: odd distances of whole reads bring them to as many banks."""
    pooling = replace(ALEXP0, k=60, nin=60, nout=1, rows=1 << 17, mode=Mode.AVG, need_aux=False)
    configuration = select(pooling, H200)
    stack = int(dict(configuration.macros)["KNNPOOL_STACK"])
    read = min(configuration.kernel.node_bytes, 16)
    tile = configuration.kernel.shared_bytes(pooling.nin, pooling.nout, stack)
    assert stack >= 16
    assert tile % (stack * read) == 0
    assert tile // (stack * read) % 2 == 1


def test_rows_of_nothing() -> None:
    for problem in (replace(ALEXP0, rows=0), replace(ALEXP0, nout=0), replace(ALEXP0, k=0, nin=0, nout=0)):
        configuration = select(problem, H200)
        check(configuration, problem, H200)
        assert configuration.grid == 1 or problem.rows


def test_the_largest_tile_that_fits() -> None:
    """One node more than fits is read directly; what fits is staged to the last byte."""
    for device in DEVICES.values():
        fitting = max(
            nodes for nodes in range(device.shared_per_block // 2)
            if any(
                kernel.shared_bytes(nodes, 1) <= device.shared_per_block
                for key, kernel in KERNELS.items()
                if key[:4] == (Direction.FORWARD, Mode.MAX, "float16", Staging.SHARED)
            )
        )  # fmt: skip
        staged = replace(ALEXP0, nin=fitting, nout=fitting, index_bytes=4)
        direct = replace(staged, nin=fitting + 1)
        assert KEYS[select(staged, device).kernel].staging is Staging.SHARED
        assert KEYS[select(direct, device).kernel].staging is Staging.DIRECT
        check(select(staged, device), staged, device)
        check(select(direct, device), direct, device)


def test_a_height_that_does_not_reach() -> None:
    """float16 has no direct variant of 8 rows."""
    assert KernelKey(Direction.FORWARD, Mode.MAX, "float16", Staging.DIRECT, 8) not in KERNELS
    message = (
        "rs = 8: no variant of that many rows serves K = 9 and 150000 nodes of float16 "
        "with 232448 bytes of shared memory a block"
    )
    with pytest.raises(OutOfReachError, match=f"^{re.escape(message)}$"):
        select(replace(ALEXP0, nin=150_000), H200, 8)


def test_nothing_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Specs without direct variants have an end to what they serve."""
    staged = {key: kernel for key, kernel in KERNELS.items() if key.staging is Staging.SHARED}
    monkeypatch.setattr(module, "KERNELS", staged)
    choose = select.__wrapped__
    message = "no variant serves K = 9 and 150000 nodes of float16 with 232448 bytes of shared memory a block"
    with pytest.raises(OutOfReachError, match=f"^{re.escape(message)}$"):
        choose(replace(ALEXP0, nin=150_000), H200)
    # A table that reads little of its input would rather be read directly.
    little = replace(ALEXP0, k=1, nout=1, nin=20_000)
    assert KEYS[choose(little, H200).kernel].staging is Staging.SHARED


def test_too_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    limited = {key: replace(kernel, max_k=100) for key, kernel in KERNELS.items()}
    monkeypatch.setattr(module, "KERNELS", limited)
    assert select.__wrapped__(replace(ALEXP0, k=100), H200).kernel.max_k == 100
    with pytest.raises(OutOfReachError, match=r"^no variant serves K = 101 and 964 nodes of float16 "):
        select.__wrapped__(replace(ALEXP0, k=101), H200)


def test_a_dtype_without_kernels() -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        select(replace(ALEXP0, dtype="float8_e4m3fn"), H200)
    assert str(caught.value) == (
        "mode 'max' has no kernel for float8_e4m3fn; supported: float16, bfloat16, float32, float64"
    )


def test_a_dtype_taken_out_of_the_specs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KERNELS", {key: value for key, value in KERNELS.items() if key.dtype != "float64"})
    with pytest.raises(
        UnsupportedTypeError, match=r"^mode 'max' has no kernel for float64; supported: float16, bfloat16, float32$"
    ):
        select.__wrapped__(replace(ALEXP0, dtype="float64"), H200)


@pytest.mark.parametrize("rs", [0, -1, 3, 1000, True, 1.0, "1"])
def test_heights_that_no_variant_has(rs: Any) -> None:
    existing = ", ".join(str(rows) for rows in sorted(all_tile_heights()))
    message = f"rs = {rs!r}: no variant has tiles of that many rows; there are {existing}"
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        select.__wrapped__(ALEXP0, H200, rs)
