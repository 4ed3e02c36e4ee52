"""What the first published kernels for this pooling got wrong, each as a check that runs on any device."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import knnpool_gen
from formulas import FILLED, NIN, TABLE, pooled, values
from knnpool_gen import optimized_pool_forward, pool_function
from tables import assert_same_bits

CHECKS: dict[str, Callable[[str], None]] = {}


def fault(check: Callable[[str], None]) -> Callable[[str], None]:
    CHECKS[check.__name__] = check
    return check


def compare(device: str, x: Tensor, table: Tensor, mode: str, **options: Any) -> Tensor:
    """Pool on the device, compare with the formula; the pooled values."""
    y = pool_function(x.to(device), table.to(device), mode, **options)
    torch.testing.assert_close(y.cpu(), pooled(x, table, mode, **options), equal_nan=True)
    return y


class Layer(nn.Module):
    """What fovi's layer shows of itself."""

    def __init__(self, mode: str = "max") -> None:
        super().__init__()
        self.mode, self.knn_pad_token_val = mode, NIN
        self.register_buffer("knn_indices_pad_token", TABLE.clone())

    def forward(self, x: Tensor) -> Tensor:
        y = optimized_pool_forward(self, x)
        assert y is not None
        return y


@fault
def first_backward_with_a_nan_or_inf_gradient(device: str) -> None:
    knnpool_gen.clear_pool_cache()
    grad_y = torch.tensor([[torch.nan, 1.0, torch.inf, 2.0]], dtype=torch.float16, device=device)
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0]], dtype=torch.float16, device=device, requires_grad=True)
    pool_function(x, TABLE, "max").backward(grad_y)
    assert x.grad is not None
    # The winners of columns 0, 2 and 3 are the nodes 4, 3 and 3; the column without a node has a gradient for nobody.
    assert_same_bits(x.grad.cpu(), torch.tensor([[0.0, 0.0, 0.0, torch.inf, torch.nan]], dtype=torch.float16))


@fault
def first_step_of_a_gradient_scaler(device: str) -> None:
    """A scale so large that the first gradient overflows: the step is to be skipped, the scale to be halved."""
    knnpool_gen.clear_pool_cache()
    layer = nn.Linear(NIN, NIN, device=device)
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**127)
    loss = pool_function(layer(torch.ones(3, NIN, device=device)) * 100, TABLE, "max")[:, FILLED].sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_bits(layer.weight.detach(), before)
    assert scaler.get_scale() == 2.0**126


@fault
def first_avg_with_a_nan(device: str) -> None:
    knnpool_gen.clear_pool_cache()
    x = torch.tensor([[1.0, torch.nan, 3.0, 4.0, 5.0]])
    y = compare(device, x, TABLE, "avg")
    assert y.isnan().tolist() == [[True, True, False, False]]


@fault
def compile_in_one_graph(device: str) -> None:
    layer = Layer().to(device)
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(values(2, NIN).to(device))
    torch._dynamo.reset()
    assert_same_bits(y.cpu(), pooled(values(2, NIN), TABLE, "max"))


@fault
def export(device: str) -> None:
    layer = Layer().to(device)
    x = values(2, NIN).to(device)
    for strict in (True, False):
        module = torch.export.export(layer, (x,), strict=strict).module()
        assert_same_bits(module(x).cpu(), pooled(x.cpu(), TABLE, "max"))


@fault
def vmap(device: str) -> None:
    x = values(3, 2, NIN)
    y = torch.func.vmap(Layer().to(device), in_dims=1)(x.to(device))
    assert_same_bits(y.cpu(), pooled(x.transpose(0, 1), TABLE, "max"))


@fault
def double_backward(device: str) -> None:
    results = []
    for function, where in ((pool_function, device), (pooled, "cpu")):
        x = values(2, NIN).to(where).requires_grad_()
        (grad,) = torch.autograd.grad((function(x, TABLE, "max")[:, FILLED] ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad**2).sum(), x)
        results.append(second.cpu())
    torch.testing.assert_close(*results)


@fault
def a_pickled_layer_loaded_elsewhere(device: str) -> None:
    layer = Layer()
    layer(values(2, NIN))  # the plan it keeps lies on the CPU
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, map_location=device, weights_only=False)
    y = loaded(values(2, NIN).to(device))
    assert y.device.type == device
    assert_same_bits(y.cpu(), pooled(values(2, NIN), TABLE, "max"))


@fault
def a_table_changed_in_place(device: str) -> None:
    layer = Layer().to(device)
    for entry in (0, 3, 9):
        layer.knn_indices_pad_token[0, 0] = entry
        y = layer(values(2, NIN).to(device))
        expected = pooled(values(2, NIN), layer.knn_indices_pad_token.cpu(), "max")
        assert_same_bits(y.cpu(), expected)
        assert_same_bits(pool_function(values(2, NIN).to(device), layer.knn_indices_pad_token, "max"), y)


@fault
def k_of_256(device: str) -> None:
    table = torch.randint(0, 300, (256, 7), generator=torch.Generator().manual_seed(0))
    x = values(2, 300).to(device).requires_grad_()
    y = pool_function(x, table.to(device), "max")
    assert_same_bits(y.detach().cpu(), pooled(x.detach().cpu(), table, "max"))
    (grad,) = torch.autograd.grad(y.sum(), x)
    leaf = values(2, 300).requires_grad_()
    (expected,) = torch.autograd.grad(pooled(leaf, table, "max").sum(), leaf)
    torch.testing.assert_close(grad.cpu(), expected)


@fault
def nin_of_150000(device: str) -> None:
    table = torch.randint(0, 150_000, (9, 1000), generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 150_000, generator=torch.Generator().manual_seed(1))
    compare(device, x, table, "max")
    leaf = x.to(device).requires_grad_()
    (grad,) = torch.autograd.grad(pool_function(leaf, table, "avg").sum(), leaf)
    reads = torch.bincount(table.flatten(), minlength=150_000)
    torch.testing.assert_close(grad.cpu(), (reads / 9).expand(2, -1).float())


@fault
def the_mode_sum(device: str) -> None:
    compare(device, values(2, NIN, dtype=torch.float32), TABLE, "sum")


@fault
def float64(device: str) -> None:
    x = torch.tensor([[1.0, 1.0 + 2**-52, 1.0 - 2**-53, 0.0, 0.5]], dtype=torch.float64)
    y = compare(device, x, torch.tensor([[0, 2], [1, 0]]), "max")
    assert y.dtype == torch.float64
    assert y.tolist() == [[1.0 + 2**-52, 1.0]]


@fault
def denormals_of_float32(device: str) -> None:
    tiny = 2.0**-140
    x = torch.tensor([[0.0, tiny, 3 * tiny, -tiny, 0.0]])
    table = torch.tensor([[0, 1, 3], [1, 2, 9]])
    for mode, expected in (("max", [1, 3, -1]), ("sum", [1, 4, -1]), ("avg", [0.5, 2, -1])):
        y = pool_function(x.to(device), table.to(device), mode)
        assert [value / tiny for value in y[0].tolist()] == expected
