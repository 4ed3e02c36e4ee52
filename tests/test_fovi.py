"""fovi's own layers, of the package itself, on these kernels."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fovi.arch import knn
from torch import Tensor, nn

from fovi_layers import (
    MODES,
    Network,
    check_a_layer,
    check_a_network,
    check_neighbours_that_are_all_nan,
    layer,
    trained,
    values,
)
from knnpool_gen import MissingDependencyError, OutOfReachError, UnsupportedTypeError
from knnpool_gen.integrations import fovi

OWN = knn.KNNPoolingLayer.forward

any_mode = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    fovi.disable()
    assert knn.KNNPoolingLayer.forward is OWN


def on_kernels(pool: Any) -> bool:
    """Whether ``pool`` uses them now."""
    pool(values("cpu", pool.knn_pad_token_val))
    return pool._last_knn_pool_backend == "knnpool_gen"


# The same results.


@any_mode
def test_a_network(mode: str) -> None:
    check_a_network(mode, "cpu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@any_mode
def test_pads_and_nan(mode: str, dtype: torch.dtype) -> None:
    check_a_layer(mode, dtype, "cpu")


@any_mode
def test_neighbours_that_are_all_nan(mode: str) -> None:
    check_neighbours_that_are_all_nan(mode, "cpu")


def test_the_gradient_of_neighbours_that_are_all_nan() -> None:
    """Where the layer's formula has none for anybody: it goes to the first, as that of any maximum of -inf."""
    pool = layer("max")
    x = values("cpu", pool.knn_pad_token_val).detach().fill_(torch.nan).requires_grad_()
    filled = pool._knn_output_valid_mask
    table = pool.knn_indices_pad_token[:, filled]
    first = table.gather(0, (table < x.shape[-1]).int().argmax(0, keepdim=True))[0]
    with fovi.enabled():
        (grad_x,) = torch.autograd.grad(pool(x)[..., filled].sum(), x)
    assert torch.equal(grad_x[0, 0], first.bincount(minlength=x.shape[-1]).float())


@any_mode
def test_compiled(mode: str) -> None:
    pool = layer(mode)
    x = values("cpu", pool.knn_pad_token_val)
    expected = trained(pool, x)
    with fovi.enabled():
        torch.testing.assert_close(trained(torch.compile(pool, fullgraph=True, backend="aot_eager"), x), expected)
    torch._dynamo.reset()


def test_called_by_name() -> None:
    pool = layer("max")
    x = values("cpu", pool.knn_pad_token_val)
    expected = pool(X_l=x)
    with fovi.enabled():
        torch.testing.assert_close(pool(X_l=x), expected)


@any_mode
def test_a_changed_table_is_noticed(mode: str) -> None:
    pool = layer(mode)
    x = values("cpu", pool.knn_pad_token_val)
    with fovi.enabled():
        first = pool(x)
    pool.knn_indices_pad_token[:, 3] = pool.knn_indices_pad_token[:, 20]
    expected = pool(x)
    with fovi.enabled():
        again = pool(x)
    torch.testing.assert_close(again, expected)
    assert not torch.equal(again, first)


# What is left to the layer.


def test_learnt_weights_are_left_to_the_layer() -> None:
    """Their gradient has no kernel, and must not be cut."""
    pool = layer("gaussian")
    pool.gaussian_weights = nn.Parameter(pool.gaussian_weights)
    x = values("cpu", pool.knn_pad_token_val)
    expected = trained(pool, x)
    with fovi.enabled():
        torch.testing.assert_close(trained(pool, x), expected)
        assert not on_kernels(pool)


def test_an_input_of_another_size_is_left_to_the_layer() -> None:
    """One node less, and pads would be looked for beyond the end; one more is what the layer lets pass."""
    pool = layer("sum")
    more = values("cpu", pool.knn_pad_token_val + 1)
    expected = pool(more)
    with fovi.enabled():
        torch.testing.assert_close(pool(more), expected)
        with pytest.raises(RuntimeError, match="out of bounds"):
            pool(values("cpu", pool.knn_pad_token_val - 1))


def test_a_size_out_of_reach_is_left_to_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> Tensor:
        raise OutOfReachError("no kernel")

    pool = layer("avg")
    x = values("cpu", pool.knn_pad_token_val)
    expected = pool(x)
    monkeypatch.setattr(fovi, "pool_function", refuse)
    with fovi.enabled():
        torch.testing.assert_close(pool(x), expected, rtol=0, atol=0)
        assert not on_kernels(pool)


