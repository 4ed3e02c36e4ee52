"""Every bad input: one clear error of ours that is one of Python's kinds too, and the next good call works."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import knnpool_gen
from knnpool_gen import (
    CompileError,
    InvalidArgumentError,
    KNNPool,
    KNNPoolError,
    KNNPoolFunction,
    MissingDependencyError,
    StaleDispatchError,
    UnknownModeError,
    UnsupportedTypeError,
    optimized_pool_forward,
    pool_backward,
    pool_forward,
    pool_function,
    pool_meta_from_indices,
    prepare,
)
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.runtime import canary, compile, cuda, launch
from knnpool_gen.runtime.select import Configuration, all_tile_heights

TABLE = torch.tensor([[0, 2, 3], [1, 3, 3]])
X = torch.tensor([[1.0, 2.0, 3.0], [6.0, 5.0, 4.0]])
META = pool_meta_from_indices(TABLE, 3)
Y, AUX = pool_forward(META, X, "max")
KERNEL = next(iter(KERNELS.values()))
EXTRAS = "pip install 'knnpool-gen[cuda12]' or 'knnpool-gen[cuda13]', whichever matches your CUDA driver"


def good_call() -> None:
    """Forward and backward of every public way in."""
    leaf = X.clone().requires_grad_()
    y = pool_function(leaf, TABLE, "max")
    assert y.tolist() == [[2.0, 3.0, -torch.inf], [6.0, 4.0, -torch.inf]]
    y.backward(torch.ones(2, 3))
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 1.0]]
    y, aux = pool_forward(META, X, "max", rs=1)
    assert pool_backward(META, torch.ones(2, 3), aux, "max", rs=1).tolist() == leaf.grad.tolist()


def refused(call: Callable[[], object], ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    with pytest.raises(KNNPoolError) as caught:
        call()
    assert type(caught.value) is ours
    assert isinstance(caught.value, builtin)
    assert str(caught.value) == message
    good_call()


# Tables.

TABLES = {
    "negative": (
        torch.tensor([[0, 1], [2, -7]]),
        InvalidArgumentError,
        ValueError,
        "indices[1, 1] = -7 is negative; padding is any entry >= Nin = 3",
    ),
    "negative_int8": (
        torch.tensor([[-1, 0]], dtype=torch.int8),
        InvalidArgumentError,
        ValueError,
        "indices[0, 0] = -1 is negative; padding is any entry >= Nin = 3",
    ),
    "float": (TABLE.float(), UnsupportedTypeError, TypeError, "indices must be an integer tensor, not torch.float32"),
    "bool": (TABLE.bool(), UnsupportedTypeError, TypeError, "indices must be an integer tensor, not torch.bool"),
    "list": ([[0, 1]], UnsupportedTypeError, TypeError, "indices must be an integer tensor, not list"),
    "rank_1": (TABLE[0], InvalidArgumentError, ValueError, "indices must have shape [K, Nout], not [3]"),
    "rank_3": (TABLE[None], InvalidArgumentError, ValueError, "indices must have shape [K, Nout], not [1, 2, 3]"),
}


@pytest.mark.parametrize(("table", "ours", "builtin", "message"), TABLES.values(), ids=TABLES)
def test_bad_tables(table: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    refused(lambda: pool_meta_from_indices(table, 3), ours, builtin, message)
    refused(lambda: pool_function(X, table, "max"), ours, builtin, message)


def test_a_table_that_turns_bad_and_good_again() -> None:
    table = TABLE.clone()
    expected = pool_function(X, table, "max")
    table[1, 0] = -1
    refused(
        lambda: pool_function(X, table, "max"),
        InvalidArgumentError,
        ValueError,
        "indices[1, 0] = -1 is negative; padding is any entry >= Nin = 3",
    )
    table[1, 0] = 1
    assert torch.equal(pool_function(X, table, "max"), expected)


NODES = {
    "negative": (-1, InvalidArgumentError, ValueError, "Nin = -1 is negative"),
    "float": (3.0, UnsupportedTypeError, TypeError, "Nin must be an integer, not 3.0"),
    "bool": (True, UnsupportedTypeError, TypeError, "Nin must be an integer, not True"),
    "huge": (2**31, InvalidArgumentError, ValueError, "Nin = 2147483648 is not supported, at most 2147483647"),
}


@pytest.mark.parametrize(("nin", "ours", "builtin", "message"), NODES.values(), ids=NODES)
def test_bad_numbers_of_nodes(nin: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    refused(lambda: pool_meta_from_indices(TABLE, nin), ours, builtin, message)


# Tensors.

SUPPORTED = "supported: float16, bfloat16, float32, float64"
TENSORS = {
    "list": ([[1.0, 2.0, 3.0]], UnsupportedTypeError, TypeError, "is a list, not a torch.Tensor"),
    "array": (X.numpy(), UnsupportedTypeError, TypeError, "is a ndarray, not a torch.Tensor"),
    "none": (None, UnsupportedTypeError, TypeError, "is a NoneType, not a torch.Tensor"),
    "int": (X.long(), UnsupportedTypeError, TypeError, f"has dtype int64; {SUPPORTED}"),
    "bool": (X.bool(), UnsupportedTypeError, TypeError, f"has dtype bool; {SUPPORTED}"),
    "complex": (X.to(torch.complex64), UnsupportedTypeError, TypeError, f"has dtype complex64; {SUPPORTED}"),
    "float8": (X.to(torch.float8_e4m3fn), UnsupportedTypeError, TypeError, f"has dtype float8_e4m3fn; {SUPPORTED}"),
    "size": (
        torch.ones(2, 4),
        InvalidArgumentError,
        ValueError,
        "has shape (2, 4), its last dimension 4; the plan has {size} = 3",
    ),
    "no_dimension": (
        torch.tensor(1.0),
        InvalidArgumentError,
        ValueError,
        "has shape (), its last dimension no dimension; the plan has {size} = 3",
    ),
    "device": (X.to("meta"), InvalidArgumentError, ValueError, "is on meta, the plan on cpu"),
}

any_tensor = pytest.mark.parametrize(("bad", "ours", "builtin", "message"), TENSORS.values(), ids=TENSORS)


@any_tensor
def test_bad_inputs(bad: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    message = "x " + message.format(size="Nin")
    refused(lambda: pool_forward(META, bad, "max"), ours, builtin, message)
    refused(lambda: pool_forward(META, bad, "avg", need_aux=False), ours, builtin, message)
    refused(lambda: KNNPoolFunction.apply(bad, META, "max", True), ours, builtin, message)
    if builtin is TypeError:
        refused(lambda: pool_function(bad, TABLE, "max"), ours, builtin, message)


@any_tensor
def test_bad_gradients(bad: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    message = "grad_y " + message.format(size="Nout")
    refused(lambda: pool_backward(META, bad, AUX, "max"), ours, builtin, message)
    refused(lambda: pool_backward(META, bad, None, "avg"), ours, builtin, message)


def test_no_dimension_without_a_plan() -> None:
    refused(
        lambda: pool_function(torch.tensor(1.0), TABLE, "max"),
        InvalidArgumentError,
        ValueError,
        "x has no dimensions; wanted [..., Nin]",
    )


def test_a_plan_on_another_device() -> None:
    elsewhere = META.to("meta")
    message = "is on cpu, the plan on meta"
    refused(lambda: pool_forward(elsewhere, X, "max"), InvalidArgumentError, ValueError, f"x {message}")
    refused(lambda: pool_backward(elsewhere, Y, AUX, "max"), InvalidArgumentError, ValueError, f"grad_y {message}")
    refused(lambda: KNNPoolFunction.apply(X, elsewhere, "max", True), InvalidArgumentError, ValueError, f"x {message}")


NEEDS_AUX = "mode 'max' needs aux, the winning slots: call pool_forward with need_aux=True"
WINNERS = {
    "missing": (None, InvalidArgumentError, ValueError, NEEDS_AUX),
    "list": ([[1, 0, 255]], UnsupportedTypeError, TypeError, "aux is a list, not a torch.Tensor"),
    "dtype": (
        torch.zeros(2, 3, dtype=torch.int64),
        UnsupportedTypeError,
        TypeError,
        "aux has dtype int64; wanted uint8 for K = 2",
    ),
    "shape": (
        torch.zeros(3, 3, dtype=torch.uint8),
        InvalidArgumentError,
        ValueError,
        "aux has shape (3, 3), grad_y (2, 3)",
    ),
    "rank": (torch.zeros(3, dtype=torch.uint8), InvalidArgumentError, ValueError, "aux has shape (3,), grad_y (2, 3)"),
    "device": (
        torch.zeros(2, 3, dtype=torch.uint8, device="meta"),
        InvalidArgumentError,
        ValueError,
        "aux is on meta, grad_y on cpu",
    ),
}


@pytest.mark.parametrize(("aux", "ours", "builtin", "message"), WINNERS.values(), ids=WINNERS)
def test_bad_winning_slots(aux: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    refused(lambda: pool_backward(META, torch.ones(2, 3), aux, "max"), ours, builtin, message)
    # The others do not look at it.
    assert pool_backward(META, torch.ones(2, 3), aux, "sum").tolist() == [[1.0, 1.0, 1.0]] * 2


def test_winning_slots_of_many_slots_are_wider() -> None:
    meta = pool_meta_from_indices(torch.zeros(256, 3, dtype=torch.int64), 3)
    message = "aux has dtype uint8; wanted int16 for K = 256"
    refused(lambda: pool_backward(meta, torch.ones(2, 3), AUX, "max"), UnsupportedTypeError, TypeError, message)


def test_leaving_out_nan_needs_the_input() -> None:
    def backward(x: Any) -> torch.Tensor:
        return pool_backward(META, torch.ones(2, 3), None, "avg", nan="omit", x=x)

    message = "nan = 'omit' needs x, the input of the forward, to know what was left out"
    refused(lambda: backward(None), InvalidArgumentError, ValueError, message)
    refused(lambda: backward(X[:1]), InvalidArgumentError, ValueError, "x has shape (1, 3), grad_y (2, 3)")
    refused(lambda: backward(X.to("meta")), InvalidArgumentError, ValueError, "x is on meta, the plan on cpu")


# Tensors without values, and what an operator would refuse in torch's words.

NO_TABLE = "indices is a meta tensor: the plan of a table depends on its values"
NO_WEIGHTS = "weights is a meta tensor: what is made of it depends on its values"


def vmapped(x: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
    """``pool_function`` by way of the operators."""
    return torch.func.vmap(lambda row: pool_function(row, *arguments, **options))(x)


ways = pytest.mark.parametrize("way", [pool_function, vmapped])


@ways
def test_a_table_or_weights_without_values(way: Callable[..., torch.Tensor]) -> None:
    refused(lambda: way(X, TABLE.to("meta"), "max"), InvalidArgumentError, ValueError, NO_TABLE)
    weights = torch.ones(2, 3, device="meta")
    refused(lambda: way(X, TABLE, "weighted", weights=weights), InvalidArgumentError, ValueError, NO_WEIGHTS)


def test_layers_and_plans_without_values() -> None:
    weights = torch.ones(2, 3, device="meta")
    layer = KNNPool(TABLE, 3, "weighted", weights=weights)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: pool_forward(META, X, "weighted", weights=weights), NO_WEIGHTS),
        (lambda: layer(X), NO_WEIGHTS),
        (layer.prepare, NO_WEIGHTS),
        (lambda: KNNPool(TABLE.to("meta"), 3, "max")(X), NO_TABLE),
        (lambda: KNNPool(TABLE.to("meta"), 3, "max", return_indices=True)(X), NO_TABLE),
        (
            lambda: KNNPool(TABLE, 3, "max").prepare("meta"),
            "device = 'meta': a plan consists of values, which nothing there has",
        ),
    ]
    for call, message in calls:
        refused(call, InvalidArgumentError, ValueError, message)


def test_a_device_that_does_not_exist() -> None:
    for call in (
        lambda: pool_meta_from_indices(TABLE, 3, "nowhere"),
        lambda: KNNPool(TABLE, 3, "max").prepare("nowhere"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^device = 'nowhere': Expected one of cpu, cuda, "):
            call()
    good_call()


def test_what_cannot_be_prepared() -> None:
    layer = KNNPool(TABLE, 3, "max")
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: prepare([1.0], TABLE, "max"), "x is a list, not a torch.Tensor"),  # type: ignore[arg-type]
        (lambda: prepare(X.long(), TABLE, "max"), f"x has dtype int64; {SUPPORTED}"),
        (lambda: layer.prepare(dtype=torch.int64), f"dtype is int64; {SUPPORTED}"),
        (lambda: layer.prepare(dtype="float32"), f"dtype is 'float32'; {SUPPORTED}"),  # type: ignore[arg-type]
    ]
    for call, message in calls:
        refused(call, UnsupportedTypeError, TypeError, message)


def test_a_layer_is_given_rows_whichever_way() -> None:
    layer = SimpleNamespace(mode="max", knn_indices_pad_token=TABLE, knn_pad_token_val=3)
    message = "x has shape (); the layer has Nin = 3"
    refused(
        lambda: torch.func.vmap(lambda value: optimized_pool_forward(layer, value))(X[0]),
        InvalidArgumentError,
        ValueError,
        message,
    )


@ways
@pytest.mark.parametrize(
    ("arguments", "options", "ours", "message"),
    [
        (([[0, 1]], "max"), {}, UnsupportedTypeError, "indices must be an integer tensor, not list"),
        ((TABLE, 3), {}, UnknownModeError, "mode = 3; there are 'max', 'avg', 'sum', 'weighted'"),
        ((TABLE, "max"), {"nan": 0}, InvalidArgumentError, "nan = 0; there are 'omit', 'propagate'"),
        ((TABLE, "max"), {"nan": "omit "}, InvalidArgumentError, "nan = 'omit '; there are 'omit', 'propagate'"),
        (
            (TABLE, "weighted"),
            {"weights": [[1.0]]},
            UnsupportedTypeError,
            "weights must be a floating-point tensor, not list",
        ),
        (
            (TABLE, "weighted"),
            {"weights": torch.ones(2, 3), "normalize_weights": 1},
            UnsupportedTypeError,
            "normalize_weights must be True or False, not 1",
        ),
        (
            (TABLE, "sum"),
            {"empty_value": "zero"},
            UnsupportedTypeError,
            "empty_value must be a number, not 'zero'",
        ),
        ((TABLE, "sum"), {"empty_value": True}, UnsupportedTypeError, "empty_value must be a number, not True"),
        ((TABLE, "sum"), {"empty_value": b"1"}, UnsupportedTypeError, "empty_value must be a number, not b'1'"),
        (
            (TABLE, "sum"),
            {"empty_value": torch.tensor(1.0, requires_grad=True)},
            InvalidArgumentError,
            "an empty_value that requires a gradient is not supported: detach it",
        ),
        (
            (TABLE.to_sparse(), "sum"),
            {},
            UnsupportedTypeError,
            "indices must be a strided tensor, not one of layout torch.sparse_coo",
        ),
        (
            (TABLE, "weighted"),
            {"weights": torch.ones(2, 3).to_sparse()},
            UnsupportedTypeError,
            "weights must be a strided tensor, not one of layout torch.sparse_coo",
        ),
    ],
)
def test_the_same_words_whichever_way(
    way: Callable[..., torch.Tensor],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    ours: type[KNNPoolError],
    message: str,
) -> None:
    builtin = TypeError if ours is UnsupportedTypeError else ValueError
    refused(lambda: way(X, *arguments, **options), ours, builtin, message)
    if way is pool_function:
        refused(lambda: way(X.to("meta"), *arguments, **options), ours, builtin, message)


@ways
@pytest.mark.parametrize("value", [2, np.float32(2), torch.tensor(2.0)], ids=repr)
def test_an_empty_value_may_be_any_number(way: Callable[..., torch.Tensor], value: Any) -> None:
    assert way(X, TABLE, "max", empty_value=value)[:, 2].tolist() == [2.0, 2.0]


# Modes and options.


@pytest.mark.parametrize("mode", ["median", "", "MAX", "Mode.MAX", None, 0, ["max"]], ids=repr)
def test_unknown_modes(mode: Any) -> None:
    message = f"mode = {mode!r}; there are 'max', 'avg', 'sum', 'weighted'"
    calls: list[Callable[[], object]] = [
        lambda: pool_forward(META, X, mode),
        lambda: pool_backward(META, Y, AUX, mode),
        lambda: pool_function(X, TABLE, mode),
        lambda: KNNPoolFunction.apply(X, META, mode, True),
    ]
    for call in calls:
        refused(call, UnknownModeError, ValueError, message)


@pytest.mark.parametrize("rs", [0, 3, -1, 1000, True, False, 2.0, "2", [2], (1, 2)], ids=repr)
def test_unknown_heights(rs: Any) -> None:
    existing = ", ".join(str(rows) for rows in sorted(all_tile_heights()))
    message = f"rs = {rs!r}: no variant has tiles of that many rows; there are {existing}"
    refused(lambda: pool_forward(META, X, "max", rs), InvalidArgumentError, ValueError, message)
    refused(lambda: pool_backward(META, Y, AUX, "max", rs), InvalidArgumentError, ValueError, message)


WEIGHTS = torch.ones(2, 3)
OPTIONS = {
    "nan": ({"nan": "ignore"}, InvalidArgumentError, ValueError, "nan = 'ignore'; there are 'omit', 'propagate'"),
    "empty_value": (
        {"empty_value": "zero"},
        UnsupportedTypeError,
        TypeError,
        "empty_value must be a number, not 'zero'",
    ),
    "weights": ({"weights": WEIGHTS}, InvalidArgumentError, ValueError, "mode 'max' takes no weights"),
    "normalize": (
        {"normalize_weights": True},
        InvalidArgumentError,
        ValueError,
        "normalize_weights goes with mode 'weighted', not 'max'",
    ),
}


@pytest.mark.parametrize(("options", "ours", "builtin", "message"), OPTIONS.values(), ids=OPTIONS)
def test_bad_options(options: dict[str, Any], ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    refused(lambda: pool_forward(META, X, "max", **options), ours, builtin, message)
    refused(lambda: pool_function(X, TABLE, "max", **options), ours, builtin, message)


def test_a_value_that_the_dtype_does_not_hold_is_rounded() -> None:
    assert pool_forward(META, X.half(), "max", empty_value=-1e9)[0][:, 2].tolist() == [-torch.inf] * 2
    assert pool_forward(META, X.half(), "max", empty_value=torch.inf)[0][:, 2].tolist() == [torch.inf] * 2


WEIGHTED = {
    "missing": (None, InvalidArgumentError, ValueError, "mode 'weighted' needs weights [K, Nout]"),
    "list": ([[1.0]], UnsupportedTypeError, TypeError, "weights must be a floating-point tensor, not list"),
    "int": (TABLE, UnsupportedTypeError, TypeError, "weights must be a floating-point tensor, not torch.int64"),
    "shape": (
        WEIGHTS.T,
        InvalidArgumentError,
        ValueError,
        "weights have shape [3, 2], the table [K, Nout] = [2, 3]",
    ),
    "gradient": (
        WEIGHTS.clone().requires_grad_(),
        InvalidArgumentError,
        ValueError,
        "weights that require a gradient are not supported: detach them",
    ),
}


@pytest.mark.parametrize(("weights", "ours", "builtin", "message"), WEIGHTED.values(), ids=WEIGHTED)
def test_bad_weights(weights: Any, ours: type[KNNPoolError], builtin: type[Exception], message: str) -> None:
    refused(lambda: pool_forward(META, X, "weighted", weights=weights), ours, builtin, message)
    refused(lambda: pool_function(X, TABLE, "weighted", weights=weights), ours, builtin, message)
    refused(lambda: pool_backward(META, Y, None, "weighted", weights=weights), ours, builtin, message)


@pytest.mark.parametrize("value", ["sometimes", "", "OFF"])
def test_a_canary_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("KNNPOOL_CANARY", value)
    message = f"KNNPOOL_CANARY = {value!r}; allowed: off, first, always"
    refused(canary.setting, InvalidArgumentError, ValueError, message)
    monkeypatch.setenv("KNNPOOL_CANARY", "off")
    assert canary.setting() is canary.Canary.OFF


# Kernels that cannot be had. What a CUDA tensor would ask for is called directly.


@pytest.fixture
def fresh_doors() -> Iterator[None]:
    """The doors to CuPy and the headers, not yet opened."""
    doors = (cuda.nvrtc, cuda.driver, cuda.runtime, cuda.include_folder)
    for door in doors:
        door.cache_clear()
    yield
    for door in doors:
        door.cache_clear()


@pytest.fixture
def no_cupy(fresh_doors: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, package=None: None if name == "cupy" else original(name, package)
    )


@pytest.mark.usefixtures("no_cupy")
def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    configuration = Configuration(KERNEL, (), 1, 64, 0, 1)
    message = f"CUDA kernels are compiled and launched through CuPy, which is missing: {EXTRAS}"
    calls: list[Callable[[], object]] = [
        lambda: launch.launch(configuration, 0, {}),
        lambda: compile.cubin(KERNEL, "sm_90", ()),
        lambda: compile.compile_kernel(KERNEL, "sm_90"),
        cuda.runtime,
    ]
    for call in calls:
        refused(call, MissingDependencyError, ImportError, message)


@pytest.mark.usefixtures("fresh_doors")
def test_cupy_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it was missing is not remembered."""
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
        with pytest.raises(MissingDependencyError):
            cuda.nvrtc()
    assert cuda.nvrtc().getVersion()[0] >= 12


