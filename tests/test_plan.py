"""Plans: what they hold, what they refuse, and when they are built anew."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import pickle
import re
import threading
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from knnpool_gen.errors import InvalidArgumentError, UnsupportedTypeError
from knnpool_gen.runtime.plan import (
    PlanCache,
    PoolMeta,
    clear_plans,
    ensure_pool_metadata,
    plan_for,
    pool_meta_from_indices,
    resolve_device,
)
from tables import Table, real_tables, small_tables, wide_tables

INTEGERS = (
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
)  # fmt: skip

SEED_FIELDS = [
    "nin", "nout", "k", "indices", "indices_i64", "count", "inv_count", "rev_rowptr", "rev_kn", "device",
]  # fmt: skip


def tensors_of(meta: PoolMeta) -> dict[str, Tensor]:
    return {name: value for name, value in vars(meta).items() if isinstance(value, Tensor)}


def assert_same_plan(actual: PoolMeta, expected: PoolMeta) -> None:
    assert (actual.nin, actual.nout, actual.k) == (expected.nin, expected.nout, expected.k)
    for name, tensor in tensors_of(expected).items():
        torch.testing.assert_close(getattr(actual, name), tensor, rtol=0, atol=0, msg=f"{name} differs")


# What a plan holds.


def test_a_plan_by_hand() -> None:
    meta = pool_meta_from_indices(torch.tensor([[2, 9, 0, 2], [0, 3, 4, 2]]), 3)
    assert (meta.nin, meta.nout, meta.k, meta.device) == (3, 4, 2, torch.device("cpu"))
    assert meta.indices.tolist() == [[2, 3, 0, 2], [0, 3, 3, 2]]
    assert meta.indices_i64.tolist() == meta.indices.tolist()
    assert meta.count.tolist() == [2.0, 0.0, 1.0, 2.0]
    assert meta.inv_count.tolist() == [0.5, float("inf"), 1.0, 0.5]
    assert meta.rev_rowptr.tolist() == [0, 2, 2, 5]
    slot_1 = 1 << 24
    assert meta.rev_kn.tolist() == [2, slot_1 | 0, 0, 3, slot_1 | 3]
    assert meta.first_slot.tolist() == [0, 255, 0, 0]
    assert meta.gather_indices.tolist() == meta.indices.tolist()
    assert meta.empty_columns.tolist() == [1]


def test_the_types_of_a_plan() -> None:
    meta = pool_meta_from_indices(torch.tensor([[2, 9, 0, 2], [0, 3, 4, 2]]), 3)
    assert {name: tensor.dtype for name, tensor in tensors_of(meta).items()} == {
        "indices": torch.int32,
        "indices_i64": torch.int64,
        "count": torch.float32,
        "inv_count": torch.float32,
        "rev_rowptr": torch.int32,
        "rev_kn": torch.int32,
        "first_slot": torch.uint8,
        "gather_indices": torch.int16,
        "empty_columns": torch.int64,
        "rev_order": torch.int32,
        "rev_head": torch.int32,
    }
    assert all(tensor.is_contiguous() for tensor in tensors_of(meta).values())


def check_plan_of(table: Table) -> None:
    meta = pool_meta_from_indices(table.indices, table.nin)
    entries = table.indices.tolist()
    readers: list[list[tuple[int, int]]] = [[] for _ in range(table.nin)]
    first = [255 if table.k <= 255 else -1] * table.nout
    for k in reversed(range(table.k)):
        for n in range(table.nout):
            if entries[k][n] < table.nin:
                first[n] = k
    for k in range(table.k):
        for n in range(table.nout):
            if entries[k][n] < table.nin:
                readers[entries[k][n]].append((k, n))

    assert meta.indices.tolist() == [[min(m, table.nin) for m in row] for row in entries]
    starts = meta.rev_rowptr.tolist()
    unpacked = list(zip(*(part.tolist() for part in meta.unpack(meta.rev_kn)), strict=True))
    assert len(starts) == table.nin + 1
    assert starts[-1] == len(unpacked) == meta.count.sum()
    assert [unpacked[start:end] for start, end in pairwise(starts)] == readers
    wide = table.k > 256
    packed = [kn if wide else kn & 0xFFFFFFFF for kn in meta.rev_kn.tolist()]
    assert packed == [k << (32 if wide else 24) | n for k, n in unpacked]
    assert meta.rev_kn.dtype == (torch.int64 if wide else torch.int32)
    order = sorted(range(table.nin), key=lambda m: (m // 1024, -len(readers[m]), m))
    assert meta.rev_order.tolist() == order
    heads = [(readers[m] + [(255, 0xFFFFFF) if not wide else (-1, 0xFFFFFFFF)] * 4)[:4] for m in order]
    assert meta.rev_head.dtype == meta.rev_kn.dtype
    assert [list(zip(*(part.tolist() for part in meta.unpack(head)), strict=True)) for head in meta.rev_head.T] == heads
    gathered = meta.gather_indices.to(torch.int64)
    assert (gathered & (0xFFFF if table.nin < 2**16 else -1)).tolist() == meta.indices.tolist()
    assert meta.gather_indices.element_size() == (2 if table.nin < 2**16 else 4)
    assert meta.empty_columns.tolist() == [n for n in range(table.nout) if all(row[n] >= table.nin for row in entries)]
    assert meta.first_slot.tolist() == first
    assert meta.count.tolist() == [sum(row[n] < table.nin for row in entries) for n in range(table.nout)]


@pytest.mark.parametrize("table", small_tables() + wide_tables() + [t for t in real_tables() if t.nout < 1000], ids=str)
def test_a_plan_by_loops(table: Table) -> None:
    check_plan_of(table)


@settings(deadline=None)
@given(st.data())
def test_a_plan_by_loops_drawn(data: st.DataObject) -> None:
    k, nout, nin = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))
    entry = st.integers(0, nin) | st.integers(0, 2**63 - 1)
    entries = data.draw(st.lists(entry, min_size=k * nout, max_size=k * nout))
    check_plan_of(Table("drawn", torch.tensor(entries, dtype=torch.int64).reshape(k, nout), nin))


def test_slots_from_128_on_are_negative_as_int32() -> None:
    meta = pool_meta_from_indices(torch.zeros(130, 1, dtype=torch.int64), 1)
    assert meta.rev_kn[127] == 127 << 24
    assert meta.rev_kn[128] == (128 << 24) - 2**32
    assert meta.rev_kn.to(torch.int64)[129] & 0xFFFFFFFF == 129 << 24


@pytest.mark.parametrize(
    ("k", "dtype", "none"),
    [
        (0, torch.uint8, 255),
        (254, torch.uint8, 255),
        (255, torch.uint8, 255),
        (256, torch.int16, -1),
        (257, torch.int16, -1),
        (32767, torch.int16, -1),
        (32768, torch.int32, -1),
    ],
)
def test_the_type_of_slots(k: int, dtype: torch.dtype, none: int) -> None:
    """Column 0 is empty, column 1 has its last slot only, column 2 all."""
    table = torch.ones(k, 3, dtype=torch.int64)
    table[-1:, 1] = 0
    table[:, 2] = 0
    meta = pool_meta_from_indices(table, 1)
    assert meta.first_slot.dtype == dtype
    assert meta.first_slot.tolist() == ([none, k - 1, 0] if k else [none] * 3)
    assert meta.empty_columns.tolist() == ([0] if k else [0, 1, 2])


@pytest.mark.parametrize(
    ("nin", "dtype"),
    [(65534, torch.int16), (65535, torch.int16), (65536, torch.int32), (65537, torch.int32)],
)
def test_the_type_of_indices(nin: int, dtype: torch.dtype) -> None:
    entries = [0, 32767, 32768, nin - 1, nin, nin + 1]
    meta = pool_meta_from_indices(torch.tensor([entries]), nin)
    assert meta.gather_indices.dtype == dtype
    as_read = meta.gather_indices.view(torch.uint16) if dtype == torch.int16 else meta.gather_indices
    assert as_read.tolist() == [[*entries[:-1], nin]]


@pytest.mark.parametrize(("k", "dtype"), [(255, torch.int32), (256, torch.int32), (257, torch.int64)])
def test_the_type_of_reverse_entries_by_k(k: int, dtype: torch.dtype) -> None:
    meta = pool_meta_from_indices(torch.zeros(k, 2, dtype=torch.int64), 1)
    assert meta.rev_kn.dtype == dtype
    slots, nodes = meta.unpack(meta.rev_kn)
    assert slots.tolist() == [slot for slot in range(k) for _ in range(2)]
    assert nodes.tolist() == [0, 1] * k
    if dtype == torch.int64:
        assert meta.rev_kn.tolist() == [slot << 32 | node for slot in range(k) for node in range(2)]


@pytest.mark.parametrize(("nout", "dtype"), [(2**24, torch.int32), (2**24 + 1, torch.int64)])
def test_the_type_of_reverse_entries_by_nout(nout: int, dtype: torch.dtype) -> None:
    table = torch.ones(1, nout, dtype=torch.uint8)  # pads, but for the last nodes
    table[0, -2:] = 0
    meta = pool_meta_from_indices(table, 1)
    assert meta.rev_kn.dtype == dtype
    assert [part.tolist() for part in meta.unpack(meta.rev_kn)] == [[0, 0], [nout - 2, nout - 1]]


def test_the_fields_are_those_of_the_seed() -> None:
    assert [field.name for field in dataclasses.fields(PoolMeta) if field.init] == SEED_FIELDS
    meta = pool_meta_from_indices(torch.tensor([[5, 0], [1, 1]]), 2)
    again = PoolMeta(*(getattr(meta, name) for name in SEED_FIELDS))
    assert_same_plan(again, meta)
    assert again.first_slot.tolist() == [1, 0]


def test_a_plan_is_frozen_and_equal_to_itself_only() -> None:
    table = torch.tensor([[0]])
    meta, other = pool_meta_from_indices(table, 1), pool_meta_from_indices(table, 1)
    assert meta == meta
    assert meta != other
    assert len({meta, other}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        meta.nin = 2  # type: ignore[misc]


def test_a_plan_prints_in_one_line() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 1]]), 5)
    assert repr(meta) == "PoolMeta(nin=5, nout=2, k=1, device=device(type='cpu'))"


# What tables may be.


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_integer_dtype(dtype: torch.dtype) -> None:
    entries = [[0, 5, 2], [127, 3, 1]]
    table = torch.tensor(entries).to(dtype)
    assert_same_plan(pool_meta_from_indices(table, 4), pool_meta_from_indices(torch.tensor(entries), 4))


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (np.uint8, [255, 254]),
        (np.uint16, [2**16 - 1, 2**15]),
        (np.uint32, [2**32 - 1, 2**31]),
        (np.uint64, [2**64 - 1, 2**63]),
        (np.uint64, [2**63 + 3, 2**32 + 3]),
        (np.int64, [2**63 - 1, 2**32 + 3]),
        (np.int32, [2**31 - 1, 4]),
    ],
)
def test_however_large_a_pad_is_a_pad(dtype: Any, values: list[int]) -> None:
    table = torch.from_numpy(np.array([[*values, 3]], dtype=dtype))
    meta = pool_meta_from_indices(table, 4)
    assert meta.indices.tolist() == [[4, 4, 3]]
    assert meta.rev_kn.tolist() == [2]


def test_nin_beyond_the_dtype_of_the_table() -> None:
    assert pool_meta_from_indices(torch.tensor([[127, 3]], dtype=torch.int8), 1000).count.tolist() == [
        1.0,
        1.0,
    ]
    assert pool_meta_from_indices(torch.tensor([[255]], dtype=torch.uint8), 256).count.tolist() == [1.0]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_any_strides(dtype: torch.dtype) -> None:
    table = torch.tensor([[0, 1, 2, 3], [4, 3, 9, 0]]).to(dtype)
    wide = torch.full((5, 8), 77).to(dtype)
    wide[1:5:3, ::2] = table
    for view in (table.T.contiguous().T, wide[1:5:3, ::2]):
        assert not view.is_contiguous()
        meta = pool_meta_from_indices(view, 5)
        assert_same_plan(meta, pool_meta_from_indices(table, 5))
        assert all(tensor.is_contiguous() for tensor in tensors_of(meta).values())
    row = table[:1]
    assert_same_plan(pool_meta_from_indices(row.expand(3, -1), 5), pool_meta_from_indices(row.repeat(3, 1), 5))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_plan_shares_no_memory_with_its_table(dtype: torch.dtype) -> None:
    table = torch.tensor([[0, 2], [1, 1]], dtype=dtype)
    meta = pool_meta_from_indices(table, 2)
    table.fill_(1)
    assert meta.indices.tolist() == meta.indices_i64.tolist() == [[0, 2], [1, 1]]


@pytest.mark.parametrize("nin", [3, np.int32(3), np.uint8(3), torch.tensor(3), torch.tensor(3, dtype=torch.int16)])
def test_nin_is_any_integer(nin: Any) -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 3]]), nin)
    assert type(meta.nin) is int
    assert meta.indices.tolist() == [[0, 3]]


@pytest.mark.parametrize(("k", "nout", "nin"), [(0, 0, 0), (0, 3, 2), (3, 0, 2), (2, 2, 0), (0, 0, 4)])
def test_sizes_of_zero(k: int, nout: int, nin: int) -> None:
    meta = pool_meta_from_indices(torch.zeros(k, nout, dtype=torch.int32), nin)
    assert meta.indices.shape == meta.indices_i64.shape == (k, nout)
    assert meta.count.tolist() == [0.0] * nout
    assert meta.first_slot.tolist() == [255] * nout
    assert meta.rev_rowptr.tolist() == [0] * (nin + 1)
    assert meta.rev_kn.numel() == 0


def test_inference_mode_leaves_no_mark() -> None:
    with torch.inference_mode():
        table = torch.tensor([[0, 2], [1, 1]])
        meta = pool_meta_from_indices(table, 2)
        moved = meta.to("meta")
    assert table.is_inference()
    assert not any(tensor.is_inference() for tensor in tensors_of(meta).values())
    assert not any(tensor.is_inference() for tensor in tensors_of(moved).values())


def test_function_transforms_leave_no_mark() -> None:
    table = torch.tensor([[0, 2], [1, 1]])
    built = []

    def function(x: Tensor) -> Tensor:
        built.append(pool_meta_from_indices(table, 2))
        return x.sum()

    torch.func.grad(function)(torch.ones(3))
    torch.func.vmap(function)(torch.ones(2, 3))
    assert len(built) == 2
    for meta in built:
        assert not any(torch._C._functorch.is_functorch_wrapped_tensor(t) for t in tensors_of(meta).values())


# What is refused.


@pytest.mark.parametrize(
    ("indices", "found"),
    [
        (torch.zeros(1, 1), "torch.float32"),
        (torch.zeros(1, 1, dtype=torch.bool), "torch.bool"),
        (torch.zeros(1, 1, dtype=torch.complex64), "torch.complex64"),
        (np.zeros((1, 1), dtype=np.int64), "ndarray"),
        ([[0]], "list"),
        (None, "NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tables_of_other_types(indices: Any, found: str) -> None:
    for build in (pool_meta_from_indices, plan_for):
        with pytest.raises(UnsupportedTypeError, match=f"^indices must be an integer tensor, not {found}$"):
            build(indices, 1)


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)], ids=str)
def test_tables_of_other_ranks(shape: tuple[int, ...]) -> None:
    message = f"indices must have shape [K, Nout], not {list(shape)}"
    for build in (pool_meta_from_indices, plan_for):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
            build(torch.zeros(shape, dtype=torch.int64), 1)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_the_first_negative_entry_is_named(dtype: torch.dtype) -> None:
    table = torch.tensor([[0, 1, 2], [3, 4, -7], [-1, 9, 9]], dtype=dtype)
    message = "indices[1, 2] = -7 is negative; padding is any entry >= Nin = 5"
    for view in (table, table.T.contiguous().T):
        with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
            pool_meta_from_indices(view, 5)


def test_nin_is_checked() -> None:
    table = torch.tensor([[0]])
    for build in (pool_meta_from_indices, plan_for):
        with pytest.raises(InvalidArgumentError, match=r"^Nin = -1 is negative$"):
            build(table, -1)
        for nin in (2.5, True, "3", None, torch.tensor(3.0)):
            with pytest.raises(UnsupportedTypeError, match=r"^Nin must be an integer, not "):
                build(table, nin)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "nin", "message"),
    [
        ((1, 2**31), 3, "K * Nout = 2147483648 is not supported, at most 2147483647"),
        ((2**31, 1), 3, "K * Nout = 2147483648 is not supported, at most 2147483647"),
        ((255, 2**23 + 2**16), 3, "K * Nout = 2155806720 is not supported, at most 2147483647"),
        ((1, 1), 2**31, "Nin = 2147483648 is not supported, at most 2147483647"),
    ],
)
def test_sizes_beyond_reach(shape: tuple[int, int], nin: int, message: str) -> None:
    table = torch.zeros(1, 1, dtype=torch.int64).expand(shape)
    with pytest.raises(InvalidArgumentError, match=f"^{re.escape(message)}$"):
        pool_meta_from_indices(table, nin)


# Devices, copies, files. The device "meta" stands for one that is not the CPU.


def test_resolve_device() -> None:
    assert resolve_device("cpu:0") == resolve_device(torch.device("cpu")) == torch.device("cpu")
    assert resolve_device("cuda:3") == torch.device("cuda", 3)
    assert resolve_device("meta") == torch.empty(0, device="meta").device


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_is_not_here(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"device = '{device}'"):
        pool_meta_from_indices(torch.tensor([[0, 2], [1, 1]]), 2, device)


def test_a_default_device_does_not_matter() -> None:
    table = torch.tensor([[0, 2], [1, 1]])
    with torch.device("meta"):
        meta = pool_meta_from_indices(table, 2)
    assert {tensor.device.type for tensor in tensors_of(meta).values()} == {"cpu"}


def test_to_another_device() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 2], [1, 1]]), 2)
    assert meta.to("cpu:0") is meta
    moved = meta.to("meta")
    assert moved.device == torch.device("meta")
    assert {tensor.device.type for tensor in tensors_of(moved).values()} == {"meta"}
    assert (moved.nin, moved.nout, moved.k) == (2, 2, 2)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda meta: pickle.loads(pickle.dumps(meta))])
def test_copies(duplicate: Any) -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 2], [1, 1]]), 2)
    again = duplicate(meta)
    assert again is not meta
    assert again.device == meta.device
    assert_same_plan(again, meta)


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_loaded_for_another_device() -> None:
    meta = pool_meta_from_indices(torch.tensor([[0, 2], [1, 1]]), 2)
    file = saved(meta)
    assert_same_plan(torch.load(file, weights_only=False), meta)
    file.seek(0)
    moved = torch.load(file, map_location="meta", weights_only=False)
    assert moved.device == moved.first_slot.device == torch.device("meta")


# The cache.


def test_a_plan_is_built_once() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    meta = cache.get(table, 2)
    assert cache.get(table, np.int64(2), "cpu:0") is meta
    assert len(cache) == 1
    assert_same_plan(meta, pool_meta_from_indices(table, 2))


def test_nin_is_part_of_the_key() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    two, three = cache.get(table, 2), cache.get(table, 3)
    assert (two.nin, three.nin) == (2, 3)
    assert cache.get(table, 2) is two
    assert cache.get(table, 3) is three


def test_equal_tables_are_different_tables() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    assert cache.get(table, 2) is not cache.get(table.clone(), 2)


def change_in_place(table: Tensor) -> None:
    table[0, 0] = 1


def change_through_a_view(table: Tensor) -> None:
    table.view(-1)[0] = 1


def change_through_detach(table: Tensor) -> None:
    table.detach()[0, 0] = 1


def assign_data(table: Tensor) -> None:
    table.data = torch.tensor([[1, 2], [1, 1]])


def set_storage(table: Tensor) -> None:
    table.set_(torch.tensor([[1, 2], [1, 1]]))


def set_transposed_and_fill(table: Tensor) -> None:
    table.set_(table.untyped_storage(), 0, (2, 2), (1, 2))
    table.copy_(torch.tensor([[1, 2], [1, 1]]))


CHANGES = [
    change_in_place,
    change_through_a_view,
    change_through_detach,
    assign_data,
    set_storage,
    set_transposed_and_fill,
]

any_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


@any_change
def test_a_changed_table_is_noticed(change: Any) -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    assert cache.get(table, 2).indices.tolist() == [[0, 2], [1, 1]]
    change(table)
    meta = cache.get(table, 2)
    assert meta.indices.tolist() == [[1, 2], [1, 1]]
    assert cache.get(table, 2) is meta
    assert len(cache) == 1


def test_new_data_at_the_old_address_is_noticed() -> None:
    """New tensors tend to get the memory of old ones, so that only what it holds has changed."""
    cache = PlanCache()
    table = torch.zeros(2, 2000, dtype=torch.int64)
    for entry in range(50):
        table.data = torch.full_like(table, entry)
        meta = cache.get(table, 99)
        address = table.data_ptr()
        for _ in range(5):
            table.data = torch.full_like(table, 50 + entry)
            if table.data_ptr() == address:
                break
        assert cache.get(table, 99).indices[0, 0] == 50 + entry
        assert meta.indices[0, 0] == entry


def test_other_strides_of_the_same_data_are_noticed() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    cache.get(table, 2)
    table.data = table.data.T
    assert cache.get(table, 2).indices.tolist() == [[0, 1], [2, 1]]


def test_another_shape_of_the_same_data_is_noticed() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 1, 2], [2, 1, 0]])
    cache.get(table, 3)
    table.t_()
    assert cache.get(table, 3).indices.tolist() == [[0, 2], [1, 1], [2, 0]]
    table.resize_(1, 2)
    assert cache.get(table, 3).indices.shape == (1, 2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16], ids=str)
def test_changes_of_inference_tensors_are_noticed(dtype: torch.dtype) -> None:
    cache = PlanCache()
    with torch.inference_mode():
        table = torch.tensor([[0, 2], [1, 1]], dtype=dtype)
        meta = cache.get(table, 2)
        assert cache.get(table, 2) is meta
        table[0, 0] = 1
        assert cache.get(table, 2).indices.tolist() == [[1, 2], [1, 1]]
    assert cache.get(table, 2).indices.tolist() == [[1, 2], [1, 1]]


def test_a_cache_keeps_no_table_alive() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    died = weakref.ref(table)
    cache.get(table, 2)
    cache.get(table, 3)
    assert len(cache) == 2
    del table
    assert died() is None
    assert len(cache) == 0


def test_a_table_in_a_cycle_takes_its_plan_along() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    table.itself = table  # type: ignore[attr-defined]
    cache.get(table, 2)
    del table
    gc.collect()
    assert len(cache) == 0


def test_a_changed_table_still_takes_its_plan_along() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, 2], [1, 1]])
    cache.get(table, 2)
    change_in_place(table)
    cache.get(table, 2)
    del table
    assert len(cache) == 0


def test_a_reused_id_is_another_table() -> None:
    """Python gives the id of a dead tensor to the next one; two alternating contents would be mixed up."""
    cache = PlanCache()
    ids = set()
    for entry in range(50):
        table = torch.tensor([[entry]])
        ids.add(id(table))
        assert cache.get(table, 50).indices.tolist() == [[entry]]
        del table
    assert len(ids) < 50
    assert len(cache) == 0


def test_the_least_recently_used_plan_goes_first() -> None:
    cache = PlanCache(limit=3)
    tables = [torch.tensor([[entry]]) for entry in range(4)]
    plans = [cache.get(table, 4) for table in tables[:3]]
    assert cache.get(tables[0], 4) is plans[0]
    cache.get(tables[3], 4)
    assert len(cache) == 3
    assert cache.get(tables[0], 4) is plans[0]
    assert cache.get(tables[2], 4) is plans[2]
    assert cache.get(tables[1], 4) is not plans[1]


def test_a_cache_holds_at_least_one_plan() -> None:
    with pytest.raises(InvalidArgumentError, match="limit = 0"):
        PlanCache(limit=0)


def test_a_bad_table_leaves_nothing_behind() -> None:
    cache = PlanCache()
    table = torch.tensor([[0, -2], [1, 1]])
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="negative"):
            cache.get(table, 2)
    assert len(cache) == 0
    table[0, 1] = 2
    good = cache.get(table, 2)
    assert good.indices.tolist() == [[0, 2], [1, 1]]
    table[0, 1] = -1
    with pytest.raises(InvalidArgumentError, match="negative"):
        cache.get(table, 2)
    table[0, 1] = 1
    assert cache.get(table, 2).indices.tolist() == [[0, 1], [1, 1]]


def test_threads_agree() -> None:
    cache = PlanCache(limit=4)
    shared = [torch.tensor([[entry, 9]]) for entry in range(4)]
    start = threading.Barrier(4)
    found: list[tuple[int, PoolMeta]] = []
    wrong: list[str] = []

    def work() -> None:
        start.wait()
        for turn in range(100):
            entry = turn % 4
            found.append((entry, cache.get(shared[entry], 9)))
            passing = torch.tensor([[turn % 9]])
            if cache.get(passing, 9).indices.tolist() != [[turn % 9]]:
                wrong.append(f"turn {turn}")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(found) == 400
    assert all(meta.indices.tolist() == [[entry, 9]] for entry, meta in found)
    assert len(cache) <= 4


def test_the_shared_cache() -> None:
    table = torch.tensor([[0, 2], [1, 1]])
    meta = plan_for(table, 2)
    assert plan_for(table, 2, "cpu") is meta
    clear_plans()
    again = plan_for(table, 2)
    assert again is not meta
    assert_same_plan(again, meta)


# Plans on layers.


class Layer(nn.Module):
    """What fovi's KNNPoolingLayer shows of itself."""

    def __init__(self, entries: list[list[int]], nin: int) -> None:
        super().__init__()
        self.register_buffer("knn_indices_pad_token", torch.tensor(entries))
        self.knn_pad_token_val = nin


