"""What a layer meets when models are trained, each as a check that runs on any device."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import knnpool_gen
from formulas import pooled
from knnpool_gen import KNNPool, pooling
from tables import assert_same_bits

CHECKS: dict[str, Callable[[str], None]] = {}

SIZES = (40, 20, 8)
"""Nodes of the input and after each of the two poolings of :func:`network`."""


def check(function: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[function.__name__] = function
    return function


class Formula(nn.Module):
    """What stands in for :class:`KNNPool`: a gather and a reduction in plain torch."""

    def __init__(self, indices: Tensor, nin: int, mode: str, **options: Any) -> None:
        super().__init__()
        self.register_buffer("indices", indices)
        self.mode, self.options = mode, options

    def forward(self, x: Tensor) -> Tensor:
        return pooled(x, self.indices, self.mode, **self.options)


def table(nin: int, nout: int) -> Tensor:
    """Five neighbours, some of them pads, the first of them real."""
    indices = torch.randint(0, nin + nin // 4, (5, nout), generator=torch.Generator().manual_seed(nin))
    indices[0] %= nin
    return indices


def network(pool: type[nn.Module], device: str = "cpu") -> nn.Sequential:
    """Two poolings among layers that learn, on ``[B, 3, SIZES[0]]``; in float64, where the formula is exact enough."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Conv1d(3, 4, 1),
            pool(table(SIZES[0], SIZES[1]), SIZES[0], "max"),
            nn.GELU(),
            nn.Conv1d(4, 4, 1),
            pool(table(SIZES[1], SIZES[2]), SIZES[1], "avg"),
            nn.Flatten(),
            nn.Linear(4 * SIZES[2], 2),
        )
    return layers.double().to(device)


