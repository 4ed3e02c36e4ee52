"""Every variant of the dispatch table, run on the CPU from its generated source, bit for bit.

The matrix is the dispatch table itself: a variant added to the specs is tested without a line here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from knnpool_gen.emulator import Sanitizer
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import KernelKey
from knnpool_gen.reference import reference_backward
from knnpool_gen.runtime.aux_layout import AuxLayout, unblock_aux
from knnpool_gen.verification import calls, verify_kernel
from knnpool_gen.verification.emulated import EmulatedBackend
from knnpool_gen.verification.tables import Table, small_tables
from knnpool_gen.vocabulary import Direction, Mode, Staging
from tables import real_tables, wide_tables


def is_max_backward(key: KernelKey) -> bool:
    return key.mode is Mode.MAX and key.direction is Direction.BACKWARD


def by_name(key: KernelKey) -> str:
    return KERNELS[key].name


def sanitized(all_variants: bool) -> list[KernelKey]:
    """All variants, or of every mode and dtype those that take every path of the templates."""
    return list(KERNELS) if all_variants else short_and_tall()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "sanitized_key" in metafunc.fixturenames:
        keys = sanitized(metafunc.config.getoption("--all-sanitized"))
        metafunc.parametrize("sanitized_key", keys, ids=by_name)


@pytest.mark.parametrize("key", KERNELS, ids=by_name)
def test_equals_the_reference_on_small_tables(key: KernelKey) -> None:
    verdict = verify_kernel(key, KERNELS[key], EmulatedBackend(Sanitizer.NONE))

    assert verdict.faults == ()
    assert verdict.cases >= 3 * len(small_tables())


def short_and_tall() -> list[KernelKey]:
    """Of every mode and dtype the variant of the fewest rows and that of the most."""
    heights: dict[tuple[object, ...], list[int]] = {}
    for key in KERNELS:
        heights.setdefault(key[:4], []).append(key.rows)
    return [key for key in KERNELS if key.rows in (min(heights[key[:4]]), max(heights[key[:4]]))]


@pytest.mark.parametrize("key", short_and_tall(), ids=by_name)
def test_equals_the_reference_on_both_sides_of_every_width(key: KernelKey) -> None:
    itemsize = getattr(torch, key.dtype).itemsize
    fitting = [
        table for table in wide_tables() if key.staging is Staging.DIRECT or table.nin * key.rows * itemsize < 200_000
    ]

    verdict = verify_kernel(
        key, KERNELS[key], EmulatedBackend(Sanitizer.NONE), list(calls(key, fitting, rows=[key.rows + 1]))
    )

    assert verdict.faults == ()
    assert verdict.cases >= 7


@pytest.mark.parametrize("key", KERNELS, ids=by_name)
def test_equals_the_reference_on_real_tables(key: KernelKey) -> None:
    itemsize = getattr(torch, key.dtype).itemsize
    fitting = [table for table in real_tables() if table.nin * key.rows * itemsize < 200_000]

    verdict = verify_kernel(
        key, KERNELS[key], EmulatedBackend(Sanitizer.NONE), list(calls(key, fitting, rows=[key.rows + 1]))
    )

    assert verdict.faults == ()
    assert verdict.cases >= 5


def test_wide_entries_stay_aligned_where_the_rest_is_not() -> None:
    """Of 8 bytes from K = 257 on, where other tables and values are 4 bytes off the alignment of vectors."""
    key = KernelKey(Direction.BACKWARD, Mode.SUM, "float16", Staging.SHARED, 4)
    table = Table("k257", torch.arange(257)[:, None] % 5, 5)
    given = [replace(call, misaligned=True) for call in calls(key, [table], rows=[5])]

    verdict = verify_kernel(key, KERNELS[key], EmulatedBackend(Sanitizer.ADDRESS), given)

    assert verdict.faults == ()
    assert verdict.cases >= 1


@pytest.mark.parametrize("stack", [4, 32])
@pytest.mark.parametrize("key", [key for key in KERNELS if key.staging is Staging.SHARED], ids=by_name)
def test_equals_the_reference_in_tall_stacks(key: KernelKey, stack: int) -> None:
    """Few columns, as in global pooling: threads work on one node of many groups of rows."""
    given = list(calls(key, _few_columns(), rows=[stack * key.rows + 5]))

    verdict = verify_kernel(key, KERNELS[key], EmulatedBackend(Sanitizer.ADDRESS, stack), given)

    assert verdict.faults == ()
    assert verdict.cases >= 3


@pytest.mark.parametrize("sanitizer", [Sanitizer.ADDRESS, Sanitizer.THREAD], ids=lambda sanitizer: sanitizer.value)
def test_is_clean_under_sanitizers(sanitized_key: KernelKey, sanitizer: Sanitizer) -> None:
    given = list(calls(sanitized_key, _small_but_varied(), rows=[2 * sanitized_key.rows + 1]))

    verdict = verify_kernel(sanitized_key, KERNELS[sanitized_key], EmulatedBackend(sanitizer), given)

    assert verdict.faults == ()


@pytest.mark.parametrize("key", [key for key in short_and_tall() if is_max_backward(key)], ids=by_name)
def test_a_slot_that_holds_nothing_gives_no_gradient(key: KernelKey) -> None:
    """Of every other output the slot is one that the table does not have: as if its gradient were zero."""
    given = []
    for call in calls(key, _small_but_varied()):
        odd = torch.arange(call.meta.nout) % 2 == 1
        grad_y, aux = call.inputs["grad_y"], call.inputs["aux"]
        blocks = call.layout is AuxLayout.BLOCKS
        slots = unblock_aux(aux, grad_y.shape) if blocks else aux
        grad_x = reference_backward(call.meta, grad_y.masked_fill(odd, 0), slots, call.reduction)
        forged = aux.masked_fill(odd[:, None] if blocks else odd, 254)
        given.append(replace(call, inputs={"grad_y": grad_y, "aux": forged}, expected={"grad_x": grad_x}))

    verdict = verify_kernel(key, KERNELS[key], EmulatedBackend(Sanitizer.ADDRESS), given)

    assert verdict.faults == ()
    assert verdict.cases > 20


def _few_columns() -> list[Table]:
    """One column that nodes of every place are read for, three with pads, and one of few slots."""
    generator = torch.Generator().manual_seed(0)
    padded = torch.randint(0, 100, (40, 3), generator=generator)
    return [
        Table("one_column", torch.randperm(97, generator=generator)[:, None], 97),
        Table("three_columns", torch.where(padded < 60, padded, 60), 60),
        Table("few_slots", torch.tensor([[4], [0], [16], [2]]), 16),
    ]


def _small_but_varied() -> list[Table]:
    wanted = {"plain", "pads", "empty_columns", "k1", "k0", "nin1", "nout1", "hub", "odd_sizes", "identity", "k33"}
    return [table for table in small_tables() if table.name in wanted]
