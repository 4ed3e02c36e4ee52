"""torch.compile, torch.export and friends: one graph without a break, and the values of eager."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from formulas import FILLED, NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import optimized_pool_forward, pool_function
from knnpool_gen.runtime import plan
from tables import DTYPES, assert_same_bits

# What torch warns of here is its own code.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Tables whose plan was built."""
    tables: list[Any] = []
    build = plan.pool_meta_from_indices
    monkeypatch.setattr(plan, "pool_meta_from_indices", lambda *args: tables.append(args[0]) or build(*args))
    return tables


class Pool(nn.Module):
    """A table in a buffer, behind something to learn; ``pool`` is pooling or its formula."""

    def __init__(self, mode: str, pool: Callable[..., Tensor] = pool_function, **chosen: Any) -> None:
        super().__init__()
        self.mode, self.pool = mode, pool
        self.scale = nn.Parameter(values(NIN) + 3)
        self.register_buffer("indices", TABLE.clone())
        self.register_buffer("weights", chosen.pop("weights", None))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(x * self.scale, self.indices, self.mode, weights=self.weights, **self.chosen)
        return y[..., FILLED] * 2


def trained(module: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """Output and gradients of one step."""
    x = x.clone().requires_grad_()
    y = module(x)
    parameters = [*module.parameters()] if isinstance(module, nn.Module) else []
    return [y.detach(), *torch.autograd.grad((y**2).sum(), [x, *parameters])]


def compiled(function: Callable[..., Any], dynamic: bool | None = None, backend: str = "aot_eager") -> Any:
    return torch.compile(function, fullgraph=True, dynamic=dynamic, backend=backend)


@any_case
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_module_learns(mode: str, nan: str, normalize: bool, dynamic: bool | None, built: list[Any]) -> None:
    chosen = options(mode, nan, normalize)
    module, formula = Pool(mode, **chosen), Pool(mode, pooled, **chosen)
    fast = compiled(module, dynamic)
    for batch in (2, 2, 4, 6):
        x = values(batch, 3, NIN)
        torch.testing.assert_close(trained(fast, x), trained(formula, x), rtol=1e-12, atol=1e-12)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), formula(x), rtol=1e-12, atol=1e-12)
    assert len(built) == 1


@any_mode
def test_a_compiled_function_with_a_table_as_argument(mode: str) -> None:
    chosen = options(mode)

    def function(x: Tensor, table: Tensor) -> Tensor:
        return pool_function(x.sin(), table, mode, **chosen)

    fast = compiled(function, dynamic=True)
    for table in (TABLE, TABLE.flip(1), TABLE.clone()):
        expected = pooled(values(2, NIN).sin(), table, mode, **chosen)
        torch.testing.assert_close(fast(values(2, NIN), table), expected, rtol=1e-12, atol=1e-12, equal_nan=True)


def test_tables_of_other_sizes_share_a_graph() -> None:
    seen = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    fast = torch.compile(lambda x, t: pool_function(x, t, "avg"), fullgraph=True, dynamic=True, backend=backend)
    for k, nout, nin in ((2, 5, 7), (3, 9, 11), (4, 6, 8)):
        table = torch.arange(k * nout).reshape(k, nout) % nin
        x = values(3, nin)
        torch.testing.assert_close(fast(x, table), pooled(x, table, "avg"))
    assert len(seen) == 1


@pytest.mark.skipif(" " in torch.__file__, reason="inductor does not quote the path of torch when it links")
def test_inductor(built: list[Any]) -> None:
    module, formula = Pool("max"), Pool("max", pooled)
    fast = compiled(module, backend="inductor")
    for _ in range(3):
        torch.testing.assert_close(trained(fast, values(2, 3, NIN)), trained(formula, values(2, 3, NIN)))
    assert len(built) == 1


def test_a_table_changed_in_place_is_noticed() -> None:
    module, formula = Pool("max"), Pool("max", pooled)
    fast = compiled(module)
    for entry in (0, 3, 1):
        module.indices[0, 0] = formula.indices[0, 0] = entry
        torch.testing.assert_close(trained(fast, values(2, NIN)), trained(formula, values(2, NIN)))


def test_a_table_that_is_a_view(built: list[Any]) -> None:
    """What is saved of it for the backward is another tensor at every step."""
    module, formula = Pool("max"), Pool("max", pooled)
    module.indices = TABLE.t().contiguous().t()
    fast = compiled(module)
    for _ in range(3):
        torch.testing.assert_close(trained(fast, values(2, NIN)), trained(formula, values(2, NIN)))
    assert len(built) == 1


@pytest.mark.parametrize("mode", ["max", "gaussian"])
def test_a_layer_like_fovis(mode: str) -> None:
    layer = nn.Module()
    layer.mode, layer.knn_pad_token_val = mode, NIN  # type: ignore[assignment]
    layer.register_buffer("knn_indices_pad_token", TABLE.clone())
    layer.gaussian_weights = nn.Parameter(options("weighted")["weights"], requires_grad=False)
    fast = compiled(lambda x: optimized_pool_forward(layer, x))
    x = values(2, NIN)
    expected = {
        "max": pooled(x, TABLE, "max"),
        "gaussian": pooled(x, TABLE, "weighted", weights=layer.gaussian_weights, normalize_weights=True),
    }
    torch.testing.assert_close(fast(x), expected[mode])
    layer.mode = "median"  # type: ignore[assignment]
    assert compiled(lambda x: (optimized_pool_forward(layer, x), x)[0])(x) is None


