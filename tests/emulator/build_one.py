"""Builds one source in a process of its own: `python build_one.py SOURCE CACHE`; prints the program's path."""

from __future__ import annotations

import sys
from pathlib import Path

from knnpool_gen.emulator import Sanitizer, build

print(build(Path(sys.argv[1]), Sanitizer.NONE, cache_dir=Path(sys.argv[2])).path)
