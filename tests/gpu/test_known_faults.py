"""What the first published kernels for this pooling got wrong, on the kernels of today."""

from __future__ import annotations

import pytest
import torch

import knnpool_gen
from formulas import NIN, TABLE, pooled, values
from knnpool_gen import pool_function, prepare
from knnpool_gen.runtime import launch
from known_faults import CHECKS
from tables import assert_same_bits

# Of torch's own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("name", CHECKS)
def test_known_fault(name: str) -> None:
    CHECKS[name]("cuda")


def test_first_call_of_a_kernel_inside_a_capture() -> None:
    knnpool_gen.clear_pool_cache()
    x, table = values(2, NIN).cuda(), TABLE.cuda()
    prepare(x[:1], table, "max")
    launch.forget_kernels()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pool_function(x, table, "max")
    graph.replay()
    assert_same_bits(y.cpu(), pooled(values(2, NIN), TABLE, "max"))


def test_nin_of_150000_gathers_nothing() -> None:
    """The slow way would hold all K values of every output at once."""
    table = torch.randint(0, 150_000, (64, 40_000), device="cuda")
    x = torch.randn(16, 150_000, device="cuda", requires_grad=True)
    pool_function(x, table, "max").sum().backward()
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    pool_function(x, table, "max").sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 64 * 40_000 * 16 * 4 / 8
