"""fovi's own layers on the kernels, against their formula and beside fovi's kernels."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("fovi") is None:
    pytest.skip("fovi is not installed", allow_module_level=True)

from fovi_layers import (
    MODES,
    check_a_layer,
    check_a_network,
    check_neighbours_that_are_all_nan,
    layer,
    trained,
    values,
)
from knnpool_gen.integrations import fovi

# Of CuPy, as fovi uses it.
pytestmark = pytest.mark.filterwarnings("ignore:ExternalStream:DeprecationWarning")

any_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fovi does without kernels of its own."""
    monkeypatch.setenv("FOVI_KNN_POOL_BACKEND", "baseline")


@pytest.mark.usefixtures("formula")
@any_mode
def test_a_network(mode: str) -> None:
    check_a_network(mode, "cuda")


@pytest.mark.usefixtures("formula")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@any_mode
def test_pads_and_nan(mode: str, dtype: torch.dtype) -> None:
    check_a_layer(mode, dtype, "cuda")


@pytest.mark.usefixtures("formula")
@any_mode
def test_neighbours_that_are_all_nan(mode: str) -> None:
    check_neighbours_that_are_all_nan(mode, "cuda")


@any_mode
def test_fovis_own_kernels_before_and_after(mode: str) -> None:
    """Whatever fovi keeps on a layer for its kernels is left as it was."""
    pool = layer(mode, "cuda")
    x = values("cuda", pool.knn_pad_token_val)
    before = trained(pool, x)
    backend = pool._last_knn_pool_backend
    with fovi.enabled():
        during = trained(pool, x)
        assert pool._last_knn_pool_backend == "knnpool_gen"
    after = trained(pool, x)
    assert pool._last_knn_pool_backend == backend
    torch.testing.assert_close(during, before)
    torch.testing.assert_close(after, before)  # the formula adds gradients in any order


@any_mode
def test_a_layer_captured(mode: str) -> None:
    pool = layer(mode, "cuda")
    x = values("cuda", pool.knn_pad_token_val).detach()
    with fovi.enabled():
        pool(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = pool(x)
        x.neg_()
        graph.replay()
        torch.testing.assert_close(y, pool(x), rtol=0, atol=0)
