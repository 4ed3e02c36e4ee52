"""The command line: what it prints where, how it ends, and what it writes. The committed files are never written."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commands import Ended, Run
from knnpool_gen import compilation, folders
from knnpool_gen.cli import ARCHITECTURES
from knnpool_gen.codegen.outputs import BANNER, banner
from knnpool_gen.codegen.render import Renderer
from knnpool_gen.codegen.spec import load_specs
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.kernel import Kernel, KernelKey
from knnpool_gen.runtime import compile, cuda
from knnpool_gen.runtime.compile import Resources
from knnpool_gen.vocabulary import Direction, Mode, Staging

KEY = KernelKey(Direction.FORWARD, Mode.SUM, "float32", Staging.SHARED, 1)
KERNEL = KERNELS[KEY]
NAME = KERNEL.name
SOURCE = (folders.generated() / KERNEL.file).read_text()
REPAIR = "run `knnpool-gen regenerate`"
STALE = f"generated/{KERNEL.file} is not the source the dispatch table was generated with; {REPAIR}"
FILES = len(KERNELS) + 2
UP_TO_DATE = f"{len(KERNELS)} variants, {FILES} file(s) up to date\n"


@pytest.fixture
def out(tmp_path: Path, run: Run) -> Path:
    """A copy of the generated files, made by the command itself."""
    folder = tmp_path / "generated"
    assert run("regenerate", "--out", folder).code == 0
    return folder


def copy(source: Path, target: Path) -> Path:
    for path in (*source.rglob("*.yaml"), *source.rglob("*.jinja")):
        (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        (target / path.relative_to(source)).write_bytes(path.read_bytes())
    return target


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def state(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time and content of every file: all stay as long as nobody writes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# --- regenerate


def test_regenerate_writes_what_is_missing(run: Run, tmp_path: Path) -> None:
    ended = run("regenerate", "--out", tmp_path / "new" / "folder")
    *created, last = ended.stdout.splitlines(keepends=True)
    assert (ended.code, last, ended.stderr) == (0, UP_TO_DATE, "")
    assert f"created  folder/{KERNEL.file}\n" in created
    assert len(created) == FILES
    written = {path.name: content for path, (_, _, content) in state(tmp_path).items() for path in [Path(path)]}
    assert written[f"{NAME}.cu"] == SOURCE.encode()
    assert len(written) == FILES


def test_regenerate_twice_touches_nothing(run: Run, out: Path) -> None:
    before = state(out)
    assert run("regenerate", "--out", out) == Ended(0, UP_TO_DATE, "")
    assert run("regenerate", "--out", out, "--check", "--diff") == Ended(0, UP_TO_DATE, "")
    assert state(out) == before


def test_the_committed_files_are_up_to_date(run: Run) -> None:
    assert run("regenerate", "--check") == Ended(0, UP_TO_DATE, "")


def test_a_folder_that_is_named_by_a_dot(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (out / KERNEL.file).unlink()
    monkeypatch.chdir(out)
    assert run("regenerate", "--out", ".").stdout == f"created  generated/{KERNEL.file}\n{UP_TO_DATE}"


def differing(count: int) -> str:
    return f"{count} file(s) differ from specs and templates; {REPAIR}\n"


def test_check_finds_one_character(run: Run, out: Path) -> None:
    (out / KERNEL.file).write_text(SOURCE.replace("0", "1", 1))
    before = state(out)
    assert run("regenerate", "--check", "--out", out) == Ended(1, f"differs  generated/{KERNEL.file}\n", differing(1))
    assert state(out) == before
    assert run("regenerate", "--out", out) == Ended(0, f"updated  generated/{KERNEL.file}\n{UP_TO_DATE}", "")
    assert (out / KERNEL.file).read_text() == SOURCE


def test_check_finds_orphans_and_leaves_other_files_alone(run: Run, out: Path) -> None:
    (out / "cuda" / "mine.cu").write_text("// mine\n")
    (out / "old").mkdir()
    (out / "old" / "gone.cu").write_text(banner("//", "gone") + "\n")
    before = state(out)
    assert run("regenerate", "--check", "--out", out) == Ended(1, "orphaned generated/old/gone.cu\n", differing(1))
    assert state(out) == before
    assert run("regenerate", "--out", out) == Ended(0, f"removed  generated/old/gone.cu\n{UP_TO_DATE}", "")
    assert not (out / "old").exists()
    assert (out / "cuda" / "mine.cu").read_text() == "// mine\n"


def test_check_of_a_folder_that_is_not_there(run: Run, tmp_path: Path) -> None:
    ended = run("regenerate", "--check", "--out", tmp_path / "nowhere")
    assert (ended.code, ended.stderr) == (1, differing(FILES))
    assert f"missing  nowhere/{KERNEL.file}\n" in ended.stdout
    assert list(tmp_path.iterdir()) == []


def test_check_finds_an_edited_template(run: Run, out: Path, tmp_path: Path) -> None:
    templates = copy(folders.templates(), tmp_path / "templates")
    replace(templates / "init.py.jinja", "The generated kernels", "These kernels")
    arguments = ("regenerate", "--check", "--diff", "--templates", templates, "--out", out)
    before = state(out)
    text = (out / "__init__.py").read_text()
    line = text.splitlines()[-1]
    assert run(*arguments) == Ended(
        1,
        "--- a/__init__.py\n+++ b/__init__.py\n@@ -1,4 +1,4 @@\n"
        + "".join(f" {context}\n" for context in text.splitlines()[:-1])
        + f"-{line}\n+{line.replace('The generated', 'These')}\n"
        + "differs  generated/__init__.py\n",
        differing(1),
    )
    assert state(out) == before


def test_a_diff_is_printed_as_it_is(run: Run, out: Path) -> None:
    """Neither markup nor emoji are read into it, and blanks stay what they are."""
    line = "\tx = a[bold] ? :warning: b :x: c;  [/] \r\n"
    with (out / KERNEL.file).open("a", newline="") as file:
        file.write(line)
    expected = Renderer(folders.templates()).outputs(load_specs(folders.specs()).variants).diff(out)
    assert f"\n-{line}" in expected
    ended = run("regenerate", "--check", "--diff", "--out", out)
    assert (ended.code, ended.stdout) == (1, f"{expected}differs  generated/{KERNEL.file}\n")


def test_diff_without_check_shows_and_writes(run: Run, out: Path) -> None:
    (out / KERNEL.file).write_text(SOURCE + "// mine\n")
    ended = run("regenerate", "--diff", "--out", out)
    assert ended.code == 0
    assert ended.stdout.endswith(f"\n-// mine\nupdated  generated/{KERNEL.file}\n{UP_TO_DATE}")
    assert (out / KERNEL.file).read_text() == SOURCE


@pytest.mark.parametrize("options", [[], ["--check"], ["--diff"]])
def test_bad_specs_write_nothing(run: Run, out: Path, tmp_path: Path, options: list[str]) -> None:
    specs = copy(folders.specs(), tmp_path / "specs")
    replace(specs / "variants.yaml", "direction: [forward, backward]", "direction: [forward, sideways]")
    replace(specs / "dtypes.yaml", "vector: 2", "vector: 64")
    numbers = {
        name: next(n for n, line in enumerate((specs / name).read_text().splitlines(), 1) if text in line)
        for name, text in (("variants.yaml", "sideways"), ("dtypes.yaml", ": 64"))
    }
    (out / KERNEL.file).unlink()
    before = state(out)
    assert run("regenerate", "--specs", specs, "--out", out, *options) == Ended(
        2,
        "",
        f"knnpool-gen: specs/dtypes.yaml:{numbers['dtypes.yaml']}: "
        "vector of dtype 'float64' must be a power of two from 1 to 16, not 64\n"
        f"specs/variants.yaml:{numbers['variants.yaml']}: "
        "unknown direction 'sideways'; allowed: forward, backward\n",
    )
    assert state(out) == before


def test_bad_templates_write_nothing(run: Run, out: Path, tmp_path: Path) -> None:
    templates = copy(folders.templates(), tmp_path / "templates")
    (templates / "init.py.jinja").write_text("{{ banner }}\n{{ nothing }}\n")
    (out / KERNEL.file).unlink()
    before = state(out)
    message = "knnpool-gen: template init.py.jinja:2: 'nothing' is undefined\n"
    assert run("regenerate", "--templates", templates, "--out", out) == Ended(2, "", message)
    assert state(out) == before


def test_folders_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    ended = run("regenerate", "--specs", missing, "--out", tmp_path / "out")
    assert (ended.code, ended.stdout) == (2, "")
    assert "missing/variants.yaml:1: cannot be read: No such file or directory\n" in ended.stderr
    ended = run("regenerate", "--templates", missing, "--out", tmp_path / "out")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr == f"knnpool-gen: there is no folder of templates {missing}\n"
    (tmp_path / "file").write_text("mine")
    ended = run("regenerate", "--out", tmp_path / "file")
    assert (ended.code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"knnpool-gen: cannot read {tmp_path / 'file'}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# --- list and show


def test_list_shows_every_variant_in_full(run: Run) -> None:
    ended = run("list")
    assert (ended.code, ended.stderr) == (0, "")
    head, *lines = ended.stdout.splitlines()
    assert head.split() == ["variant", "arguments", "bytes", "a", "node"]
    assert [line.split()[0] for line in lines] == [kernel.name for kernel in KERNELS.values()]
    for line, kernel in zip(lines, KERNELS.values(), strict=True):
        assert line.split()[1:] == [*", ".join(kernel.arguments).split(), str(kernel.node_bytes)]


def test_list_as_json_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "knnpool_gen.cli", "list", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    entries = json.loads(done.stdout)
    assert [entry["variant"] for entry in entries] == [kernel.name for kernel in KERNELS.values()]
    assert entries[list(KERNELS).index(KEY)] == {
        "variant": "knnpool_forward_sum_float32_shared_r1",
        "direction": "forward",
        "mode": "sum",
        "dtype": "float32",
        "staging": "shared",
        "rows": 1,
        "file": "generated/cuda/knnpool_forward_sum_float32_shared_r1.cu",
        "arguments": ["x", "indices", "y", "rows"],
        "node_bytes": 4,
    }


def test_list_for_a_problem(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = run("list", "--problem", "964", "230", "9", "--rows", "64", "--json")
    assert (ended.code, ended.stderr) == (0, "")
    chosen = {entry["variant"] for entry in json.loads(ended.stdout)}
    assert chosen <= {kernel.name for kernel in KERNELS.values()}
    ended = run("list", "--problem", "964", "230", "9", "--rows", "64")
    assert (ended.code, ended.stderr) == (
        0,
        "Nin 964, Nout 230, K 9, 64 rows, on an H200 (there is no CUDA device here)\n",
    )
    assert {line.split()[0] for line in ended.stdout.splitlines()[1:]} == chosen
    ended = run("list", "--problem", "964", "-1", "9")
    assert (ended.code, ended.stdout) == (2, "")
    assert "Nout -1" in ended.stderr


def test_show_prints_the_facts_and_the_source(run: Run) -> None:
    ended = run("show", NAME)
    assert (ended.code, ended.stderr) == (0, "")
    facts, _, source = ended.stdout.partition(f"// {NAME}\n")
    assert f"// {NAME}\n{source}" == SOURCE
    assert "// rows: 1\n" in facts
    assert f"// file: generated/{KERNEL.file}\n" in facts
    assert all(line.startswith("// ") for line in facts.splitlines())


@pytest.mark.parametrize("command", ["show", "compile", "verify"])
def test_an_unknown_variant(run: Run, command: str) -> None:
    message = f"knnpool-gen: no variant [red]:x:; `knnpool-gen list` shows all {len(KERNELS)}\n"
    assert run(command, "[red]:x:") == Ended(2, "", message)


def test_all_unknown_variants_are_named(run: Run) -> None:
    message = f"knnpool-gen: no variant one, two; `knnpool-gen list` shows all {len(KERNELS)}\n"
    assert run("compile", "one", NAME, "two", "--json") == Ended(2, "", message)


# --- files that do not belong together


@pytest.fixture
def edited(out: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Generated files of which one was edited by hand."""
    monkeypatch.setattr(compile, "GENERATED", out)
    (out / KERNEL.file).write_text(SOURCE + "// mine\n")
    return out