@any_case
def test_transforms_in_a_graph(mode: str, nan: str, normalize: bool) -> None:
    chosen = options(mode, nan, normalize)

    def transformed(pool: Callable[..., Tensor]) -> Callable[[Tensor], Any]:
        def loss(x: Tensor) -> Tensor:
            return (pool(x, TABLE, mode, **chosen)[..., FILLED] ** 3).sum()

        return lambda x: (torch.func.vmap(torch.func.grad(loss))(x), torch.func.jvp(loss, (x,), (x,)))

    x = values(3, NIN)
    torch.testing.assert_close(compiled(transformed(pool_function))(x), transformed(pooled)(x))


@any_mode
def test_make_fx(mode: str) -> None:
    chosen = options(mode)
    graph = make_fx(lambda x: pool_function(x, TABLE, mode, **chosen))(values(2, NIN))
    assert [str(node.target) for node in graph.graph.nodes if "knnpool" in str(node.target)] == [
        "knnpool.forward.default"
    ]
    torch.testing.assert_close(graph(values(2, NIN)), pooled(values(2, NIN), TABLE, mode, **chosen), equal_nan=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@any_mode
def test_compiled_autograd(mode: str) -> None:
    """Only the backward of an eager forward is compiled."""
    chosen = options(mode, "omit")
    x = values(2, NIN).requires_grad_()
    y = pool_function(x, TABLE, mode, empty_value=0.0, **chosen)
    with torch._dynamo.compiled_autograd._enable(compiled_backward):
        (y**2).sum().backward()
    leaf = values(2, NIN).requires_grad_()
    (expected,) = torch.autograd.grad((pooled(leaf, TABLE, mode, empty_value=0.0, **chosen) ** 2).sum(), leaf)
    torch.testing.assert_close(x.grad, expected)


def compiled_backward(graph: Any) -> Any:
    return torch.compile(graph, backend="aot_eager", fullgraph=True)


# Ways of running that hold compiled as they do in eager mode.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_leaves_the_dtype_alone(dtype: torch.dtype) -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return pool_function(x, TABLE, "sum")

    x = values(2, NIN, dtype=dtype)
    assert_same_bits(compiled(function)(x), function(x))
    assert function(x).dtype == dtype


def test_inference_mode() -> None:
    module = Pool("max")
    fast = compiled(module)
    with torch.inference_mode():
        y = fast(values(2, NIN))
    torch.testing.assert_close(trained(fast, values(2, NIN)), trained(Pool("max", pooled), values(2, NIN)))
    torch.testing.assert_close(y, Pool("max", pooled)(values(2, NIN)).detach())


def test_checkpoints() -> None:
    module, formula = Pool("max"), Pool("max", pooled)
    expected = trained(formula, values(2, NIN))

    def again(x: Tensor) -> Tensor:
        y: Tensor = checkpoint(module, x, use_reentrant=False)
        return y

    torch.testing.assert_close(trained(again, values(2, NIN)), expected[:2])
    torch.testing.assert_close(trained(compiled(again), values(2, NIN)), expected[:2])


def test_hooks_on_what_is_saved() -> None:
    module = Pool("max")
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        steps = [trained(module, values(2, NIN)), trained(compiled(module), values(2, NIN))]
    assert packed
    for step in steps:
        torch.testing.assert_close(step, trained(Pool("max", pooled), values(2, NIN)))


def test_deterministic_algorithms() -> None:
    module = Pool("avg")
    torch.use_deterministic_algorithms(True)
    try:
        steps = [trained(module, values(2, NIN)), trained(compiled(module), values(2, NIN))]
    finally:
        torch.use_deterministic_algorithms(False)
    for step in steps:
        torch.testing.assert_close(step, trained(Pool("avg", pooled), values(2, NIN)))


def test_functional_call_compiled() -> None:
    module = Pool("max")
    state = {name: tensor.detach().clone() for name, tensor in [*module.named_parameters(), *module.named_buffers()]}
    fast = compiled(lambda state, x: torch.func.functional_call(module, state, (x,)))
    torch.testing.assert_close(fast(state, values(2, NIN)), Pool("max", pooled)(values(2, NIN)))


def test_a_copied_module_compiles() -> None:
    module = Pool("max")
    module(values(2, NIN))
    torch.testing.assert_close(compiled(copy.deepcopy(module))(values(2, NIN)), module(values(2, NIN)))


# Export.


def exported(module: nn.Module, strict: bool) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=1000)
    return torch.export.export(module, (values(2, 3, NIN),), dynamic_shapes=({0: batch},), strict=strict)


@any_case
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(mode: str, nan: str, normalize: bool, strict: bool) -> None:
    chosen = options(mode, nan, normalize)
    formula = Pool(mode, pooled, **chosen)
    program = exported(Pool(mode, **chosen), strict)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if "knnpool" in target] == ["knnpool.forward.default"]
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    for runnable in (program, torch.export.load(buffer), program.run_decompositions()):
        module = runnable.module()
        for batch in (2, 5):
            x = values(batch, 3, NIN)
            torch.testing.assert_close(module(x), formula(x), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(trained(module, x)[:2], trained(formula, x)[:2], rtol=1e-12, atol=1e-12)


def test_a_saved_program_runs_elsewhere(tmp_path: Path) -> None:
    program = exported(Pool("avg", empty_value=-torch.inf), strict=False)
    torch.export.save(program, tmp_path / "pool.pt2")
    code = (
        "import sys, torch, knnpool_gen.library\n"
        "module = torch.export.load(sys.argv[1]).module()\n"
        f"x = torch.arange(30.0, dtype=torch.float64).reshape(2, 3, {NIN})\n"
        "print(module(x).tolist())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "pool.pt2"], check=True, capture_output=True, text=True
    )
    x = torch.arange(30.0, dtype=torch.float64).reshape(2, 3, NIN)
    assert result.stdout.strip() == str(Pool("avg", pooled)(x).tolist())
