"""Runs generated CUDA sources on the CPU, plain and under sanitizers.

:func:`build` compiles one source with g++ against ``cuda_emu.h``; the :class:`Program` that comes out runs
any number of launches in one child process. Needs Linux on x86-64, g++ and NVIDIA's headers (extra ``dev``).
"""

from __future__ import annotations

from .builder import build
from .program import EmulationError, Launch, Program, Sanitizer

__all__ = ["EmulationError", "Launch", "Program", "Sanitizer", "build"]