def layer() -> Layer:
    return Layer([[0, 2], [1, 1]], 2)


def test_a_layer_keeps_its_plan() -> None:
    pool = layer()
    before = pool.state_dict().keys()
    meta = ensure_pool_metadata(pool, "cpu")
    assert pool._knn_pool_cuda_meta is meta
    assert ensure_pool_metadata(pool, torch.device("cpu")) is meta
    assert_same_plan(meta, pool_meta_from_indices(torch.tensor([[0, 2], [1, 1]]), 2))
    assert pool.state_dict().keys() == before
    assert [name for name, _ in pool.named_buffers()] == ["knn_indices_pad_token"]
    clear_plans()
    assert ensure_pool_metadata(pool, "cpu") is meta


@any_change
def test_a_layer_notices_a_changed_table(change: Any) -> None:
    pool = layer()
    ensure_pool_metadata(pool, "cpu")
    change(pool.knn_indices_pad_token)
    assert ensure_pool_metadata(pool, "cpu").indices.tolist() == [[1, 2], [1, 1]]
    assert pool._knn_pool_cuda_meta.indices.tolist() == [[1, 2], [1, 1]]


def test_a_layer_notices_another_table_or_nin() -> None:
    pool = layer()
    ensure_pool_metadata(pool, "cpu")
    pool.knn_indices_pad_token = torch.tensor([[1, 2], [1, 1]])
    assert ensure_pool_metadata(pool, "cpu").indices.tolist() == [[1, 2], [1, 1]]
    pool.load_state_dict({"knn_indices_pad_token": torch.tensor([[0, 2], [0, 0]])})
    assert ensure_pool_metadata(pool, "cpu").indices.tolist() == [[0, 2], [0, 0]]
    pool.knn_pad_token_val = 5
    assert ensure_pool_metadata(pool, "cpu").nin == 5


