"""Building and the cache of builds."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from knnpool_gen.emulator import EmulationError, Launch, Program, Sanitizer, build
from knnpool_gen.emulator import toolchain as toolchain_module
from knnpool_gen.errors import KernelError

HERE = Path(__file__).parent
KERNELS = HERE / "kernels"


@pytest.fixture(scope="module")
def warm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the plain executor and header, which take longest to compile."""
    folder = tmp_path_factory.mktemp("cache")
    build(KERNELS / "preprocessor.cu", Sanitizer.NONE, cache_dir=folder)
    return folder


@pytest.fixture
def cache(warm_cache: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(warm_cache, tmp_path / "cache", copy_function=os.link))


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each compilation, by a g++ that keeps account."""
    log = tmp_path / "compilations"
    log.touch()
    wrapper = tmp_path / "bin" / "g++"
    wrapper.parent.mkdir()
    real = shutil.which("g++")
    wrapper.write_text(f'#!/bin/sh\ncase "$*" in --version) ;; *) echo "$*" >> {log};; esac\nexec {real} "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{wrapper.parent}{os.pathsep}{os.environ['PATH']}")
    return log


def counted(log: Path) -> int:
    return len(log.read_text().splitlines())


def chosen(program: Program) -> list[float]:
    y = np.zeros(2, np.float32)
    program.run("chooses", [Launch(1, 1, 0, (y,))])
    return y.tolist()


def test_what_is_in_the_cache_is_not_built_again(cache: Path, compilations: Path) -> None:
    program = build(KERNELS / "preprocessor.cu", Sanitizer.NONE, cache_dir=cache)

    assert chosen(program) == [1, 2]
    assert counted(compilations) == 0


def test_a_build_depends_on_all_that_goes_into_it(cache: Path, compilations: Path, tmp_path: Path) -> None:
    source = tmp_path / "preprocessor.cu"
    text = (KERNELS / "preprocessor.cu").read_text()
    source.write_text(text)
    same = build(source, Sanitizer.NONE, cache_dir=cache)
    assert counted(compilations) == 0

    defined = build(source, Sanitizer.NONE, defines={"NODES": "1"}, cache_dir=cache)
    source.write_text(text.replace("2.0f", "3.0f"))
    edited = build(source, Sanitizer.NONE, cache_dir=cache)

    assert counted(compilations) == 2
    assert len({same.path, defined.path, edited.path}) == 3
    assert (chosen(same), chosen(defined), chosen(edited)) == ([1, 2], [0, 2], [1, 3])


def test_a_comment_is_no_reason_to_build(cache: Path, compilations: Path, tmp_path: Path) -> None:
    source = tmp_path / "preprocessor.cu"
    text = (KERNELS / "preprocessor.cu").read_text()
    source.write_text(text.replace("// What", "// Now, what"))

    build(source, Sanitizer.NONE, cache_dir=cache)

    assert counted(compilations) == 0


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        ("preprocessor-*", "cut"),
        ("preprocessor-*", "changed"),
        ("preprocessor-*", "empty"),
        ("executor-*", "cut"),
        ("header-*/*", "changed"),
    ],
)
def test_a_damaged_file_is_made_again(cache: Path, compilations: Path, which: str, damage: str) -> None:
    (path,) = (path for path in cache.glob(which) if path.suffix != ".lock")
    whole = path.read_bytes()
    changed = whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]
    path.unlink()  # a link to the file of the warm cache
    path.write_bytes({"cut": whole[: len(whole) // 2], "changed": changed, "empty": b""}[damage])

    # Executor and header are only looked at when a program needs them.
    defines = {} if which == "preprocessor-*" else {"NODES": "1"}
    program = build(KERNELS / "preprocessor.cu", Sanitizer.NONE, defines=defines, cache_dir=cache)

    assert chosen(program) == [0 if defines else 1, 2]
    assert counted(compilations) == (2 if defines else 1)
    repaired = path.read_bytes()
    assert repaired[-32:] == hashlib.sha256(repaired[:-32]).digest()


def test_processes_that_need_the_same_build_share_it(tmp_path: Path, compilations: Path) -> None:
    command = [sys.executable, str(HERE / "build_one.py"), str(KERNELS / "preprocessor.cu"), str(tmp_path / "new")]
    children = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {child.communicate()[0] for child in children}

    assert [child.returncode for child in children] == [0, 0, 0]
    assert len(paths) == 1
    assert counted(compilations) == 3, "executor, header and program, once each"
    leftovers = [path.name for path in (tmp_path / "new").rglob(".*")]
    assert leftovers == []


def test_the_cache_is_where_the_environment_says(
    warm_cache: Path, compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KNNPOOL_EMULATOR_CACHE", str(warm_cache))

    assert build(KERNELS / "preprocessor.cu", Sanitizer.NONE).path.parent == warm_cache
    assert counted(compilations) == 0


def test_a_failed_build_shows_the_compilers_message(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cu"
    source.write_text((KERNELS / "preprocessor.cu").read_text().replace("2.0f", "two"))

    with pytest.raises(EmulationError, match=r"(?s)g\+\+ failed on wrong\.cu \(none\):.*wrong\.cu:10:.*'two' was not"):
        build(source, Sanitizer.NONE, cache_dir=cache)
    assert not list(cache.glob("wrong*[!k]"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("__global__ ", "", r"changed\.cu: there is no __global__ function"),
        ("y[0]", "__shared__ int a, b; y[0]", r"changed\.cu:8: this form of __shared__ declaration"),
    ],
)
def test_sources_that_cannot_be_emulated(cache: Path, tmp_path: Path, old: str, new: str, message: str) -> None:
    source = tmp_path / "changed.cu"
    source.write_text((KERNELS / "preprocessor.cu").read_text().replace(old, new))

    with pytest.raises(EmulationError, match=message):
        build(source, Sanitizer.NONE, cache_dir=cache)


def test_the_preprocessor_cannot_test_a_parameter(cache: Path) -> None:
    with pytest.raises(EmulationError, match=r"preprocessor\.cu:7: NODES is a variable in emulation"):
        build(KERNELS / "preprocessor.cu", Sanitizer.NONE, parameters=("NODES",), cache_dir=cache)


def test_a_macro_is_either_parameter_or_define(cache: Path) -> None:
    with pytest.raises(EmulationError, match="both parameter and define: NODES"):
        build(
            KERNELS / "preprocessor.cu",
            Sanitizer.NONE,
            parameters=("NODES",),
            defines={"NODES": "1"},
            cache_dir=cache,
        )


@pytest.fixture
def unknown_toolchain() -> object:
    """Forgets what was found on this machine, before and after."""
    toolchain_module.find_toolchain.cache_clear()
    yield
    toolchain_module.find_toolchain.cache_clear()


@pytest.mark.usefixtures("unknown_toolchain")
def test_a_missing_compiler_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(cache))

    with pytest.raises(EmulationError, match=r"needs g\+\+ 12 or later .*apt install g\+\+"):
        build(KERNELS / "preprocessor.cu", Sanitizer.NONE, cache_dir=cache)


@pytest.mark.usefixtures("unknown_toolchain")
def test_an_old_compiler_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho 'g++ (GCC) 9.4.0'\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(EmulationError, match=r"needs g\+\+ 12 or later .*found g\+\+ \(GCC\) 9\.4\.0"):
        build(KERNELS / "preprocessor.cu", Sanitizer.NONE, cache_dir=cache)


@pytest.mark.usefixtures("unknown_toolchain")
def test_missing_headers_are_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "nvidia.cuda_nvcc" else find_spec(name)
    )

    with pytest.raises(EmulationError, match=r"headers, nvidia-cuda-nvcc-cu12: pip install 'knnpool-gen\[dev\]'"):
        build(KERNELS / "preprocessor.cu", Sanitizer.NONE, cache_dir=cache)


def test_the_error_is_one_of_the_packages() -> None:
    assert issubclass(EmulationError, KernelError)
    assert issubclass(EmulationError, RuntimeError)