def batch(device: str = "cpu", size: int = 6) -> Tensor:
    x = torch.randn(size, 3, SIZES[0], dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return x.to(device).requires_grad_()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [tensor.grad for tensor in (*model.parameters(), x) if tensor.grad is not None]


def expected(device: str, size: int = 6) -> list[Tensor]:
    """The gradients of one step, by the formula."""
    model, x = network(Formula, device), batch(device, size)
    loss(model(x)).backward()
    return gradients(model, x)


def loss(y: Tensor) -> Tensor:
    return y.square().sum()


def assert_as_expected(device: str, model: nn.Module, x: Tensor) -> None:
    torch.testing.assert_close(gradients(model, x), expected(device, len(x)))


@check
def a_step(device: str) -> None:
    model, x = network(KNNPool, device), batch(device)
    torch.testing.assert_close(model(x), network(Formula, device)(x))
    loss(model(x)).backward()
    assert_as_expected(device, model, x)


@check
def autocast_leaves_the_dtype_alone(device: str) -> None:
    pool = KNNPool(table(40, 20), 40, "avg").to(device)
    with torch.autocast(device, torch.bfloat16):
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = torch.ones(2, 40, dtype=dtype, device=device, requires_grad=True)
            y = pool(x)
            y.sum().backward()
            assert x.grad is not None
            assert y.dtype == x.grad.dtype == dtype
        model = network(KNNPool, device).float()
        inner = model[:2](batch(device).float())
        assert inner.dtype == torch.bfloat16  # that of the convolution before it
        loss(model(batch(device).float())).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@check
def the_first_step_of_a_gradient_scaler(device: str) -> None:
    """Its scale is too large on purpose: gradients are inf, the step is skipped, a smaller scale is tried."""
    knnpool_gen.clear_pool_cache()
    model = network(KNNPool, device).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127, backoff_factor=2.0**-120)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for step in range(2):
        optimizer.zero_grad()
        scaler.scale(1e6 * loss(model(batch(device).float()))).backward()
        finite = all(grad.isfinite().all() for grad in gradients(model, batch(device)))
        assert finite == (step == 1)
        scaler.step(optimizer)
        scaler.update()
        changed = any(not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        assert changed == (step == 1)


@check
def gradient_checkpointing(device: str) -> None:
    for use_reentrant in (True, False):
        model, x = network(KNNPool, device), batch(device)
        loss(checkpoint(model, x, use_reentrant=use_reentrant)).backward()
        assert_as_expected(device, model, x)


@check
def accumulated_gradients(device: str) -> None:
    model, x = network(KNNPool, device), batch(device)
    for part in x.split(2):
        loss(model(part)).backward()
    assert_as_expected(device, model, x)


@check
def hooks_of_tensors_and_modules(device: str) -> None:
    model, x = network(KNNPool, device), batch(device)
    seen: dict[str, Tensor] = {}
    model[1].register_full_backward_hook(lambda module, grad_x, grad_y: seen.update(x=grad_x[0], y=grad_y[0]))
    inner = model[0](x)
    inner.register_hook(lambda grad: seen.update(tensor=grad))
    outer = model[1](inner)
    outer.retain_grad()
    outer.register_hook(lambda grad: grad * 2)
    loss(model[2:](outer)).backward()
    assert outer.grad is not None
    assert_same_bits(seen["y"], outer.grad)
    assert_same_bits(seen["x"], seen["tensor"])
    doubled = [grad * 2 if i < 2 or i == 6 else grad for i, grad in enumerate(expected(device))]
    torch.testing.assert_close(gradients(model, x), doubled)


@check
def expanded_and_permuted_gradients(device: str) -> None:
    """A sum hands back one number, expanded; a permutation hands back what is not contiguous."""
    indices = table(40, 20).to(device)
    weight = torch.randn(20, 6, 3, dtype=torch.float64, device=device, generator=torch.Generator(device).manual_seed(1))
    uses: list[Callable[[Tensor], Tensor]] = [
        lambda y: y.sum(),
        lambda y: y.mean(0).sum(),
        lambda y: (y.permute(2, 0, 1) * weight).sum(),
        lambda y: (y[:, ::2, 1::3] ** 2).sum(),
        lambda y: y[0].expand(5, 3, 20).cumsum(0).sum(),
    ]
    for mode in ("max", "avg", "sum"):
        pool = KNNPool(indices, 40, mode).to(device)
        for use in uses:
            x = batch(device)
            actual = torch.autograd.grad(use(pool(x)), x)
            torch.testing.assert_close(actual, torch.autograd.grad(use(pooled(x, indices, mode)), x))


@check
def inference_between_steps(device: str) -> None:
    """What is built in inference mode serves training, and the other way round."""
    knnpool_gen.clear_pool_cache()
    model, x = network(KNNPool, device), batch(device)
    with torch.inference_mode():
        y = model(x)
        assert y.is_inference()
        assert model(x.clone()).grad_fn is None
    loss(model(x)).backward()
    assert_as_expected(device, model, x)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), y)


@contextmanager
def forwards() -> Iterator[list[bool]]:
    """For each pooling inside: whether the winning slots were asked for."""
    asked: list[bool] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(meta: Any, x: Tensor, reduction: Any, need_aux: bool, *others: Any) -> Any:
            asked.append(need_aux)
            return function(meta, x, reduction, need_aux, *others)

        return run

    with (
        mock.patch.object(pooling, "reference_forward", counted(pooling.reference_forward)),
        mock.patch.object(pooling.execute, "forward", counted(pooling.execute.forward)),
    ):
        yield asked


@check
def no_winners_without_gradients(device: str) -> None:
    """The winning slots are a byte an output that only a backward reads."""
    pool = KNNPool(table(40, 20), 40, "max").to(device)
    x = batch(device)
    with forwards() as asked:
        pool(x.detach())
        with torch.no_grad():
            pool(x)
        with torch.inference_mode():
            pool(x)
        assert asked == [False] * 3
        pool(x)
        assert asked[3:] == [True]


