"""The layer: what it computes, what it holds, how it is moved, saved and described."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from formulas import FILLED, NIN, TABLE, any_case, any_mode, options, pooled, values
from knnpool_gen import InvalidArgumentError, KNNPool, UnknownModeError, UnsupportedTypeError, pool_function
from knnpool_gen.runtime import plan
from tables import DTYPES, assert_same_bits, real_tables

NOUT = TABLE.shape[1]
WEIGHTS = torch.rand(TABLE.shape, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tables whose plan was built for a call."""
    tables: list[Tensor] = []
    build = plan.pool_meta_from_indices
    monkeypatch.setattr(plan, "pool_meta_from_indices", lambda *args: tables.append(args[0]) or build(*args))
    return tables


def weighted() -> KNNPool:
    return KNNPool(TABLE, NIN, "weighted", weights=WEIGHTS, normalize_weights=True)


# What it computes.


@any_case
def test_values_and_gradients(mode: str, nan: str, normalize: bool) -> None:
    chosen = options(mode, nan, normalize)
    pool = KNNPool(TABLE, NIN, mode, empty_value=7.0, **chosen)
    x = values(2, 3, NIN).requires_grad_()
    grad_y = values(2, 3, NOUT, seed=1)
    y, expected = pool(x), pooled(x, TABLE, mode, empty_value=7.0, **chosen)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y, x, grad_y), torch.autograd.grad(expected, x, grad_y))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@any_mode
def test_the_dtype_is_that_of_x(mode: str, dtype: torch.dtype) -> None:
    chosen = options(mode, dtype=torch.float32)
    x = values(2, NIN, dtype=dtype)
    assert_same_bits(KNNPool(TABLE, NIN, mode, **chosen)(x), pool_function(x, TABLE, mode, **chosen))


def test_the_nodes_of_the_maxima() -> None:
    pool = KNNPool(TABLE, NIN, "max", return_indices=True)
    x = torch.tensor([[1.0, 5.0, 5.0, 2.0, 0.0], [9.0, 1.0, 1.0, 1.0, 9.0]], requires_grad=True)
    y, nodes = pool(x)
    # Column 0 reads the nodes 0, 1 and 4, column 1 nothing, column 2 the nodes 3 and 0, column 3 twice 2, then 3.
    assert nodes.tolist() == [[1, -1, 3, 2], [0, -1, 0, 2]]
    assert nodes.dtype == torch.int64
    assert not nodes.requires_grad
    assert_same_bits(y.detach(), pool_function(x.detach(), TABLE, "max"))
    (grad_x,) = torch.autograd.grad(y, x, torch.tensor([[1.0, 10.0, 100.0, 1000.0]] * 2))
    assert grad_x.tolist() == [[0.0, 1.0, 1000.0, 100.0, 0.0], [101.0, 0.0, 1000.0, 0.0, 0.0]]


@pytest.mark.parametrize("table", real_tables()[:4], ids=str)
def test_the_nodes_of_the_maxima_hold_them(table: Any) -> None:
    pool = KNNPool(table.indices, table.nin, "max", return_indices=True)
    x = torch.randn(2, 3, table.nin, generator=torch.Generator().manual_seed(0))
    y, nodes = pool(x)
    filled = (table.indices < table.nin).any(0)
    assert (nodes[..., ~filled] == -1).all()
    assert torch.equal(x.gather(-1, nodes[..., filled]), y[..., filled])


@pytest.mark.parametrize("k", [0, 1, 255, 256, 300])
def test_the_nodes_for_slots_of_every_width(k: int) -> None:
    table = torch.randint(0, 40, (k, 6), generator=torch.Generator().manual_seed(k))
    table[:, 2] = 40
    x = torch.randperm(30, generator=torch.Generator().manual_seed(1)).double()
    for shape in ((30,), (1, 30), (2, 0, 30)):
        y, nodes = KNNPool(table, 30, "max", return_indices=True)(x.expand(shape))
        assert y.shape == nodes.shape == (*shape[:-1], 6)
        padded = torch.cat([x, x.new_tensor([-torch.inf])])  # -1 is the last
        assert torch.equal(padded[nodes], y)


