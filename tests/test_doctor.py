"""What ``doctor`` says of a machine that has everything, and of one that lacks something."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from commands import Run
from knnpool_gen import doctor, folders
from knnpool_gen.codegen.render import Renderer
from knnpool_gen.codegen.spec import load_specs
from knnpool_gen.doctor import Finding, State, examine
from knnpool_gen.generated.dispatch import KERNELS
from knnpool_gen.runtime import compile, cuda, launch
from knnpool_gen.runtime.tuned import TunedChoice, write_tuned

EXTRAS = "pip install 'knnpool-gen[cuda12]' or 'knnpool-gen[cuda13]', whichever matches your CUDA driver"
CHOICE = TunedChoice("forward", "max", "float16", 9, 964, 230, 512, next(iter(KERNELS.values())).name, 1, 256, 1.0, 2.0)


@dataclass
class Place:
    """A machine without a GPU whose files are all in one folder."""

    folder: Path
    patch: pytest.MonkeyPatch

    def find(self, subject: str) -> Finding:
        (found,) = [finding for finding in examine() if finding.subject == subject]
        return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name in os.environ:
        if name.startswith("KNNPOOL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KNNPOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KNNPOOL_TUNED", str(tmp_path / "config" / "tuned.json"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for door in (cuda.nvrtc, cuda.include_folder):
        door.cache_clear()
    yield Place(tmp_path, monkeypatch)
    for door in (cuda.nvrtc, cuda.include_folder):
        door.cache_clear()


def test_nothing_is_wrong(run: Run, place: Place) -> None:
    ended = run("doctor")
    assert (ended.code, ended.stderr) == (0, "nothing is wrong\n")
    lines = [line.split() for line in ended.stdout.splitlines()]
    found = {subject: state for state, subject, *_ in lines if state != "to"}
    assert found == {
        **dict.fromkeys(("versions", "folders", "cupy", "matplotlib", "scipy"), "ok"),
        "device": "note",
        **dict.fromkeys(("nvrtc", "headers", "settings", "cache", "tuned", "generated", "compile"), "ok"),
    }
    assert f"torch {torch.__version__}" in ended.stdout
    assert not list(place.folder.iterdir())  # to look is not to make


def test_json(run: Run, place: Place) -> None:
    place.patch.setenv("KNNPOOL_CANARY", "sometimes")
    assert f"{'':20} to mend it: unset KNNPOOL_CANARY\n" in run("doctor").stdout
    ended = run("doctor", "--json")
    assert (ended.code, ended.stderr) == (1, "1 problem(s)\n")
    (problem,) = [finding for finding in json.loads(ended.stdout) if finding["state"] == "problem"]
    assert problem == {
        "subject": "settings",
        "state": "problem",
        "text": "KNNPOOL_CANARY = 'sometimes'; allowed: off, first, always",
        "mend": "unset KNNPOOL_CANARY",
    }


def test_settings(place: Place) -> None:
    assert place.find("settings").text == (
        f"KNNPOOL_CACHE_DIR={place.folder}/cache, KNNPOOL_TUNED={place.folder}/config/tuned.json"
    )
    place.patch.setenv("KNNPOOL_CANNARY", "off")
    assert place.find("settings") == Finding(
        "settings", State.NOTE, "nothing reads KNNPOOL_CANNARY", "unset KNNPOOL_CANNARY"
    )


def test_packages(place: Place) -> None:
    present = {"cupy-cuda12x": "14.2", "scipy": "1.17"}

    def version(name: str) -> str:
        if name in present:
            return present[name]
        raise importlib.metadata.PackageNotFoundError(name)

    place.patch.setattr(importlib.metadata, "version", version)
    assert place.find("cupy") == Finding("cupy", State.OK, "cupy-cuda12x 14.2")
    assert place.find("scipy").state is State.OK
    assert place.find("matplotlib") == Finding(
        "matplotlib", State.NOTE, "not installed", "pip install 'knnpool-gen[bench]'"
    )
    present["cupy-cuda13x"] = "14.1"
    assert place.find("cupy") == Finding(
        "cupy",
        State.PROBLEM,
        "cupy-cuda12x 14.2 and cupy-cuda13x 14.1 are in each other's way",
        "pip uninstall cupy-cuda12x",
    )


@pytest.mark.parametrize(
    ("device", "built_for", "state", "mend"),
    [
        (False, None, State.NOTE, EXTRAS),
        (True, "12.8", State.PROBLEM, "pip install 'knnpool-gen[cuda12]'"),
        (True, "13.0", State.PROBLEM, "pip install 'knnpool-gen[cuda13]'"),
    ],
)
def test_without_cupy(place: Place, device: bool, built_for: str | None, state: State, mend: str) -> None:
    """Where there is a device, CuPy is missed; elsewhere it is only said to be missing."""
    find_spec = importlib.util.find_spec
    place.patch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else find_spec(name))
    place.patch.setattr(doctor, "_version", lambda name: None if "cupy" in name else "1.0")
    place.patch.setattr(doctor, "_has_device", lambda: device)
    place.patch.setattr(torch.version, "cuda", built_for)
    assert place.find("cupy") == Finding("cupy", state, "not installed", mend)
    nvrtc = place.find("nvrtc")
    assert (nvrtc.state, nvrtc.mend) == (state, mend)
    assert "CuPy, which is missing" in nvrtc.text
    assert len([finding for finding in examine() if finding.subject == "compile"]) == device


def test_a_device(place: Place) -> None:
    properties = SimpleNamespace(
        name="Made Up", major=9, minor=0, multi_processor_count=132, max_threads_per_multi_processor=2048,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )  # fmt: skip
    place.patch.setattr(torch.cuda, "is_available", lambda: True)
    place.patch.setattr(torch.cuda, "current_device", lambda: 0)
    place.patch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    place.patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    place.patch.setattr(launch, "_facts", {})
    assert place.find("device") == Finding(
        "device",
        State.OK,
        "Made Up sm_90, 132 multiprocessors of 2048 threads and 233472 bytes of shared memory, 232448 a block",
    )
    assert " for sm_90: " in place.find("compile").text
    found = place.find("launch")  # there is none, after all
    assert (found.state, found.text != "") == (State.PROBLEM, True)


def test_the_cache(place: Place) -> None:
    kernel = next(iter(KERNELS.values()))
    assert place.find("cache").text == f"{place.folder}/cache, 0 compiled kernels, 0 bytes"
    compile.cubin(kernel, "sm_90", ())
    (cubin,) = (place.folder / "cache").iterdir()
    assert place.find("cache").text == f"{place.folder}/cache, 1 compiled kernels, {cubin.stat().st_size} bytes"


def test_folders_that_cannot_be_written(place: Place) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    place.patch.setattr(tempfile, "TemporaryFile", refuse)
    assert place.find("cache") == Finding(
        "cache",
        State.PROBLEM,
        f"{place.folder}/cache: cannot be written (Permission denied)",
        "export KNNPOOL_CACHE_DIR=FOLDER",
    )
    tuned = place.find("tuned")
    assert (tuned.state, tuned.mend) == (State.NOTE, "export KNNPOOL_TUNED=FILE")


def test_tuned_choices(place: Place) -> None:
    path = place.folder / "config" / "tuned.json"
    assert place.find("tuned").text == f"{path}, 0 choice(s)"
    write_tuned(path, "Made Up sm_90", [CHOICE])
    assert place.find("tuned").text == f"{path}, 1 choice(s) for Made Up sm_90"
    gone = TunedChoice(**{**CHOICE.__dict__, "variant": "gone", "rows": 7})
    write_tuned(path, "Made Up sm_90", [gone])
    assert place.find("tuned") == Finding(
        "tuned", State.PROBLEM, f"{path} names variants that do not exist: gone", f"rm {path}"
    )
    path.write_text("{}")
    found = place.find("tuned")
    assert (found.state, found.mend) == (State.PROBLEM, f"rm {path}")
    place.patch.setenv("KNNPOOL_TUNED", "off")
    assert place.find("tuned") == Finding("tuned", State.OK, "off")


def test_generated_files(place: Place) -> None:
    outputs = Renderer(folders.templates()).outputs(load_specs(folders.specs()).variants)
    outputs.write(place.folder / "generated")
    place.patch.setattr(folders, "generated", lambda: place.folder / "generated")
    assert place.find("generated").text == (f"{len(outputs.files)} files in {place.folder}/generated are up to date")
    (place.folder / "generated" / KERNELS[next(iter(KERNELS))].file).unlink()
    assert place.find("generated") == Finding(
        "generated", State.PROBLEM, "1 file(s) differ from specs and templates", "knnpool-gen regenerate"
    )


def test_a_source_that_was_edited(place: Place) -> None:
    kernel = KERNELS[next(iter(KERNELS))]
    (place.folder / kernel.file).parent.mkdir(parents=True)
    (place.folder / kernel.file).write_text("// edited\n")
    place.patch.setattr(compile, "GENERATED", place.folder)
    found = place.find("compile")
    assert (found.state, found.mend) == (State.PROBLEM, "knnpool-gen regenerate")


def test_whatever_is_raised_is_a_line(place: Place) -> None:
    place.patch.setattr(folders, "specs", lambda: 1 / 0)
    assert place.find("generated") == Finding("generated", State.PROBLEM, "ZeroDivisionError: division by zero")


def test_a_checkout_is_one_place(place: Place) -> None:
    package = Path(doctor.__file__).resolve().parent
    assert place.find("folders") == Finding(
        "folders", State.OK, f"package {package}; specs, templates, generated in {package.parent}"
    )


def test_an_installed_package_is_one_place(place: Place) -> None:
    package = Path("/somewhere/knnpool_gen")
    parts = {"knnpool_gen": package, **{part: package / part for part in ("specs", "templates", "generated")}}
    place.patch.setattr(folders, "parts", lambda: dict(parts))
    assert place.find("folders").text == f"package {package}; specs, templates, generated in {package}"


def test_parts_of_two_checkouts(tmp_path: Path) -> None:
    """A shell in one checkout, with the environment of another: the package is found here, the rest there."""
    package = Path(doctor.__file__).resolve().parent
    shutil.copytree(package, tmp_path / "knnpool_gen", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "knnpool_gen.cli", "doctor", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (found,) = [finding for finding in json.loads(done.stdout) if finding["subject"] == "folders"]
    other = package.parent
    assert found == {
        "subject": "folders",
        "state": "problem",
        "text": f"parts of several checkouts: package {tmp_path / 'knnpool_gen'}, but specs {other / 'specs'}, "
        f"templates {other / 'templates'}, generated {other / 'generated'}",
        "mend": f"pip install --editable {tmp_path}",
    }