@pytest.mark.usefixtures("fresh_doors")
def test_without_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = importlib.import_module("cuda.pathfinder")
    with monkeypatch.context() as patch:
        patch.setattr(pathfinder, "find_nvidia_header_directory", lambda name: None)
        message = f"the CUDA headers (cuda_fp16.h) were not found: {EXTRAS}"
        refused(lambda: compile.compile_kernel(KERNEL, "sm_90"), MissingDependencyError, ImportError, message)
    assert (Path(cuda.include_folder()) / "cuda_fp16.h").is_file()


@pytest.mark.usefixtures("fresh_doors")
@pytest.mark.parametrize("missing", ["cuda", "cuda.pathfinder"])
def test_without_pathfinder(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    for name in [name for name in sys.modules if name == missing or name.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    message = f"the CUDA headers are found with cuda-pathfinder, which is missing: {EXTRAS}"
    refused(cuda.include_folder, MissingDependencyError, ImportError, message)


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the source of ``KERNEL`` in a folder of its own."""
    (tmp_path / KERNEL.file).parent.mkdir(parents=True)
    (tmp_path / KERNEL.file).write_bytes((compile.GENERATED / KERNEL.file).read_bytes())
    monkeypatch.setattr(compile, "GENERATED", tmp_path)
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path / "cubins"))
    return tmp_path


def test_a_source_that_nvrtc_refuses(generated: Path) -> None:
    source = (generated / KERNEL.file).read_text()
    broken = source.replace("{\n", "{\n    a fault;\n", 1)
    line = broken[: broken.index("a fault")].count("\n") + 1
    (generated / KERNEL.file).write_text(broken)
    kernel = replace(KERNEL, sha256=hashlib.sha256(broken.encode()).hexdigest())
    with pytest.raises(CompileError) as caught:
        compile.cubin(kernel, "sm_90", ())
    assert isinstance(caught.value, RuntimeError)
    start, log = str(caught.value).split("\n", 1)
    assert start.startswith(f"NVRTC could not compile generated/{KERNEL.file} for sm_90: NVRTC_ERROR_COMPILATION")
    assert re.search(rf"^{re.escape(Path(KERNEL.file).name)}\({line}\): error: .*a", log, re.MULTILINE)
    assert "a fault;" in log

    (generated / KERNEL.file).write_text(source)
    assert compile.cubin(KERNEL, "sm_90", ()).startswith(b"\x7fELF")
    good_call()


def test_a_dispatch_table_that_does_not_match(generated: Path) -> None:
    path = generated / KERNEL.file
    source = path.read_bytes()
    path.write_bytes(source + b"\n")
    message = (
        f"generated/{KERNEL.file} is not the source the dispatch table was generated with; run `knnpool-gen regenerate`"
    )
    refused(lambda: compile.cubin(KERNEL, "sm_90", ()), StaleDispatchError, RuntimeError, message)
    path.unlink()
    message = f"generated/{KERNEL.file} is missing though the dispatch table lists it; run `knnpool-gen regenerate`"
    refused(lambda: compile.cubin(KERNEL, "sm_90", ()), StaleDispatchError, RuntimeError, message)
    path.write_bytes(source)
    assert compile.read_source(KERNEL) == source.decode()


def test_errors_can_be_caught_by_one_name() -> None:
    caught = []
    for call in (
        lambda: pool_function(X, TABLE, "median"),
        lambda: pool_function(X, TABLE.float(), "max"),
        lambda: pool_function(X.long(), TABLE, "max"),
    ):
        try:
            call()
        except knnpool_gen.KNNPoolError as error:
            caught.append(type(error))
    assert caught == [UnknownModeError, UnsupportedTypeError, UnsupportedTypeError]


def test_a_table_in_place_of_a_plan() -> None:
    message = "meta is a Tensor, not a PoolMeta: build one with pool_meta_from_indices(indices, nin)"
    plan: Any = TABLE
    refused(lambda: pool_forward(plan, X, "max"), UnsupportedTypeError, TypeError, message)
    refused(lambda: pool_backward(plan, X, None, "avg"), UnsupportedTypeError, TypeError, message)


def test_options_of_the_wrong_type() -> None:
    no: Any = "no"
    message = "normalize_weights must be True or False, not 'no'"
    refused(
        lambda: pool_forward(META, X, "weighted", weights=WEIGHTS, normalize_weights=no),
        UnsupportedTypeError,
        TypeError,
        message,
    )
    message = "empty_value must be a number, not '0'"
    zero: Any = "0"
    refused(lambda: pool_forward(META, X, "max", empty_value=zero), UnsupportedTypeError, TypeError, message)


def test_a_layer_given_no_tensor() -> None:
    nothing: Any = [1.0]
    message = "x is a list, not a torch.Tensor"
    refused(lambda: optimized_pool_forward(object(), nothing), UnsupportedTypeError, TypeError, message)
