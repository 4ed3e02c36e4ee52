"""From source to cubin, and the cache on disk. A stand-in for NVRTC counts what it is asked; the real one is last."""

from __future__ import annotations

import hashlib
import re
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from knnpool_gen.errors import CompileError, StaleDispatchError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel
from knnpool_gen.runtime import compile as module
from knnpool_gen.runtime import cuda
from knnpool_gen.runtime.compile import Resources, cache_folder, compile_kernel, cubin, read_source

KERNEL = next(iter(KERNELS.values()))
MACROS = (("KNNPOOL_K", 9), ("KNNPOOL_INDEX", "unsigned short"))


class NVRTCError(RuntimeError):
    """What CuPy raises."""


@dataclass
class Compiler:
    """Looks like ``cupy.cuda.nvrtc``; its cubin is made of what it was given."""

    programs: list[tuple[str, str]] = field(default_factory=list)
    options: list[tuple[str, ...]] = field(default_factory=list)
    destroyed: int = 0
    version: tuple[int, int] = (12, 9)
    log: str = ""
    fails: bool = False
    NVRTCError = NVRTCError

    def getVersion(self) -> tuple[int, int]:  # noqa: N802
        return self.version

    def createProgram(self, source: str, name: str, headers: Any, include_names: Any) -> int:  # noqa: N802
        self.programs.append((source, name))
        return len(self.programs) - 1

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:  # noqa: N802
        self.options.append(options)
        if self.fails:
            raise NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    def getCUBIN(self, program: int) -> bytes:  # noqa: N802
        return b"\x7fELF" + repr((self.programs[program], self.options[-1])).encode() * 50

    def getProgramLog(self, program: int) -> str:  # noqa: N802
        return self.log

    def destroyProgram(self, program: int) -> None:  # noqa: N802
        self.destroyed += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(cuda, "nvrtc", lambda: compiler)
    monkeypatch.setattr(cuda, "include_folder", lambda: "/cuda/include")
    return compiler


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "a folder" / "cubins"
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of generated files with the source of ``KERNEL`` in it."""
    folder = tmp_path / "generated"
    (folder / "cuda").mkdir(parents=True)
    (folder / KERNEL.file).write_bytes((module.GENERATED / KERNEL.file).read_bytes())
    monkeypatch.setattr(module, "GENERATED", folder)
    return folder


def with_source(generated: Path, source: str) -> Kernel:
    (generated / KERNEL.file).write_text(source)
    return replace(KERNEL, sha256=hashlib.sha256(source.encode()).hexdigest())


# The cache.


def test_a_hit_compiles_nothing(compiler: Compiler, cache: Path) -> None:
    first = cubin(KERNEL, "sm_90", MACROS)
    assert cubin(KERNEL, "sm_90", MACROS) == first
    assert len(compiler.programs) == 1
    (kept,) = cache.iterdir()
    assert re.fullmatch(re.escape(KERNEL.name) + r"-[0-9a-f]{32}\.cubin", kept.name)
    assert kept.read_bytes() == hashlib.sha256(first).hexdigest().encode() + first


def test_everything_that_matters_is_in_the_key(compiler: Compiler, cache: Path, generated: Path) -> None:
    other = next(kernel for kernel in KERNELS.values() if kernel.name != KERNEL.name)
    (generated / other.file).write_bytes((Path(module.folders.generated()) / other.file).read_bytes())
    results = {
        cubin(KERNEL, "sm_90", MACROS),
        cubin(KERNEL, "sm_80", MACROS),
        cubin(KERNEL, "sm_90", ()),
        cubin(KERNEL, "sm_90", (("KNNPOOL_K", 10), MACROS[1])),
        cubin(KERNEL, "sm_90", (MACROS[0], ("KNNPOOL_INDEX", "int"))),
        cubin(other, "sm_90", MACROS),
        cubin(with_source(generated, "// another source\n"), "sm_90", MACROS),
    }
    assert len(results) == len(compiler.programs) == len(list(cache.iterdir())) == 7
    compiler.version = (13, 0)
    cubin(other, "sm_90", MACROS)
    assert len(compiler.programs) == len(list(cache.iterdir())) == 8


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "longer", "digest"])
def test_a_damaged_file_is_replaced(compiler: Compiler, cache: Path, damage: str) -> None:
    expected = cubin(KERNEL, "sm_90", MACROS)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(
        {
            "empty": b"",
            "cut": whole[:-1],
            "changed": whole[:100] + b"?" + whole[101:],
            "longer": whole + b"\0",
            "digest": b"0" * 64 + whole[64:],
        }[damage]
    )
    assert cubin(KERNEL, "sm_90", MACROS) == expected
    assert kept.read_bytes() == whole
    assert len(compiler.programs) == 2


def test_a_folder_that_cannot_be_written(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file stands where the folder should be, which stops root as well."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(blocked / "cubins"))
    message = rf"^compiled kernels cannot be kept in {re.escape(str(blocked / 'cubins'))} \(.*KNNPOOL_CACHE_DIR"
    for calls in (1, 2):
        with pytest.warns(UserWarning, match=message):
            assert cubin(KERNEL, "sm_90", MACROS).startswith(b"\x7fELF")
        assert len(compiler.programs) == calls


def test_a_write_that_fails_leaves_nothing(compiler: Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "replace", full)
        with pytest.warns(UserWarning, match="No space left on device"):
            expected = cubin(KERNEL, "sm_90", MACROS)
    assert list(cache.iterdir()) == []
    assert cubin(KERNEL, "sm_90", MACROS) == expected
    assert len(list(cache.iterdir())) == 1


def test_writers_at_once_leave_one_whole_file(compiler: Compiler, cache: Path) -> None:
    barrier = threading.Barrier(8)
    results: list[bytes] = []

    def write() -> None:
        barrier.wait()
        results.append(cubin(KERNEL, "sm_90", MACROS))

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    (binary,) = set(results)
    (kept,) = cache.iterdir()
    assert kept.read_bytes() == hashlib.sha256(binary).hexdigest().encode() + binary
    before = len(compiler.programs)
    assert cubin(KERNEL, "sm_90", MACROS) == binary
    assert len(compiler.programs) == before


def test_where_cubins_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    for unset in (lambda: monkeypatch.setenv("KNNPOOL_CACHE_DIR", ""), lambda: monkeypatch.delenv("KNNPOOL_CACHE_DIR")):
        unset()
        assert cache_folder().name == "cubin"
        assert "knnpool-gen" in cache_folder().parts


# What NVRTC is told.


def test_the_options(compiler: Compiler, cache: Path) -> None:
    cubin(KERNEL, "sm_90", MACROS)
    compile_kernel(KERNEL, "sm_75", [("KNNPOOL_NOUT", 3)])
    compile_kernel(KERNEL, "sm_80")
    common = ("-std=c++17", "-Xptxas=-v")
    assert compiler.options == [
        ("-arch=sm_90", *common, "-DKNNPOOL_K=9", "-DKNNPOOL_INDEX=unsigned short", "-I/cuda/include"),
        ("-arch=sm_75", *common, "-DKNNPOOL_NOUT=3", "-I/cuda/include"),
        ("-arch=sm_80", *common, "-I/cuda/include"),
    ]
    # Neither may ever be asked for: denormals are kept and divisions are IEEE's.
    assert not [option for options in compiler.options for option in options if re.search("ftz|fast|prec", option)]
    assert compiler.programs == 3 * [(read_source(KERNEL), Path(KERNEL.file).name)]
    assert compiler.destroyed == 3


def test_a_refused_source_shows_the_log(compiler: Compiler, cache: Path) -> None:
    compiler.fails, compiler.log = True, "x.cu(3): error: no\n\0"
    with pytest.raises(CompileError) as caught:
        cubin(KERNEL, "sm_90", MACROS)
    assert str(caught.value) == (
        f"NVRTC could not compile generated/{KERNEL.file} for sm_90: NVRTC_ERROR_COMPILATION (6)\nx.cu(3): error: no"
    )
    assert compiler.destroyed == 1
    assert not cache.exists()
    compiler.fails = False
    assert cubin(KERNEL, "sm_90", MACROS).startswith(b"\x7fELF")


LOGS = {
    "plain": (
        "ptxas info    : 0 bytes gmem\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\n"
        "ptxas info    : Function properties for k\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 48 registers, used 1 barriers\n",
        Resources(48, 0, 0, 0),
    ),
    "spilling": (
        "    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size, 4096 bytes smem, "
        "400 bytes cmem[0]\n",
        Resources(255, 36, 24, 4096),
    ),
    "nothing": ("", Resources(0, 0, 0, 0)),
}


@pytest.mark.parametrize(("log", "resources"), LOGS.values(), ids=LOGS)
def test_resources_are_read_from_the_log(compiler: Compiler, log: str, resources: Resources) -> None:
    compiler.log = log
    assert compile_kernel(KERNEL, "sm_90")[1] == resources


# The sources.


def test_a_missing_source(generated: Path) -> None:
    (generated / KERNEL.file).unlink()
    with pytest.raises(StaleDispatchError) as caught:
        read_source(KERNEL)
    assert str(caught.value) == (
        f"generated/{KERNEL.file} is missing though the dispatch table lists it; run `knnpool-gen regenerate`"
    )


def test_a_changed_source_is_not_used(compiler: Compiler, cache: Path, generated: Path) -> None:
    """Not even where the cubin of the right one is at hand."""
    expected = cubin(KERNEL, "sm_90", MACROS)
    source = (generated / KERNEL.file).read_bytes()
    (generated / KERNEL.file).write_bytes(source.replace(b"0", b"1", 1))
    with pytest.raises(StaleDispatchError) as caught:
        cubin(KERNEL, "sm_90", MACROS)
    assert str(caught.value) == (
        f"generated/{KERNEL.file} is not the source the dispatch table was generated with; run `knnpool-gen regenerate`"
    )
    (generated / KERNEL.file).write_bytes(source)
    assert cubin(KERNEL, "sm_90", MACROS) == expected
    assert len(compiler.programs) == 1


# NVRTC itself.

SOURCE = """\
extern "C" __global__ void k(float* values) {
    __shared__ float shared[100];
    shared[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = shared[99 - threadIdx.x] + KNNPOOL_K;
}
"""


def test_nvrtc_compiles(generated: Path) -> None:
    kernel = with_source(generated, SOURCE)
    binary, resources = compile_kernel(kernel, "sm_90", [("KNNPOOL_K", 3)])
    assert binary.startswith(b"\x7fELF")
    assert resources.static_shared_bytes == 400
    assert resources.spill_bytes == resources.stack_bytes == 0
    assert resources.registers > 0


def test_nvrtc_refuses(generated: Path) -> None:
    kernel = with_source(generated, SOURCE.replace("KNNPOOL_K", "missing"))
    with pytest.raises(CompileError) as caught:
        compile_kernel(kernel, "sm_90")
    name = Path(KERNEL.file).name
    assert str(caught.value).startswith(f"NVRTC could not compile generated/{KERNEL.file} for sm_90: NVRTC_ERROR_")
    assert f'{name}(5): error: identifier "missing" is undefined' in str(caught.value)
    compile_kernel(with_source(generated, SOURCE), "sm_90", [("KNNPOOL_K", 3)])


def test_nvrtc_does_not_know_the_architecture(generated: Path) -> None:
    kernel = with_source(generated, SOURCE)
    with pytest.raises(CompileError, match="sm_1234: NVRTC_ERROR_INVALID_OPTION"):
        compile_kernel(kernel, "sm_1234", [("KNNPOOL_K", 3)])


def test_the_headers_are_where_it_says() -> None:
    assert (Path(cuda.include_folder()) / "cuda_fp16.h").is_file()
