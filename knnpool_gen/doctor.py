"""What ``knnpool-gen doctor`` looks at: everything that pooling on this machine needs, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from knnpool_gen import folders
from knnpool_gen.errors import KNNPoolError, MissingDependencyError, StaleDispatchError
from knnpool_gen.runtime.cuda import EXTRAS

PACKAGES = ("knnpool-gen", "torch", "numpy", "rich", "typer")
CUPY = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
OPTIONAL = {"matplotlib": "bench", "scipy": "points"}
"""Packages that only an extra brings."""
SETTINGS = ("KNNPOOL_CACHE_DIR", "KNNPOOL_CANARY", "KNNPOOL_TUNED")
EXAMPLE_ARCH = "sm_80"
"""What one kernel is compiled for where there is no device."""


class State(str, Enum):
    """What a look has found."""

    OK = "ok"
    NOTE = "note"
    """Something is missing that pooling here does without."""
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    subject: str
    state: State
    text: str
    mend: str = ""
    """The command, or the change, that puts it right."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Look at everything, in the order in which things need each other; nothing is raised."""
    on_gpu = _has_device()
    with_cupy = importlib.util.find_spec("cupy") is not None
    yield _look("versions", _versions)
    yield _look("folders", _folders)
    for package in ("cupy", *OPTIONAL):
        yield _look(package, partial(_package, package))
    yield _look("device", _device)
    yield _look("nvrtc", _nvrtc, needed=on_gpu)
    yield _look("headers", _headers, needed=on_gpu)
    yield _look("settings", _settings)
    yield _look("cache", _cache)
    yield _look("tuned", _tuned)
    yield _look("generated", _generated)
    if with_cupy or on_gpu:
        yield _look("compile", _compile)
    if on_gpu:
        yield _look("launch", _launch)


def _look(subject: str, look: Callable[[], Finding | str], needed: bool = True) -> Finding:
    """What ``look`` says; what it raises is a problem where it is ``needed``, and worth a note elsewhere."""
    try:
        found = look()
    except Exception as error:
        state = State.PROBLEM if needed else State.NOTE
        return Finding(subject, state, f"{type(error).__name__}: {error}", _mend(error))
    return Finding(subject, State.OK, found) if isinstance(found, str) else found


def _mend(error: Exception) -> str:
    """The command that does away with ``error``, if it is one of ours that has one."""
    if isinstance(error, StaleDispatchError):
        return "knnpool-gen regenerate"
    return _install_cuda() if isinstance(error, MissingDependencyError) else ""


def _versions() -> str:
    import torch

    known = [f"{package} {_version(package) or 'from source'}" for package in PACKAGES]
    cuda = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for the CPU only"
    return f"Python {platform.python_version()}, {', '.join(known)}; {cuda}"


def _folders() -> Finding | str:
    """Whether all that is imported comes from one checkout or one installed package."""
    parts = folders.parts()
    package = parts.pop("knnpool_gen")
    homes = {folder.parent for folder in parts.values()}
    if homes in ({package}, {package.parent}):
        return f"package {package}; {', '.join(parts)} in {homes.pop()}"
    listed = ", ".join(f"{part} {folder}" for part, folder in parts.items())
    text = f"parts of several checkouts: package {package}, but {listed}"
    return Finding("folders", State.PROBLEM, text, f"pip install --editable {package.parent}")


def _package(name: str) -> Finding:
    """An optional package; CuPy comes under several names, of which one may be installed."""
    names = CUPY if name == "cupy" else (name,)
    found = [f"{candidate} {version}" for candidate in names if (version := _version(candidate))]
    if len(found) > 1:
        too_many = " and ".join(found)
        return Finding(
            name, State.PROBLEM, f"{too_many} are in each other's way", f"pip uninstall {found[0].split()[0]}"
        )
    if found:
        return Finding(name, State.OK, found[0])
    if name == "cupy":
        return Finding(name, State.PROBLEM if _has_device() else State.NOTE, "not installed", _install_cuda())
    return Finding(name, State.NOTE, "not installed", f"pip install 'knnpool-gen[{OPTIONAL[name]}]'")


def _device() -> Finding | str:
    import torch

    from knnpool_gen.runtime.launch import device_facts

    if not _has_device():
        return Finding("device", State.NOTE, "no CUDA device that torch can use; CPU tensors run in plain torch")
    facts = device_facts(torch.cuda.current_device())
    return (
        f"{facts.label}, {facts.multiprocessors} multiprocessors of {facts.threads_per_multiprocessor} threads and "
        f"{facts.shared_per_multiprocessor} bytes of shared memory, {facts.shared_per_block} a block"
    )


