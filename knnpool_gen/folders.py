"""Where specs, templates and generated files are, in a checkout and in an installed wheel alike."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def specs() -> Path:
    """Folder of the YAML files."""
    return _package_folder("knnpool_gen.specs")


def templates() -> Path:
    """Folder of the templates."""
    return _package_folder("knnpool_gen.templates")


def generated() -> Path:
    """Folder of the generated files: beside the specs, whether or not it is there already."""
    return specs().parent / "generated"


def parts() -> dict[str, Path]:
    """The folder that each part of what is imported comes from; a part that is not there is left out."""
    found: dict[str, Path] = {}
    for part in ("knnpool_gen", "specs", "templates", "generated"):
        name = part if part == "knnpool_gen" else f"knnpool_gen.{part}"
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            found[part] = Path(next(iter(spec.submodule_search_locations))).resolve()
    return found


def real_tables() -> Path | None:
    """The neighbour tables of real networks that the checkout keeps as test data; None in an installed wheel."""
    path = specs().parent / "tests" / "data" / "fovi_tables.npz"
    return path if path.is_file() else None


def _package_folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not installed; run `pip install -e .` in the checkout")
    return Path(next(iter(spec.submodule_search_locations)))
