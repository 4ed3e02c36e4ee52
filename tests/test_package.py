"""The package as people get it: a wheel in an environment of its own, and an editable install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]
MOVED = {"tools/emulator": "emulator", "generated": "generated", "specs": "specs", "templates": "templates"}
"""Folders of the repository, and what they are called in the package."""


def run(command: list[str | Path], cwd: Path, **environment: str) -> str:
    # Nothing of the repository is to be found by way of the environment.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=inherited | environment)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Installed(NamedTuple):
    """A wheel and where it is installed."""

    sources: Path
    wheel: Path
    environment: Path

    @property
    def packages(self) -> Path:
        (folder,) = self.environment.glob("lib/python*/site-packages")
        return folder

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        return run([self.environment / "bin" / program, *arguments], cwd)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The tracked files built into a wheel, and that installed where only its dependencies are lent."""
    root = tmp_path_factory.mktemp("a package")
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], REPOSITORY).split("\0")
    for name in listed:
        if (REPOSITORY / name).is_file():
            (root / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, root / "sources" / name)
    run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", root / "dist"], root / "sources")
    (wheel,) = (root / "dist").glob("*.whl")

    venv.create(root / "environment", symlinks=True)
    installed = Installed(root / "sources", wheel, root / "environment")
    python = root / "environment" / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel], root)
    # A path in a .pth file makes the packages there importable, and does not run the .pth files beside them: the
    # editable install of the repository stays unseen.
    lent = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (installed.packages / "lent.pth").write_text("\n".join(lent) + "\n")
    return installed


def test_what_the_wheel_holds(installed: Installed) -> None:
    with zipfile.ZipFile(installed.wheel) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    package = {
        name.removeprefix("knnpool_gen/"): data for name, data in held.items() if name.startswith("knnpool_gen/")
    }
    expected = tree(installed.sources / "knnpool_gen")
    for folder, name in MOVED.items():
        files = tree(installed.sources / folder)
        expected |= {f"{name}/{path}": data for path, data in files.items()}
    assert package.keys() == expected.keys()
    assert all(package[name] == data for name, data in expected.items())
    assert {"py.typed", "generated/dispatch.py", "specs/variants.yaml", "emulator/executor.cpp"} <= package.keys()

    others = {name.split("/", 1)[1]: data for name, data in held.items() if not name.startswith("knnpool_gen/")}
    assert {name.split("/")[0] for name in held} == {"knnpool_gen", "knnpool_gen-0.1.0.dist-info"}
    assert others["licenses/LICENSE"] == (installed.sources / "LICENSE").read_bytes()
    assert b"knnpool-gen = knnpool_gen.cli:app" in others["entry_points.txt"]
    assert b"Provides-Extra: cuda12" in others["METADATA"]


def test_the_wheel_is_what_is_imported(installed: Installed, tmp_path: Path) -> None:
    code = (
        "import knnpool_gen, knnpool_gen.generated, knnpool_gen.emulator, torch\n"
        "from knnpool_gen import folders\n"
        "print(knnpool_gen.__file__, knnpool_gen.generated.__file__, knnpool_gen.emulator.__file__)\n"
        "print(folders.specs(), folders.templates(), folders.generated())\n"
        "x = torch.tensor([[1., 2., 3.]], requires_grad=True)\n"
        "y = knnpool_gen.pool_function(x, torch.tensor([[0, 1], [2, 7]]), 'max')\n"
        "y.sum().backward()\n"
        "print(y.tolist(), x.grad.tolist())\n"
    )
    package = installed.packages / "knnpool_gen"
    assert installed.run("python", "-c", code, cwd=tmp_path).splitlines() == [
        f"{package}/__init__.py {package}/generated/__init__.py {package}/emulator/__init__.py",
        f"{package}/specs {package}/templates {package}/generated",
        "[[3.0, 2.0]] [[0.0, 1.0, 1.0]]",
    ]


def test_the_command_line_of_the_wheel(installed: Installed, tmp_path: Path) -> None:
    out = tmp_path / "out"
    said = installed.run("knnpool-gen", "regenerate", "--out", str(out), cwd=tmp_path)
    assert "created  out/dispatch.py" in said
    assert tree(out) == tree(installed.sources / "generated")
    assert " file(s) up to date" in installed.run("knnpool-gen", "regenerate", "--check", cwd=tmp_path)

    listed = installed.run("knnpool-gen", "list", cwd=tmp_path)
    for source in (installed.sources / "generated" / "cuda").iterdir():
        assert f"{source.stem} " in listed


@pytest.fixture
def editable(tmp_path: Path) -> Callable[[str], str]:
    """Runs code with the Python of these tests, outside the repository."""
    return lambda code: run([sys.executable, "-c", code], tmp_path)


def test_the_editable_install(editable: Callable[[str], str]) -> None:
    code = (
        "import knnpool_gen, knnpool_gen.generated.dispatch as dispatch\n"
        "from knnpool_gen import folders\n"
        "for folder in (folders.specs(), folders.templates(), folders.generated()): print(folder.resolve())\n"
        "print(dispatch.__file__, len(dispatch.KERNELS))\n"
        "import knnpool_gen.emulator; print(knnpool_gen.emulator.__file__)\n"
    )
    sources = len(list((REPOSITORY / "generated" / "cuda").glob("*.cu")))
    assert editable(code).splitlines() == [
        *(str(REPOSITORY / name) for name in ("specs", "templates", "generated")),
        f"{REPOSITORY}/generated/dispatch.py {sources}",
        f"{REPOSITORY}/tools/emulator/__init__.py",
    ]
