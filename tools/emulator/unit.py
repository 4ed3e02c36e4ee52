"""Turns the text of a ``.cu`` file into a C++ unit, changing as little as possible and no line number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .program import EmulationError

_COMMENT_OR_TEXT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
# Shared memory has no equivalent in C++. Its declarations, one variable each and inside a function, become
# references to memory of the block.
_VARIABLE = r"(?:(?:__align__|alignas)\s*\(\s*\d+\s*\)\s*)?([\w:]+(?:\s+[\w:]+)*)\s+(\w+)"
_DYNAMIC_SHARED = re.compile(r"\bextern\s+__shared__\s+" + _VARIABLE + r"\s*\[\s*\]\s*;")
_STATIC_SHARED = re.compile(r"\b__shared__\s+" + _VARIABLE + r"((?:\s*\[[^\];]+\])*)\s*;")
_BOUNDS = r"(?:__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)\s*)?"
_KERNEL = re.compile(r"\b__global__\s+" + _BOUNDS + r"void\s+" + _BOUNDS + r"(\w+)\s*\(")


@dataclass(frozen=True)
class Unit:
    """What g++ gets, and the kernels that are in it."""

    text: str
    kernels: tuple[str, ...]


def translate(name: str, source: str, parameters: Sequence[str]) -> Unit:
    """The C++ unit of the source that messages call ``name``.

    Each macro in ``parameters`` becomes a variable, so none may decide what the preprocessor keeps.
    """
    code = _COMMENT_OR_TEXT.sub(_blank_comment, source)
    _check_parameters(name, code, parameters)
    body = _DYNAMIC_SHARED.sub(r"\1* const \2 = static_cast<\1*>(emu::dynamic_shared());", code)
    body = _STATIC_SHARED.sub(r"auto& \2 = emu::static_shared_variable<\1\3, __COUNTER__>();", body)
    for number, line in enumerate(body.splitlines(), 1):
        if re.search(r"\b__shared__\b", line):
            raise EmulationError(f"{name}:{number}: this form of __shared__ declaration cannot be emulated")
    bounds = {kernel: before or after for before, after, kernel in _KERNEL.findall(code)}
    if not bounds:
        raise EmulationError(f"{name}: there is no __global__ function")
    lines = ['#include "cuda_emu.h"']
    lines += [f"EMU_PARAMETER({parameter})" for parameter in parameters]
    lines += [f"#define {parameter} emu_parameter_{parameter}" for parameter in parameters]
    lines += [f'#line 1 "{name}"', body]
    lines += [f"EMU_KERNEL({kernel}, ({bound.split(',')[0] or 0}))" for kernel, bound in bounds.items()]
    return Unit("\n".join(lines) + "\n", tuple(bounds))


def _blank_comment(found: re.Match[str]) -> str:
    text = found[0]
    return text if text.startswith('"') else "\n" * text.count("\n") or " "


def _check_parameters(name: str, code: str, parameters: Sequence[str]) -> None:
    for number, line in enumerate(code.splitlines(), 1):
        if not re.match(r"\s*#\s*(if|elif)\b", line):
            continue
        for parameter in parameters:
            if re.search(rf"(?<!defined\()(?<!defined )\b{re.escape(parameter)}\b", line):
                raise EmulationError(
                    f"{name}:{number}: {parameter} is a variable in emulation, so #if cannot test it; use a plain if"
                )
