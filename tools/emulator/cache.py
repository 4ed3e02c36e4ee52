"""A folder of files that are made once, by whichever process needs them first."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import platformdirs

_DIGEST_SIZE = 32


def cache_folder(given: Path | None) -> Path:
    """``given``, else ``KNNPOOL_EMULATOR_CACHE``, else a folder of this user."""
    if given is not None:
        return given
    from_environment = os.environ.get("KNNPOOL_EMULATOR_CACHE")
    if from_environment:
        return Path(from_environment)
    return platformdirs.user_cache_path("knnpool-gen") / "emulator"


def content_key(*parts: str) -> str:
    """A name for everything that decides what a file contains."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:24]


def cached(folder: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The file ``name`` in the folder; ``make`` writes it unless it is there and whole.

    The file ends in the digest of what comes before. Neither the loader of a program, nor the linker of an
    object file, nor the reader of a precompiled header minds.
    """
    path = folder / name
    if _is_whole(path):
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        if _is_whole(path):  # another process was faster
            return path
        with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as workplace:
            made = Path(workplace, name)
            make(made)
            with made.open("ab") as file:
                file.write(hashlib.sha256(made.read_bytes()).digest())
            made.replace(path)
    return path


def _is_whole(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    return _ends_in_digest(path, status.st_size, status.st_mtime_ns)


@cache
def _ends_in_digest(path: Path, size: int, changed: int) -> bool:
    """Size and time are there so that each state of a file is read once: some have 35 MB."""
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_SIZE]).digest() == content[-_DIGEST_SIZE:]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the lock that ``path`` stands for; it is given back even if the process is killed."""
    import fcntl  # absent on Windows, where nothing gets this far

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