def test_a_layer_tells_its_table_from_an_alias_that_counts_its_own_changes() -> None:
    pool = layer()
    pool.knn_indices_pad_token[0, 0] = 0
    ensure_pool_metadata(pool, "cpu")
    alias = pool.knn_indices_pad_token.data
    alias[0, 0] = 1
    assert alias._version == pool.knn_indices_pad_token._version
    pool.knn_indices_pad_token = alias
    assert ensure_pool_metadata(pool, "cpu").indices.tolist() == [[1, 2], [1, 1]]


def test_a_bad_table_on_a_layer_is_forgotten() -> None:
    pool = layer()
    ensure_pool_metadata(pool, "cpu")
    pool.knn_indices_pad_token[0, 0] = -1
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match="negative"):
            ensure_pool_metadata(pool, "cpu")
    pool.knn_indices_pad_token[0, 0] = 1
    assert ensure_pool_metadata(pool, "cpu").indices.tolist() == [[1, 2], [1, 1]]


def test_a_copied_layer_builds_its_own_plan() -> None:
    pool = layer()
    meta = ensure_pool_metadata(pool, "cpu")
    twin = copy.deepcopy(pool)
    assert ensure_pool_metadata(twin, "cpu") is not meta
    twin.knn_indices_pad_token[0, 0] = 1
    assert ensure_pool_metadata(twin, "cpu").indices.tolist() == [[1, 2], [1, 1]]
    assert ensure_pool_metadata(pool, "cpu") is meta