def test_the_nodes_of_nan() -> None:
    x = torch.tensor([[1.0, torch.nan, 0.0, torch.nan, torch.nan]])
    omitted = KNNPool(TABLE, NIN, "max", return_indices=True)
    assert omitted(x)[1].tolist() == [[0, -1, 0, 2]]
    propagated = KNNPool(TABLE, NIN, "max", nan="propagate", empty_value=3.0, return_indices=True)
    y, nodes = propagated(x)
    assert nodes.tolist() == [[1, -1, 3, 3]]
    assert y[0, 1] == 3.0


@pytest.mark.parametrize("return_indices", [False, True])
def test_one_graph_when_compiled(return_indices: bool) -> None:
    pool = KNNPool(TABLE, NIN, "max", return_indices=return_indices)
    x = values(2, 3, NIN)
    compiled = torch.compile(pool, fullgraph=True, backend="aot_eager")
    exported = torch.export.export(pool, (x,)).module()
    for made in (compiled, exported):
        torch.testing.assert_close(made(x), pool(x))
    torch._dynamo.reset()


@pytest.mark.parametrize("return_indices", [False, True])
def test_vmap(return_indices: bool) -> None:
    pool = KNNPool(TABLE, NIN, "max", return_indices=return_indices)
    x = values(4, 3, NIN)
    torch.testing.assert_close(torch.vmap(pool)(x), pool(x))


# From coordinates.


def test_from_points() -> None:
    points_in = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
    pool = KNNPool.from_points(points_in, np.array([[0.5, 0.1], [9.0, 9.0]]), 3, "avg", nan="omit")
    assert pool.indices.tolist() == [[0, 3], [1, 1], [2, 2]]
    assert pool(torch.tensor([3.0, 6.0, torch.nan, 12.0])).tolist() == [4.5, 9.0]
    assert (pool.nin, pool.nout, pool.k) == (4, 2, 3)


def test_from_points_by_another_metric_and_with_pads() -> None:
    points_in, points_out = [[3.0, 3.0], [5.0, 0.0]], [[0.0, 0.0]]
    for metric, nearest in (("euclidean", 0), ("manhattan", 1), ("chebyshev", 0)):
        pool = KNNPool.from_points(points_in, points_out, 1, "max", metric)
        assert pool.indices.tolist() == [[nearest]]
    by_angle = KNNPool.from_points(points_in, [[1.0, 0.5]], 4, "max", metric="cosine")
    assert by_angle.indices.tolist() == [[0], [1], [2], [2]]


class Special(KNNPool):
    pass


def test_a_subclass_makes_itself() -> None:
    assert type(Special.from_points([[0.0]], [[0.0]], 1, "sum")) is Special