@pytest.mark.usefixtures("edited")
@pytest.mark.parametrize("arguments", [("show",), ("compile", "--arch", "sm_90")], ids=["show", "compile"])
def test_an_edited_source_is_neither_shown_nor_compiled(run: Run, arguments: tuple[str, ...]) -> None:
    assert run(*arguments, NAME) == Ended(2, "", f"knnpool-gen: {STALE}\n")


@pytest.mark.usefixtures("edited")
def test_an_edited_source_does_not_pass_verification(run: Run) -> None:
    ended = run("verify", "--emulate", NAME, "--json")
    assert ended.code == 1
    (verdict,) = json.loads(ended.stdout)
    assert verdict["faults"] == [STALE]
    assert f"{NAME}: {STALE}\n" in run("verify", "--emulate", NAME).stderr


def test_a_missing_source(run: Run, edited: Path) -> None:
    (edited / KERNEL.file).unlink()
    message = f"generated/{KERNEL.file} is missing though the dispatch table lists it; {REPAIR}"
    assert run("show", NAME) == Ended(2, "", f"knnpool-gen: {message}\n")


@pytest.mark.parametrize("command", ["list", "show", "compile", "verify"])
def test_a_dispatch_table_that_cannot_be_loaded(command: str) -> None:
    program = (
        "import sys; sys.modules['knnpool_gen.generated.dispatch'] = None\n"
        f"from knnpool_gen.cli import app; app({[command, *([] if command == 'list' else [NAME])]})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("knnpool-gen: generated/dispatch.py cannot be loaded (")
    assert done.stderr.endswith(f"); {REPAIR}\n")


# --- compile


def test_compile_reports_resources(run: Run) -> None:
    ended = run("compile", NAME, "--arch", "sm_90", "--arch", "sm_80", "--json")
    assert (ended.code, ended.stderr) == (0, "2 of 2 compiled without spills\n")
    results = json.loads(ended.stdout)
    assert [(result["variant"], result["arch"]) for result in results] == [(NAME, "sm_90"), (NAME, "sm_80")]
    for result in results:
        assert result.keys() == {
            "variant", "arch", "cubin_bytes", "registers", "spill_bytes", "shared_bytes", "error",
        }  # fmt: skip
        assert result["cubin_bytes"] > 1000
        assert 16 <= result["registers"] <= 64
        assert (result["spill_bytes"], result["error"]) == (0, None)
        assert result["shared_bytes"] == 968 * 4  # 964 nodes and the pad, in whole loads of four


def test_compile_prints_a_table(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_kernel", lambda *_: (b"cubin", Resources(40, 0, 0, 128)))
    ended = run("compile", NAME, "--arch", "sm_90")
    assert (ended.code, ended.stderr) == (0, "1 of 1 compiled without spills\n")
    assert [line.split() for line in ended.stdout.splitlines()] == [
        ["variant", "arch", "cubin", "bytes", "registers", "spill", "bytes", "shared", "bytes"],
        [NAME, "sm_90", "5", "40", "0", str(968 * 4 + 128)],
    ]


def test_compile_takes_all_variants_and_the_usual_architectures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_kernel", lambda *_: (b"cubin", Resources(40, 0, 0, 0)))
    ended = run("compile", "--json")
    assert ended.code == 0
    assert [(result["variant"], result["arch"]) for result in json.loads(ended.stdout)] == [
        (kernel.name, arch) for kernel in KERNELS.values() for arch in ARCHITECTURES
    ]


def test_spills_are_a_no(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_kernel", lambda *_: (b"cubin", Resources(255, 8, 8, 0)))
    ended = run("compile", NAME, "--arch", "sm_90", "--json")
    assert (ended.code, ended.stderr) == (1, "0 of 1 compiled without spills\n")
    assert json.loads(ended.stdout)[0]["spill_bytes"] == 8


def test_a_source_that_nvrtc_refuses_is_a_no(run: Run, edited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCE + "a fault;\n"
    (edited / KERNEL.file).write_text(source)
    digest = hashlib.sha256(source.encode()).hexdigest()
    monkeypatch.setitem(KERNELS, KEY, dataclasses.replace(KERNEL, sha256=digest))
    line = source.count("\n")
    for options in ([], ["--json"]):
        ended = run("compile", NAME, "--arch", "sm_90", *options)
        assert ended.code == 1
        assert ended.stderr.endswith("0 of 1 compiled without spills\n")
        told = json.loads(ended.stdout)[0]["error"] if options else ended.stderr
        assert f"NVRTC could not compile generated/{KERNEL.file} for sm_90" in told
        assert f"{NAME}.cu({line}): error: " in told


@pytest.mark.parametrize("arch", ["sm_999", "90", "compute_90", "sm_", "hopper", ""])
def test_an_unknown_architecture(run: Run, arch: str) -> None:
    ended = run("compile", NAME, "--arch", "sm_90", "--arch", arch, "--json")
    assert (ended.code, ended.stdout) == (2, "")
    known = ", ".join(f"sm_{number}" for number in cuda.nvrtc().getSupportedArchs())
    version = ".".join(map(str, cuda.nvrtc().getVersion()))
    assert ended.stderr == f"knnpool-gen: no architecture {arch}; NVRTC {version} knows {known}\n"


def test_architectures_are_those_that_nvrtc_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(getSupportedArchs=lambda: (80, 90), getVersion=lambda: (12, 0))
    monkeypatch.setattr(cuda, "nvrtc", lambda: old)
    usual = ("sm_75", "sm_80", "sm_90", "sm_100")
    assert list(compilation.architectures((), usual)) == ["sm_80", "sm_90"]
    assert list(compilation.architectures(("sm_90a", "sm_80"), usual)) == ["sm_90a", "sm_80"]
    with pytest.raises(InvalidArgumentError) as caught:
        compilation.architectures(("sm_75", "sm_80", "sm_100f"), usual)
    assert str(caught.value) == "no architecture sm_75, sm_100f; NVRTC 12.0 knows sm_80, sm_90"


# --- verify


def test_verify_in_emulation(run: Run) -> None:
    ended = run("verify", "--emulate", NAME, "--json")
    assert (ended.code, ended.stderr) == (0, "1 of 1 variants agree with the reference (emulation)\n")
    (verdict,) = json.loads(ended.stdout)
    assert (verdict["name"], verdict["faults"]) == (NAME, [])
    assert verdict["cases"] > 20


@pytest.mark.parametrize(
    "command", [("verify", "--emulate"), ("compile", "--arch", "sm_90")], ids=lambda words: words[0]
)
def test_what_was_generated_before_a_change_is_named_so(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: tuple[str, ...]
) -> None:
    templates = copy(folders.templates(), tmp_path / "templates")
    monkeypatch.setattr(folders, "templates", lambda: templates)
    replace(templates / "modes" / "sum.cu.jinja", '"sum[r]", "value"', '"sum[r]", "-value"')
    changed = run(*command, NAME)
    assert (changed.code, changed.stderr.splitlines()[0]) == (
        0, "generated/ differs from specs and templates; `knnpool-gen regenerate` brings it up to date"
    )  # fmt: skip
    replace(templates / "modes" / "sum.cu.jinja", '"sum[r]", "-value"', '"sum[r]", {{ unknown')
    assert run(*command, NAME).stderr.startswith("specs or templates are at fault, and generated/ is older:\n")


def test_what_disagrees_is_a_no(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend stands in for a device whose kernels write nothing."""

    class Idle:
        name = "an idle device"

        def run(self, kernel: Kernel, calls: Any) -> list[dict[str, torch.Tensor]]:
            return [{name: torch.zeros_like(value) for name, value in call.expected.items()} for call in calls]

    monkeypatch.setattr("knnpool_gen.verification.choose_backend", lambda emulate, sanitizer: Idle())
    ended = run("verify", NAME)
    *faults, last = ended.stderr.splitlines()
    assert (ended.code, last) == (1, "0 of 1 variants agree with the reference (an idle device)")
    assert len(faults) == 5
    assert all(fault.startswith(f"{NAME}: ") and ": y: " in fault for fault in faults)
    (_, row) = ended.stdout.splitlines()
    assert row.split()[0] == NAME
    assert int(row.split()[2]) >= 5


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("no_gpu")
def test_verify_without_a_gpu(run: Run) -> None:
    message = "knnpool-gen: there is no CUDA device here; --emulate runs the kernels on the CPU\n"
    assert run("verify", NAME) == Ended(2, "", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--emulate", "--sanitizer", "memory"], "--sanitizer memory: there are none, address, thread"),
        (["--sanitizer", "memory"], "--sanitizer memory: there are none, address, thread"),
        (["--sanitizer", "thread"], "--sanitizer needs --emulate"),
    ],
)
def test_sanitizers_that_cannot_be_had(run: Run, options: list[str], message: str) -> None:
    assert run("verify", NAME, *options) == Ended(2, "", f"knnpool-gen: {message}\n")


# --- usage


@pytest.mark.parametrize("arguments", [("--nonsense",), ("paint",), ("show",), ("regenerate", "--check=2")], ids=str)
def test_wrong_usage(run: Run, arguments: tuple[str, ...]) -> None:
    ended = run(*arguments)
    assert (ended.code, ended.stdout) == (2, "")
    assert "Error" in ended.stderr


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in ("regenerate", "list", "show", "compile", "verify", "bench", "tune", "doctor"))],
    ids=str,
)
def test_help(run: Run, command: tuple[str, ...]) -> None:
    ended = run(*command, "-h")
    assert (ended.code, ended.stderr) == (0, "")
    assert "Usage: " in ended.stdout
    assert BANNER not in ended.stdout