def _nvrtc() -> str:
    from knnpool_gen.runtime import cuda

    version = cuda.nvrtc().getVersion()
    return f"{version[0]}.{version[1]}"


def _headers() -> str:
    from knnpool_gen.runtime import cuda

    return cuda.include_folder()


def _settings() -> Finding | str:
    from knnpool_gen.runtime import canary

    try:
        canary.setting()
    except KNNPoolError as error:
        return Finding("settings", State.PROBLEM, str(error), "unset KNNPOOL_CANARY")
    unknown = sorted(name for name in os.environ if name.startswith("KNNPOOL_") and name not in SETTINGS)
    if unknown:
        return Finding("settings", State.NOTE, f"nothing reads {', '.join(unknown)}", f"unset {' '.join(unknown)}")
    values = [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return ", ".join(values) or f"none of {', '.join(SETTINGS)}"


def _cache() -> Finding | str:
    from knnpool_gen.runtime.compile import cache_folder

    folder = cache_folder()
    fault = _cannot_write(folder)
    if fault:
        return Finding("cache", State.PROBLEM, f"{folder}: {fault}", "export KNNPOOL_CACHE_DIR=FOLDER")
    sizes = [path.stat().st_size for path in folder.glob("*.cubin")]
    return f"{folder}, {len(sizes)} compiled kernels, {sum(sizes)} bytes"


def _tuned() -> Finding | str:
    from knnpool_gen.generated.dispatch import KERNELS
    from knnpool_gen.runtime.tuned import read_tuned, tuned_file

    path = tuned_file()
    if path is None:
        return "off"
    try:
        kept = read_tuned(path)
    except KNNPoolError as error:
        return Finding("tuned", State.PROBLEM, str(error), f"rm {path}")
    choices = [choice for entries in kept.values() for choice in entries]
    stale = {choice.variant for choice in choices} - {kernel.name for kernel in KERNELS.values()}
    if stale:
        text = f"{path} names variants that do not exist: {', '.join(sorted(stale))}"
        return Finding("tuned", State.PROBLEM, text, f"rm {path}")
    fault = _cannot_write(path.parent)
    if fault:
        return Finding("tuned", State.NOTE, f"{path}: {fault}", "export KNNPOOL_TUNED=FILE")
    return f"{path}, {len(choices)} choice(s)" + (f" for {', '.join(kept)}" if kept else "")


def _generated() -> Finding | str:
    from knnpool_gen.codegen.checkout import compare_generated

    comparison = compare_generated()
    differing = len(comparison.changed) + len(comparison.missing) + len(comparison.orphaned)
    if differing:
        text = f"{differing} file(s) differ from specs and templates"
        return Finding("generated", State.PROBLEM, text, "knnpool-gen regenerate")
    return f"{len(comparison.same)} files in {folders.generated()} are up to date"


def _compile() -> str:
    import torch

    from knnpool_gen.generated.dispatch import KERNELS
    from knnpool_gen.runtime.compile import compile_kernel

    arch = EXAMPLE_ARCH
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        arch = f"sm_{major}{minor}"
    kernel = next(iter(KERNELS.values()))
    binary, resources = compile_kernel(kernel, arch)
    return f"{kernel.name} for {arch}: {len(binary)} bytes, {resources.registers} registers"


def _launch() -> str:
    import torch

    from knnpool_gen.pooling import pool_forward
    from knnpool_gen.runtime.plan import pool_meta_from_indices

    indices = torch.tensor([[0, 1], [2, 3]], device="cuda")
    y, aux = pool_forward(pool_meta_from_indices(indices, 3), torch.tensor([[1.0, 2.0, 3.0]], device="cuda"), "max")
    assert aux is not None
    if (y.tolist(), aux.tolist()) != ([[3.0, 2.0]], [[1, 0]]):
        raise RuntimeError(f"a kernel gave {y.tolist()} and {aux.tolist()} in place of [[3.0, 2.0]] and [[1, 0]]")
    return "a pool of three values is right"


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


def _install_cuda() -> str:
    """The extra that goes with the CUDA that torch was built for."""
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    return f"pip install 'knnpool-gen[cuda{major}]'" if major in ("12", "13") else EXTRAS


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cannot_write(folder: Path) -> str | None:
    """Why no file can be made in ``folder``, which may not exist yet; None if one can."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"cannot be written ({error.strerror})"