def test_a_loaded_layer_builds_its_own_plan() -> None:
    pool = layer()
    meta = ensure_pool_metadata(pool, "cpu")
    for loaded in (pickle.loads(pickle.dumps(pool)), torch.load(saved(pool), weights_only=False)):
        assert_same_plan(ensure_pool_metadata(loaded, "cpu"), meta)
        loaded.knn_indices_pad_token[0, 0] = 1
        assert ensure_pool_metadata(loaded, "cpu").indices.tolist() == [[1, 2], [1, 1]]


def test_a_layer_loaded_elsewhere_has_its_plan_there() -> None:
    pool = layer()
    ensure_pool_metadata(pool, "cpu")
    loaded = torch.load(saved(pool), map_location="meta", weights_only=False)
    assert loaded._knn_pool_cuda_meta.device == torch.device("meta")
    loaded.knn_indices_pad_token = torch.tensor([[0, 2], [1, 1]])
    meta = ensure_pool_metadata(loaded, "cpu")
    assert meta.device == meta.indices.device == torch.device("cpu")


def test_a_plan_of_another_device_is_not_used() -> None:
    pool = layer()
    meta = ensure_pool_metadata(pool)
    object.__setattr__(pool, "_knn_pool_cuda_meta", meta.to("meta"))
    assert ensure_pool_metadata(pool, "cpu").device == torch.device("cpu")