# What it refuses, and when.


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"indices": TABLE.float()}, UnsupportedTypeError, "indices must be an integer tensor, not torch.float32"),
        ({"indices": TABLE.numpy()}, UnsupportedTypeError, "indices must be an integer tensor, not ndarray"),
        ({"indices": TABLE[0]}, InvalidArgumentError, r"indices must have shape \[K, Nout\], not \[4\]"),
        ({"indices": TABLE - 1}, InvalidArgumentError, r"indices\[0, 0\] = -1 is negative"),
        ({"nin": -1}, InvalidArgumentError, "Nin = -1 is negative"),
        ({"nin": 2.5}, UnsupportedTypeError, "Nin must be an integer, not 2.5"),
        ({"mode": "median"}, UnknownModeError, "mode = 'median'; there are 'max', 'avg', 'sum', 'weighted'"),
        ({"nan": "ignore"}, InvalidArgumentError, "nan = 'ignore'; there are 'omit', 'propagate'"),
        ({"mode": "weighted"}, InvalidArgumentError, "mode 'weighted' needs weights"),
        ({"weights": WEIGHTS}, InvalidArgumentError, "mode 'max' takes no weights"),
        ({"mode": "weighted", "weights": WEIGHTS.T}, InvalidArgumentError, r"weights have shape \[4, 3\]"),
        ({"mode": "weighted", "weights": TABLE}, UnsupportedTypeError, "weights must be a floating-point tensor"),
        ({"mode": "weighted", "weights": nn.Parameter(WEIGHTS)}, InvalidArgumentError, "require a gradient"),
        ({"normalize_weights": True}, InvalidArgumentError, "normalize_weights goes with mode 'weighted', not 'max'"),
        ({"empty_value": "0"}, UnsupportedTypeError, "empty_value must be a number, not '0'"),
        (
            {"mode": "avg", "return_indices": True},
            InvalidArgumentError,
            "return_indices goes with mode 'max', not 'avg'",
        ),
        ({"return_indices": 1}, UnsupportedTypeError, "return_indices must be True or False, not 1"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_mistakes_are_found_when_it_is_made(changed: Any, kind: Any, message: str, device: str) -> None:
    if device == "meta" and "negative" in message and "indices" in message:
        return  # a table without values has none that are negative
    arguments = {"indices": TABLE, "nin": NIN, "mode": "max", **changed}
    for name, value in arguments.items():
        if isinstance(value, Tensor) and not value.requires_grad:
            arguments[name] = value.to(device)
    with pytest.raises(kind, match=message):
        KNNPool(**arguments)


def test_mistakes_of_a_call() -> None:
    for pool in (KNNPool(TABLE, NIN, "max"), KNNPool(TABLE, NIN, "max", return_indices=True)):
        # One node less: what was the last input would silently become padding.
        with pytest.raises(InvalidArgumentError, match=r"x has shape \(2, 4\); its last dimension must be Nin = 5"):
            pool(torch.ones(2, NIN - 1))
        with pytest.raises(InvalidArgumentError, match=r"x has shape \(\)"):
            pool(torch.ones(()))
        with pytest.raises(UnsupportedTypeError, match="x has dtype int64"):
            pool(torch.ones(2, NIN, dtype=torch.int64))
        with pytest.raises(UnsupportedTypeError, match="x is a list"):
            pool([1.0] * NIN)
        with pytest.raises(UnsupportedTypeError, match="sparse"):
            pool(torch.ones(2, NIN).to_sparse())


# Its buffers.


def test_the_tables_are_its_own() -> None:
    indices, weights = TABLE.to(torch.int16), WEIGHTS.clone()
    pool = KNNPool(indices, NIN, "weighted", weights=weights)
    x = values(2, NIN)
    expected = pool(x)
    indices.zero_()
    weights.zero_()
    assert_same_bits(pool(x), expected)
    assert pool.indices.dtype == torch.int64
    assert pool.indices.max() == NIN  # every pad


def test_a_table_of_uint64() -> None:
    table = np.array([[0, 2**63 + 1], [1, 2**64 - 1]], dtype=np.uint64)
    assert KNNPool(torch.from_numpy(table), 2, "sum").indices.tolist() == [[0, 2], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_of_a_model_is_not_that_of_its_tables(dtype: torch.dtype) -> None:
    """Weights in half precision would change every result by a part in a thousand without a word."""
    model = nn.Sequential(nn.Linear(NIN, NIN), weighted())
    for changed in (model.to(dtype), model.type(dtype), model.to("cpu", dtype), model.half(), model.double()):
        linear, pool = changed
        assert pool.indices.dtype == torch.int64
        assert torch.equal(pool.weights, WEIGHTS)
        assert linear.weight.dtype in (dtype, torch.float16, torch.float64)
        y = changed(torch.ones(2, NIN, dtype=linear.weight.dtype))
        assert y.dtype == linear.weight.dtype
        expected = pooled(
            linear(torch.ones(2, NIN, dtype=y.dtype)).double(),
            TABLE,
            "weighted",
            weights=WEIGHTS.double(),
            normalize_weights=True,
        )
        torch.testing.assert_close(y.double()[:, FILLED], expected[:, FILLED], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_keep_the_dtype_they_came_in(dtype: torch.dtype) -> None:
    pool = KNNPool(TABLE, NIN, "weighted", weights=WEIGHTS.to(dtype))
    assert pool.half().weights.dtype == dtype


def test_they_move_with_the_module() -> None:
    pool = weighted().to("meta", torch.float16)
    assert pool.indices.device.type == "meta"
    assert pool.weights.device.type == "meta"
    assert (pool.indices.dtype, pool.weights.dtype) == (torch.int64, torch.float32)


def test_they_are_the_whole_state_dict() -> None:
    pool = weighted()
    pool(values(2, NIN))
    pool.prepare()
    assert list(pool.state_dict()) == ["indices", "weights"]
    assert list(KNNPool(TABLE, NIN, "max").state_dict()) == ["indices"]
    assert list(pool.parameters()) == []
    assert dict(pool.named_buffers()).keys() == {"indices", "weights"}


@pytest.mark.parametrize("assign", [False, True])
def test_another_table_is_loaded(assign: bool) -> None:
    """Also one of another integer dtype."""
    x = values(2, NIN)
    pool, other = weighted(), KNNPool(TABLE.flip(0), NIN, "weighted", weights=WEIGHTS.flip(1), normalize_weights=True)
    before = pool(x)
    state = other.state_dict()
    state["indices"] = state["indices"].int()
    pool.load_state_dict(state, assign=assign)
    assert not torch.equal(pool(x), before)
    assert_same_bits(pool(x), other(x))


def test_a_table_of_another_size_is_not_loaded() -> None:
    with pytest.raises(RuntimeError, match="size mismatch for indices"):
        KNNPool(TABLE, NIN, "max").load_state_dict(KNNPool(TABLE[:2], NIN, "max").state_dict())


@pytest.mark.parametrize("return_indices", [False, True])
def test_a_change_in_place_is_noticed(return_indices: bool) -> None:
    pool = KNNPool(TABLE, NIN, "max", return_indices=return_indices)
    x = values(2, NIN)
    first = pool(x)
    pool.indices[0, 1] = 3
    again = pool(x)
    for one, other in zip(again, first, strict=True) if return_indices else [(again, first)]:
        assert not torch.equal(one, other)
    y = again[0] if return_indices else again
    assert torch.equal(y[:, 1], x[:, 3])


def test_a_layer_made_on_meta() -> None:
    """Made without values, given memory, then filled: the way large models are loaded."""
    x = values(2, 3, NIN)
    source = weighted()
    with torch.device("meta"):
        pool = KNNPool(
            torch.empty(3, 4, dtype=torch.int32), NIN, "weighted", weights=torch.empty(3, 4), normalize_weights=True
        )
    assert pool.indices.is_meta
    assert pool.weights is not None
    assert pool.weights.is_meta
    assert pool(torch.empty(2, 3, NIN, device="meta")).shape == (2, 3, NOUT)
    with pytest.raises(InvalidArgumentError, match="meta"):
        pool(x)
    pool.to_empty(device="cpu")
    pool.load_state_dict(source.state_dict())
    assert_same_bits(pool(x), source(x))


def test_a_table_made_in_inference_mode() -> None:
    with torch.inference_mode():
        pool = KNNPool(TABLE.clone(), NIN, "weighted", weights=WEIGHTS.clone())
        pool(values(2, NIN))
    assert not pool.indices.is_inference()
    assert pool.weights is not None
    assert not pool.weights.is_inference()
    x = values(2, NIN).requires_grad_()
    pool(x).sum().backward()
    assert x.grad is not None


# Copies.


def copied(pool: KNNPool) -> KNNPool:
    return copy.deepcopy(pool)


def pickled(pool: KNNPool) -> KNNPool:
    return pickle.loads(pickle.dumps(pool))


def saved(pool: KNNPool) -> KNNPool:
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("made", [copied, pickled, saved], ids=lambda function: function.__name__)
@any_mode
def test_copies(made: Any, mode: str) -> None:
    chosen = {"empty_value": 2.0, **options(mode, "omit", mode == "weighted")}
    pool = KNNPool(TABLE, NIN, mode, **chosen)
    x = values(2, NIN)
    x[0, 3] = torch.nan
    expected = pool(x)
    pool.prepare()
    again = made(pool)
    assert_same_bits(again(x), expected)
    assert again.extra_repr() == pool.extra_repr()
    again.indices.fill_(NIN)
    assert_same_bits(again(x), torch.full((2, NOUT), 2.0, dtype=torch.float64))
    assert_same_bits(pool(x), expected)


def test_loaded_elsewhere() -> None:
    """There is no second device here but meta; what was derived must not point back to the first."""
    pool = weighted()
    pool(values(2, NIN))
    file = io.BytesIO()
    torch.save(pool, file)
    file.seek(0)
    there = torch.load(file, map_location="meta", weights_only=False)
    assert there.indices.is_meta
    assert there(torch.empty(2, NIN, device="meta")).is_meta


def test_a_checkpoint_of_weights_only(tmp_path: Path) -> None:
    torch.save(weighted().state_dict(), tmp_path / "state.pt")
    pool = KNNPool(torch.zeros_like(TABLE), NIN, "weighted", weights=torch.zeros(3, 4), normalize_weights=True)
    pool.load_state_dict(torch.load(tmp_path / "state.pt", map_location="cpu", weights_only=True))
    assert_same_bits(pool(values(2, NIN)), weighted()(values(2, NIN)))


# As part of a model.


def test_prepared_ahead(built: list[Tensor]) -> None:
    pool = weighted()
    pool.prepare()
    assert len(built) == 1
    for _ in range(3):
        pool(values(2, NIN, dtype=torch.float32))
    assert len(built) == 1
    with pytest.raises(InvalidArgumentError, match="meta"):
        KNNPool(TABLE.to("meta"), NIN, "max").prepare()


def test_a_deep_model_keeps_all_its_plans(built: list[Tensor]) -> None:
    layers = nn.Sequential(*[KNNPool(torch.arange(NIN)[None].roll(i, 1), NIN, "sum") for i in range(200)])
    for _ in range(3):
        layers(values(2, NIN))
    assert len(built) == 200


def test_hooks() -> None:
    pool = KNNPool(TABLE, NIN, "sum")
    seen = []
    pool.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    pool.register_forward_hook(lambda module, args, y: y + 1)
    pool.register_full_backward_hook(lambda module, grad_x, grad_y: seen.append(grad_y[0]))
    x = values(2, NIN).requires_grad_()
    y = pool(x)
    torch.testing.assert_close(y, pooled(2 * x, TABLE, "sum") + 1)
    y.sum().backward()
    assert [grad.tolist() for grad in seen] == [[[1.0] * NOUT] * 2]
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0, 2.0, 4.0, 4.0, 2.0]] * 2


def test_functional_call() -> None:
    pool = weighted()
    x = values(2, NIN)
    state = {"indices": TABLE.flip(0), "weights": WEIGHTS.flip(0)}
    replaced = torch.func.functional_call(pool, state, (x,))
    torch.testing.assert_close(
        replaced, pooled(x, TABLE.flip(0), "weighted", weights=WEIGHTS.flip(0).double(), normalize_weights=True)
    )
    torch.testing.assert_close(pool(x), pooled(x, TABLE, "weighted", weights=WEIGHTS.double(), normalize_weights=True))


def test_its_description() -> None:
    assert repr(KNNPool(TABLE, NIN, "avg")) == "KNNPool(nin=5, nout=4, k=3, mode='avg')"
    pool = KNNPool(TABLE, NIN, "weighted", weights=WEIGHTS, nan="omit", empty_value=0.0, normalize_weights=True)
    assert repr(pool) == (
        "KNNPool(nin=5, nout=4, k=3, mode='weighted', nan='omit', empty_value=0.0, normalize_weights=True)"
    )


def test_types(tmp_path: Path) -> None:
    """What a model author writes passes mypy --strict."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "from knnpool_gen import KNNPool, knn_table\n"
        "points = torch.rand(9, 2)\n"
        "table: torch.Tensor = knn_table(points, points[::2], 4, metric='chebyshev')\n"
        "pool: KNNPool = KNNPool(table, 9, 'max', return_indices=True).cuda().half()\n"
        "other: KNNPool = KNNPool.from_points(points.numpy(), [[0.5, 0.5]], 3, 'avg', nan='omit')\n"
        "other.prepare('cpu')\n"
        "size: int = pool.nin + pool.nout + pool.k\n"
        "reveal_type(pool.indices)\n"
        "reveal_type(pool.weights)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(tmp_path / "model.py")]
    found = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    revealed = [line.split("Revealed type is ")[1] for line in found.stdout.splitlines() if "Revealed" in line]
    assert revealed == ['"torch._tensor.Tensor"', '"torch._tensor.Tensor | None"']
