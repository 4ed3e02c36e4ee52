"""What a CUDA graph capture may find missing, and how tables are built; without a device, which tests/gpu has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from formulas import NIN, TABLE, any_case, options, pooled, values
from knnpool_gen import CaptureError, InvalidArgumentError, KNNPoolError, optimized_pool_forward, pool_function, prepare
from knnpool_gen.runtime import capture, plan, weights
from tables import assert_same_bits


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A context in which a stream counts as captured."""

    @contextmanager
    def inside() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(capture, "capturing", lambda: True)
            yield

    return inside


@any_case
def test_what_was_prepared_can_be_captured(captured: Any, mode: str, nan: str, normalize: bool) -> None:
    chosen, table = options(mode, nan, normalize), TABLE.clone()
    x = values(2, NIN).requires_grad_()
    with captured(), pytest.raises(CaptureError, match=r"call prepare\(x, indices, mode\) before the capture"):
        pool_function(x, table, mode, **chosen)
    prepare(x, table, mode, **chosen)
    with captured():
        y = pool_function(x, table, mode, **chosen)
        y.nansum().backward()
    torch.testing.assert_close(y, pooled(x, table, mode, **chosen), equal_nan=True)
    assert x.grad is not None


def test_weights_have_to_be_prepared_too(captured: Any) -> None:
    table, chosen = TABLE.clone(), options("weighted")
    x = values(2, NIN)
    prepare(x, table, "max")
    with captured():
        pool_function(x, table, "max")
        with pytest.raises(CaptureError):
            pool_function(x, table, "weighted", **chosen)
    prepare(x, table, "weighted", **chosen)
    chosen["weights"][0, 0] += 1
    with captured(), pytest.raises(CaptureError):
        pool_function(x, table, "weighted", **chosen)


def test_a_table_changed_since_is_not_taken_for_the_old_one(captured: Any) -> None:
    table, x = TABLE.clone(), values(2, NIN)
    prepare(x, table, "max")
    table[0, 0] = 3
    with captured(), pytest.raises(CaptureError):
        pool_function(x, table, "max")
    assert_same_bits(pool_function(x, table, "max"), pooled(x, table, "max"))


def test_layers_have_to_be_called_before(captured: Any) -> None:
    layer: Any = torch.nn.Module()
    layer.mode, layer.knn_pad_token_val, layer.knn_indices_pad_token = "max", NIN, TABLE.clone()
    x = values(2, NIN)
    with captured(), pytest.raises(CaptureError):
        optimized_pool_forward(layer, x)
    optimized_pool_forward(layer, x)
    with captured():
        y = optimized_pool_forward(layer, x)
    assert y is not None
    assert_same_bits(y, pooled(x, TABLE, "max"))


def test_prepare_inside_a_capture(captured: Any) -> None:
    with captured(), pytest.raises(CaptureError, match="prepare waits for the device"):
        prepare(values(2, NIN), TABLE, "max")


def test_prepare_looks_at_no_value_and_keeps_none() -> None:
    x = torch.full((2, NIN), torch.nan, requires_grad=True)
    with torch.inference_mode():
        prepare(x, TABLE, "max")
        prepare(torch.ones(2, NIN), TABLE, "max")
    with torch.no_grad():
        prepare(x, TABLE, "max")
    assert x.grad is None


def test_prepare_says_what_is_wrong() -> None:
    with pytest.raises(InvalidArgumentError, match="mode = 'median'"):
        prepare(values(2, NIN), TABLE, "median")


def test_the_error_is_of_the_usual_kinds() -> None:
    assert issubclass(CaptureError, RuntimeError)
    assert issubclass(CaptureError, KNNPoolError)


def test_a_table_of_inference_mode(captured: Any) -> None:
    """Its contents are compared at every call, which only a table on a CPU allows inside a capture."""
    with torch.inference_mode():
        table = TABLE.clone()
    prepare(values(2, NIN), table, "max")
    with captured():
        assert pool_function(values(2, NIN), table, "max").shape == (2, 4)


# How tables are built.


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("a plan is nobody else's business")


def test_plans_are_built_where_nobody_looks() -> None:
    ones = torch.ones(3, 4)
    with Watch():
        built = plan.pool_meta_from_indices(TABLE, NIN)
        weights.prepare_weights(built, ones, torch.float32)
    with torch.inference_mode():
        built = plan.pool_meta_from_indices(TABLE, NIN)
        derived = weights.prepare_weights(built, ones, torch.float32)
    assert not any(tensor.is_inference() for tensor in (built.indices, built.rev_kn, built.first_slot, derived.weights))


def test_building_takes_another_thread_and_brings_its_errors_back() -> None:
    threads = []

    @capture.built_apart
    def build(number: int, *, fails: bool = False) -> int:
        """Documented."""
        threads.append(threading.get_ident())
        if fails:
            raise InvalidArgumentError("no")
        return number

    assert build(7) == 7
    with pytest.raises(InvalidArgumentError, match="no"):
        build(7, fails=True)
    assert threading.get_ident() not in threads
    assert (build.__name__, build.__doc__) == ("build", "Documented.")


def test_asking_starts_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("CUDA would start"))
    assert not capture.capturing()
