"""The names people import, how they are called, and what importing them costs."""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import knnpool_gen
from knnpool_gen import errors

REQUIRED = inspect.Parameter.empty

NAMES = [
    "CaptureError",
    "CompileError",
    "InvalidArgumentError",
    "KNNPool",
    "KNNPoolError",
    "KNNPoolFunction",
    "KernelError",
    "MissingDependencyError",
    "OutOfReachError",
    "PoolMeta",
    "SpecError",
    "StaleDispatchError",
    "UnknownModeError",
    "UnsupportedTypeError",
    "clear_pool_cache",
    "ensure_pool_metadata",
    "knn_table",
    "optimized_pool_forward",
    "pool_backward",
    "pool_forward",
    "pool_function",
    "pool_meta_from_indices",
    "prepare",
]

SEED = {
    "pool_meta_from_indices": {"indices": REQUIRED, "nin": REQUIRED, "device": None},
    "pool_forward": {"meta": REQUIRED, "x": REQUIRED, "mode": REQUIRED, "rs": None, "need_aux": True},
    "pool_backward": {"meta": REQUIRED, "grad_y": REQUIRED, "aux": REQUIRED, "mode": REQUIRED, "rs": None},
    "pool_function": {"x": REQUIRED, "indices": REQUIRED, "mode": REQUIRED},
    "optimized_pool_forward": {"layer": REQUIRED, "x": REQUIRED},
    "clear_pool_cache": {},
}
"""Positional arguments and defaults of the functions that this package takes over; options are keywords."""

TREE = {
    "KNNPoolError": (Exception,),
    "InvalidArgumentError": (errors.KNNPoolError, ValueError),
    "UnknownModeError": (errors.InvalidArgumentError,),
    "OutOfReachError": (errors.InvalidArgumentError,),
    "UnsupportedTypeError": (errors.KNNPoolError, TypeError),
    "SpecError": (errors.KNNPoolError, ValueError),
    "CaptureError": (errors.KNNPoolError, RuntimeError),
    "KernelError": (errors.KNNPoolError, RuntimeError),
    "MissingDependencyError": (errors.KernelError, ImportError),
    "CompileError": (errors.KernelError,),
    "StaleDispatchError": (errors.KernelError,),
}


def test_the_names() -> None:
    assert knnpool_gen.__all__ == NAMES
    assert dir(knnpool_gen) == sorted(NAMES)
    for name in NAMES:
        assert getattr(knnpool_gen, name).__name__ == name


def test_no_other_names() -> None:
    with pytest.raises(AttributeError, match=r"^module 'knnpool_gen' has no attribute 'pool'$"):
        _ = knnpool_gen.pool


@pytest.mark.parametrize(("name", "arguments"), SEED.items(), ids=SEED)
def test_signatures(name: str, arguments: dict[str, Any]) -> None:
    parameters = inspect.signature(getattr(knnpool_gen, name)).parameters.values()
    positional = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    others = [p for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]
    assert positional == arguments
    assert list(positional) == list(arguments)
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not REQUIRED for p in others)


def test_signature_of_ensure_pool_metadata() -> None:
    """The device may be left out here, which the seed did not allow."""
    parameters = inspect.signature(knnpool_gen.ensure_pool_metadata).parameters
    assert {name: p.default for name, p in parameters.items()} == {"layer": REQUIRED, "device": None}


def test_the_function_class() -> None:
    assert issubclass(knnpool_gen.KNNPoolFunction, torch.autograd.Function)
    assert list(inspect.signature(knnpool_gen.KNNPoolFunction.forward).parameters) == [
        "ctx", "x", "meta", "mode", "need_aux",
    ]  # fmt: skip
    assert isinstance(inspect.getattr_static(knnpool_gen.KNNPoolFunction, "backward"), staticmethod)


def test_the_fields_of_a_plan() -> None:
    fields = dataclasses.fields(knnpool_gen.PoolMeta)
    assert [field.name for field in fields if field.init] == [
        "nin", "nout", "k", "indices", "indices_i64", "count", "inv_count", "rev_rowptr", "rev_kn", "device",
    ]  # fmt: skip
    plan = knnpool_gen.pool_meta_from_indices(torch.tensor([[0, 3, 1]]), 3)
    again = knnpool_gen.PoolMeta(*(getattr(plan, field.name) for field in fields if field.init))
    for field in fields:
        value = getattr(plan, field.name)
        same: Callable[[Any, Any], bool] = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
        assert same(getattr(again, field.name), value), field.name
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.nin = 4  # type: ignore[misc]


def test_the_error_tree() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert defined == TREE.keys()
    assert {name: getattr(errors, name).__bases__ for name in TREE} == TREE
    for name in TREE:
        assert getattr(knnpool_gen, name) is getattr(errors, name)
        assert f"{name} " in (errors.__doc__ or "") or name == "KNNPoolError"


def test_typed() -> None:
    assert importlib.resources.files("knnpool_gen").joinpath("py.typed").is_file()


def loaded_after(code: str) -> set[str]:
    """Which of the heavy parts a fresh Python has loaded once it has run ``code``."""
    parts = ["torch", "numpy", "cupy", "yaml", "jinja2", "typer", "rich", "knnpool_gen.runtime", "knnpool_gen.codegen"]
    code += f"\nimport sys\nprint(*(part for part in {parts} if part in sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_loads_nothing() -> None:
    assert loaded_after("import knnpool_gen") == set()


def test_pooling_on_a_cpu_loads_torch_only() -> None:
    code = "import torch, knnpool_gen as k\nk.pool_function(torch.ones(2), torch.tensor([[0], [1]]), 'max')"
    assert loaded_after(code) == {"torch", "numpy", "knnpool_gen.runtime"}