def test_other_modes_are_left_to_the_layer() -> None:
    pool = layer("max")
    pool.mode = "median"
    with fovi.enabled(), pytest.raises(NotImplementedError, match="median"):
        pool(values("cpu", pool.knn_pad_token_val))


# On and off.


def test_on_and_off() -> None:
    pool = layer("max")
    assert not on_kernels(pool)
    fovi.enable()
    fovi.enable()
    assert on_kernels(pool)
    assert on_kernels(layer("avg"))  # also one that is made later
    fovi.disable()
    assert not on_kernels(pool)
    assert vars(knn.KNNPoolingLayer)["forward"] is OWN
    fovi.disable()
    assert not on_kernels(pool)


def test_blocks_within_blocks() -> None:
    pool = layer("max")
    with fovi.enabled():
        with fovi.enabled():
            assert on_kernels(pool)
        assert on_kernels(pool)
        fovi.disable()  # of a switch that is off
        assert on_kernels(pool)
    assert not on_kernels(pool)


def test_a_block_within_the_switch() -> None:
    pool = layer("max")
    fovi.enable()
    with fovi.enabled():
        assert on_kernels(pool)
    assert on_kernels(pool)
    fovi.disable()
    assert not on_kernels(pool)


def test_a_block_that_fails() -> None:
    with pytest.raises(ZeroDivisionError), fovi.enabled():
        raise ZeroDivisionError
    assert knn.KNNPoolingLayer.forward is OWN


def test_blocks_of_many_threads() -> None:
    pool = layer("max")
    used: list[bool] = []

    def call() -> None:
        for _ in range(20):
            with fovi.enabled():
                used.append(knn.KNNPoolingLayer.forward is not OWN)
                pool(values("cpu", pool.knn_pad_token_val))

    threads = [threading.Thread(target=call) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used == [True] * 120


class Doubled(knn.KNNPoolingLayer):
    def forward(self, X_l: Tensor) -> Tensor:  # noqa: N803
        return 2 * super().forward(X_l)


def test_a_subclass_with_a_forward_of_its_own() -> None:
    pool = layer("avg")
    x = values("cpu", pool.knn_pad_token_val)
    doubled = copy.deepcopy(pool)
    doubled.__class__ = Doubled
    with fovi.enabled():
        torch.testing.assert_close(doubled(x), 2 * pool(x))
        assert on_kernels(doubled)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
@any_mode
def test_copies_and_checkpoints_do_not_know(made: Callable[[Any], Any], mode: str) -> None:
    model = Network(mode)
    x = values("cpu", model[1].knn_pad_token_val, torch.float64)
    state = model.state_dict().keys()
    kept = {name for name in vars(model[1]) if name != "_last_knn_pool_backend"}
    with fovi.enabled():
        expected = model(x)
        again = made(model)
        torch.testing.assert_close(again(x), expected)
    assert model.state_dict().keys() == state
    assert {name for name in vars(model[1]) if name != "_last_knn_pool_backend"} == kept
    torch.testing.assert_close(again(x), expected)


# Without fovi, or with another one.


def test_without_fovi() -> None:
    code = (
        "import sys; sys.modules['fovi'] = None\n"
        "from knnpool_gen import MissingDependencyError\n"
        "from knnpool_gen.integrations import fovi\n"
        "try: fovi.enable()\n"
        "except MissingDependencyError as error: print(error)\n"
        "fovi.disable()"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert printed.startswith("fovi cannot be imported (")
    assert printed.endswith("): pip install fovi==2.4.0\n")


def test_a_fovi_that_lacks_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named with what is missing; nothing is left half done."""
    monkeypatch.setitem(sys.modules, "fovi.arch.knn", None)
    with pytest.raises(MissingDependencyError, match=r"fovi\.arch\.knn"), fovi.enabled():
        pass
    monkeypatch.undo()
    assert not fovi._reasons
    with fovi.enabled():
        assert on_kernels(layer("max"))


def test_a_fovi_without_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(knn, "KNNPoolingLayer")
    with pytest.raises(UnsupportedTypeError, match="no layer KNNPoolingLayer"):
        fovi.enable()


class Later(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask


def test_a_fovi_with_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "KNNPoolingLayer", Later)
    with pytest.raises(UnsupportedTypeError, match=r"forward\(self, x, mask\), is not that of fovi 2\.4\.0"):
        fovi.enable()