@check
def what_is_kept_for_backward(device: str) -> None:
    """For max a byte an output, for avg and sum nothing, for ``nan="omit"`` the input itself."""
    x = batch(device)
    for mode, nan, kept in (
        ("max", None, torch.uint8),
        ("avg", None, None),
        ("sum", None, None),
        ("avg", "omit", x.dtype),
    ):
        packed: list[Tensor] = []

        def keep(tensor: Tensor, packed: list[Tensor] = packed) -> Tensor:
            packed.append(tensor)
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            KNNPool(table(40, 20), 40, mode, nan=nan).to(device)(x)
        assert [tensor.dtype for tensor in packed] == ([] if kept is None else [kept])
        assert all(tensor.data_ptr() == x.data_ptr() for tensor in packed if nan == "omit")


@check
def saved_on_the_cpu(device: str) -> None:
    model, x = network(KNNPool, device), batch(device)
    with save_on_cpu(pin_memory=device != "cpu"):
        y = loss(model(x))
    y.backward()
    assert_as_expected(device, model, x)


@check
def deterministic_algorithms(device: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for return_indices in (False, True):
            pool = KNNPool(table(40, 20), 40, "max", return_indices=return_indices).to(device)
            x = batch(device)
            y = pool(x)[0] if return_indices else pool(x)
            y.sum().backward()
            assert x.grad is not None
            assert x.grad.sum() == y.numel()
    finally:
        torch.use_deterministic_algorithms(False)


@check
def threads_that_call_at_once(device: str) -> None:
    """Nothing is built when they begin."""
    knnpool_gen.clear_pool_cache()
    model = network(KNNPool, device)
    count, turns = 8, 5
    start = threading.Barrier(count)
    results: list[list[Tensor]] = []

    def train() -> None:
        x = batch(device)
        start.wait()
        for _ in range(turns):
            (grad,) = torch.autograd.grad(loss(model(x)), x)
            results.append([grad])

    threads = [threading.Thread(target=train) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == count * turns
    for result in results:
        torch.testing.assert_close(result, expected(device)[-1:])


@check
def a_layer_loaded_elsewhere(device: str) -> None:
    """Pickled with its plan built on the CPU, loaded on the device; and back."""
    pool = KNNPool(table(40, 20), 40, "weighted", weights=torch.rand(5, 20, generator=torch.Generator().manual_seed(0)))
    x = batch().detach()
    y = pool(x)
    for place in (device, "cpu"):
        file = io.BytesIO()
        torch.save(pool, file)
        file.seek(0)
        pool = torch.load(file, map_location=place, weights_only=False)
        assert pool.indices.device.type == pool.weights.device.type == torch.device(place).type
        assert_same_bits(pool(x.to(place)).cpu(), y)


@check
def a_layer_that_moves(device: str) -> None:
    pool = KNNPool(table(40, 20), 40, "max", return_indices=True)
    x = batch().detach()
    y, nodes = pool(x)
    # Also before it is moved: the table stays where it is, the values come from elsewhere.
    for moved in (pool, pool.to(device), pool.half(), pool.double()):
        there_y, there_nodes = moved(x.to(device))
        assert_same_bits(there_y.cpu(), y)
        assert torch.equal(there_nodes.cpu(), nodes)
        assert there_nodes.device == there_y.device


@check
def a_table_changed_between_forward_and_backward(device: str) -> None:
    """The gradient is that of the forward that was; the next forward reads the new table."""
    indices = table(40, 20)
    for mode in ("max", "avg"):
        pool = KNNPool(indices, 40, mode).to(device)
        x = batch(device)
        y = pool(x)
        pool.indices.copy_(indices.flip(1))
        actual = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(actual, torch.autograd.grad(pooled(x, indices.to(device), mode).sum(), x))
        torch.testing.assert_close(pool(x), pooled(x, indices.flip(1).to(device), mode))
