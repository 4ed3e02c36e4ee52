"""Operators, compilers, exports, transforms and forward AD on a device, against the formula on a CPU."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from formulas import FILLED, NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import pool_forward, pool_function, pool_meta_from_indices
from knnpool_gen.runtime import plan
from tables import DTYPES, assert_same_bits

# Of torch's own code, and of a way to multiply matrices.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:The given buffer is not writable:UserWarning",
)

OPS = torch.ops.knnpool


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


def moved(chosen: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in chosen.items()}


def close(actual: Any, expected: Any) -> None:
    """The same numbers, wherever they lie."""
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12, equal_nan=True, check_device=False)


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


@any_case
def test_opcheck(mode: str, nan: str, normalize: bool) -> None:
    chosen = moved(options(mode, nan, normalize))
    table, weights = TABLE.cuda(), chosen.get("weights")
    x = values(2, 3, NIN).cuda()
    x[0, 0, 2] = torch.nan if nan == "omit" else 0.5
    aux = OPS.forward_max(x, table, nan, None)[1] if mode == "max" else None
    rest = (aux, x, table, weights, NIN, mode, nan, normalize)
    calls = [
        (OPS.forward, (x.clone().requires_grad_(), table, weights, mode, nan, normalize, 3.0)),
        (OPS.backward, (values(2, 3, 4).cuda().requires_grad_(), *rest)),
        (OPS.tangent, (values(2, 3, NIN, seed=1).cuda().requires_grad_(), *rest)),
    ]
    if mode == "max":
        calls.append((OPS.forward_max, (x.clone().requires_grad_(), table, nan, 3.0)))
    for operator, arguments in calls:
        assert set(torch.library.opcheck(operator.default, arguments).values()) == {"SUCCESS"}


@any_case
@pytest.mark.parametrize(("backend", "dynamic"), [("aot_eager", True), ("inductor", None)])
def test_a_compiled_module_learns(
    mode: str, nan: str, normalize: bool, backend: str, dynamic: bool | None, built: list[Any]
) -> None:
    chosen = options(mode, nan, normalize)
    module, formula = Pool(mode, **chosen).cuda(), Pool(mode, pooled, **chosen)
    fast = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch in (2, 2, 4, 6):
        x = values(batch, 3, NIN)
        close(trained(fast, x.cuda()), trained(formula, x))
        with torch.no_grad():
            close(fast(x.cuda()), formula(x))
    assert len(built) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@any_mode
def test_compiled_values_have_the_bits_of_eager(mode: str, dtype: torch.dtype) -> None:
    table, chosen = TABLE.cuda(), moved(options(mode))
    x = values(4, 3, NIN, dtype=dtype).cuda()

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.float16):
            return pool_function(x, table, mode, **chosen)

    y = torch.compile(function, fullgraph=True)(x)
    assert y.dtype == dtype
    assert_same_bits(y, function(x))


def test_a_table_that_is_a_view(built: list[Any]) -> None:
    module, formula = Pool("max").cuda(), Pool("max", pooled)
    module.indices = TABLE.t().contiguous().cuda().t()
    fast = torch.compile(module, fullgraph=True)
    for _ in range(3):
        close(trained(fast, values(2, NIN).cuda()), trained(formula, values(2, NIN)))
    assert len(built) == 1


@any_case
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non-strict"])
def test_export(mode: str, nan: str, normalize: bool, strict: bool) -> None:
    chosen = options(mode, nan, normalize)
    module, formula = Pool(mode, **chosen).cuda(), Pool(mode, pooled, **chosen)
    shapes = ({0: torch.export.Dim("batch", min=1, max=1000)},)
    program = torch.export.export(module, (values(2, 3, NIN).cuda(),), dynamic_shapes=shapes, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for runnable in (program, torch.export.load(file)):
        for batch in (2, 5):
            x = values(batch, 3, NIN)
            close(trained(runnable.module(), x.cuda())[:2], trained(formula, x)[:2])


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Any]]] = {
    "vmap": lambda f: vmap(f, in_dims=1, out_dims=1),
    "vmap of grad": lambda f: vmap(grad(lambda x: (f(x) ** 2).nansum())),
    "jacrev": jacrev,
    "jacfwd": jacfwd,
    "hessian": lambda f: hessian(lambda x: (f(x) ** 3).nansum()),
    "jvp": lambda f: lambda x: jvp(f, (x,), (x**2,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@any_case
def test_transforms(mode: str, nan: str, normalize: bool, transform: Any) -> None:
    table, chosen = TABLE.cuda(), options(mode, nan, normalize)
    on_device = moved(chosen)
    ours = transform(lambda x: pool_function(x, table, mode, **on_device)[..., FILLED])
    theirs = transform(lambda x: pooled(x, TABLE, mode, **chosen)[..., FILLED])
    x = values(2, 3, NIN)
    if nan == "omit":
        x[0, 0, 1] = torch.nan
    close(ours(x.cuda()), theirs(x))


@any_case
def test_gradcheck_in_every_direction(mode: str, nan: str, normalize: bool) -> None:
    table, chosen = TABLE.cuda(), moved(options(mode, nan, normalize))

    def function(x: Tensor) -> Tensor:
        return pool_function(x, table, mode, **chosen)[..., FILLED]

    x = values(2, NIN).cuda().requires_grad_()
    assert torch.autograd.gradcheck(
        function, (x,), check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
    )
    assert torch.autograd.gradgradcheck(
        function, (x,), check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@any_mode
def test_a_tensor_that_has_left_its_transform(mode: str) -> None:
    x = values(2, NIN).cuda()
    left: list[Tensor] = []
    grad(lambda x: left.append(x) or x.sum())(x)
    chosen, table = moved(options(mode)), TABLE.cuda()

    with torch.no_grad():
        unrecorded = pool_function(left[0], table, mode, **chosen)

    expected = pooled(x.cpu(), TABLE, mode, **options(mode))
    close(unrecorded, expected)
    close(pool_function(left[0], table, mode, **chosen), expected)


def test_fake_tensors() -> None:
    with FakeTensorMode():
        x = torch.ones(2, NIN, device="cuda", dtype=torch.float16, requires_grad=True)
        y = pool_function(x, torch.zeros(3, 4, device="cuda", dtype=torch.int32), "max")
        y.sum().backward()
    assert (y.shape, y.dtype, y.device.type) == ((2, 4), torch.float16, "cuda")


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # ours give the same again
def test_the_layer_below_runs_in_compiled_code_too() -> None:
    """It takes a plan, which no graph can hold: the graph breaks there."""
    meta = pool_meta_from_indices(TABLE, NIN, "cuda")
    fast = torch.compile(lambda x: pool_forward(meta, x.sin(), "max")[0] * 2, backend="aot_eager")
    for _ in range(2):
        close(fast(values(2, NIN).cuda()), pooled(values(2, NIN).sin(), TABLE, "max") * 2)


@any_case
def test_transforms_in_a_graph(mode: str, nan: str, normalize: bool) -> None:
    table, chosen = TABLE.cuda(), options(mode, nan, normalize)
    on_device = moved(chosen)

    def transformed(pool: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
        def loss(x: Tensor) -> Tensor:
            return (pool(x)[..., FILLED] ** 3).sum()

        return lambda x: (vmap(grad(loss))(x), jvp(loss, (x,), (x,)))

    ours = transformed(lambda x: pool_function(x, table, mode, **on_device))
    theirs = transformed(lambda x: pooled(x, TABLE, mode, **chosen))
    x = values(3, NIN)
    close(torch.compile(ours, fullgraph=True, backend="aot_eager")(x.cuda()), theirs(x))


@any_mode
def test_ways_of_running(mode: str) -> None:
    chosen = options(mode)
    module, formula = Pool(mode, **chosen).cuda(), Pool(mode, pooled, **chosen)
    x, expected = values(2, 3, NIN).cuda(), trained(formula, values(2, 3, NIN))
    close(trained(lambda x: checkpoint(module, x, use_reentrant=False), x), expected[:2])
    with torch.autograd.graph.save_on_cpu():
        close(trained(module, x), expected)
    torch.use_deterministic_algorithms(True)
    try:
        close(trained(module, x), expected)
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.inference_mode():
        close(module(x), expected[0])
    close(trained(module, x), expected)