class Plain:
    """A layer need not be a module."""


def test_nin_from_the_coordinates() -> None:
    pool: Any = Plain()
    pool.knn_indices_pad_token = torch.tensor([[0, 3]])
    pool.in_coords = torch.zeros(3, 2)
    assert ensure_pool_metadata(pool).indices.tolist() == [[0, 3]]
    pool.knn_pad_token_val = torch.tensor(4)
    assert ensure_pool_metadata(pool).nin == 4


def test_layers_without_what_it_takes() -> None:
    pool: Any = Plain()
    with pytest.raises(UnsupportedTypeError, match=r"^Plain has no knn_indices_pad_token, "):
        ensure_pool_metadata(pool)
    pool.knn_indices_pad_token = torch.tensor([[0, 3]])
    with pytest.raises(UnsupportedTypeError, match=r"^Plain has neither knn_pad_token_val nor in_coords "):
        ensure_pool_metadata(pool)
    pool.knn_indices_pad_token = [[0, 3]]
    with pytest.raises(UnsupportedTypeError, match="integer tensor, not list"):
        ensure_pool_metadata(pool)


def test_a_sparse_table_is_named() -> None:
    sparse = torch.tensor([[0, 1], [2, 5]]).to_sparse()
    with pytest.raises(
        UnsupportedTypeError, match=r"^indices must be a strided tensor, not one of layout torch\.sparse_coo$"
    ):
        pool_meta_from_indices(sparse, 4)
