"""Variants to text: one CUDA source each, and the dispatch table of all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jinja2
from jinja2.environment import TemplateModule

from knnpool_gen.codegen.agreement import Piece, check_pieces, check_tables, check_tiles
from knnpool_gen.codegen.facts import KernelFacts
from knnpool_gen.codegen.faults import Faults
from knnpool_gen.codegen.outputs import Outputs, banner
from knnpool_gen.codegen.variant import Variant
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.kernel import Kernel, KernelKey

FAULTS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, RecursionError)
"""What a template can run into."""


class Renderer:
    """Renders the templates of one folder.

    Raises :class:`~knnpool_gen.errors.InvalidArgumentError` with template name and line for a template that is
    missing, malformed, uses a name that nobody gives, or something in a way that it cannot be used, and
    :class:`~knnpool_gen.errors.SpecError` with all places where specs and templates contradict each other.
    """

    def __init__(self, templates: Path) -> None:
        self._folder = Path(os.path.abspath(templates))  # as jinja spells it
        self._environment = jinja2.Environment(
            loader=_Loader(self._folder, encoding="utf-8-sig"),
            undefined=_Undefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            newline_sequence="\n",
            autoescape=False,
        )

    def source(self, variant: Variant) -> str:
        """The CUDA source of ``variant``."""
        facts = KernelFacts.of(variant)
        return self._render(facts.template, kernel=facts)

    def outputs(self, variants: Sequence[Variant]) -> Outputs:
        """Every generated file: the sources, the dispatch table and the package's ``__init__.py``."""
        sources = self._sources(variants)
        files: dict[str, str] = {}
        kernels: list[tuple[KernelKey, Kernel]] = []
        for variant, text in sources.items():
            kernel = dataclasses.replace(KernelFacts.of(variant).kernel, sha256=digest(text.encode()))
            files[kernel.file] = text
            kernels.append((variant.key, kernel))
        files["dispatch.py"] = self._render("dispatch.py.jinja", banner=banner("#", "dispatch table"), kernels=kernels)
        files["__init__.py"] = self._render("init.py.jinja", banner=banner("#", "package of the kernels"))
        return Outputs(files)

    def _sources(self, variants: Sequence[Variant]) -> dict[Variant, str]:
        if not self._folder.is_dir():
            raise InvalidArgumentError(f"there is no folder of templates {self._folder}")
        faults = Faults()
        check_pieces(variants, lambda name: (self._folder / name).is_file(), faults)
        faults.raise_if_any()
        sources = {variant: self.source(variant) for variant in variants}
        check_tiles(variants, self._staged, faults)
        check_tables(sources, faults)
        faults.raise_if_any()
        return sources

    def _staged(self, variant: Variant, value: str) -> str:
        """What the template of the variant's mode stages for ``value``, a gradient as it was read."""
        template = Piece.MODES.template(variant.mode.mode.value)
        with self._located(template):
            sums: Any = self._environment.get_template(Piece.ACCUMULATE.template(variant.dtype.accumulate)).module
            piece: Any = self._environment.get_template(template).module
            return str(piece.staged(sums, value, "node"))

    def _render(self, template: str, **context: object) -> str:
        with self._located(template):
            return _tidy(self._environment.get_template(template).render(**context))

    @contextmanager
    def _located(self, template: str) -> Iterator[None]:
        """What goes wrong inside is raised with the template and line where it does."""
        try:
            yield
        except jinja2.TemplateNotFound as error:
            raise InvalidArgumentError(f"template {error.name} is missing from {self._folder}") from error
        except jinja2.TemplateSyntaxError as error:
            raise InvalidArgumentError(f"template {error.name}:{error.lineno}: {error.message}") from error
        except FAULTS as error:
            raise InvalidArgumentError(f"template {self._place(error) or template}: {error}") from error

    def _place(self, error: BaseException) -> str | None:
        """Name and line of the template that was running: jinja makes it look as if templates were Python files."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename).is_relative_to(self._folder):
                return f"{Path(frame.filename).relative_to(self._folder).as_posix()}:{frame.lineno}"
        return None


class _Undefined(jinja2.StrictUndefined):
    """Says of a macro that is missing in which template."""

    def __init__(self, hint: str | None = None, **which: Any) -> None:
        if isinstance(which.get("obj"), TemplateModule):
            hint = f"{which['obj'].__name__} has no macro {which['name']!r}"
        super().__init__(hint, **which)


class _Loader(jinja2.FileSystemLoader):
    """Reports a file that is not text like one that is malformed."""

    def get_source(self, environment: jinja2.Environment, template: str) -> tuple[str, str, Callable[[], bool]]:
        try:
            return super().get_source(environment, template)
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise jinja2.TemplateSyntaxError(f"not UTF-8: {error.reason}", line, template) from error


def digest(source: bytes) -> str:
    """SHA-256 of a generated source, as the dispatch table records it."""
    return hashlib.sha256(source).hexdigest()


def _tidy(text: str) -> str:
    """Remove what composing from pieces leaves behind: blank lines at ends and in pairs, trailing blanks."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{3,}", "\n\n", text)
    text = re.sub(r"\{\n\n", "{\n", text)
    text = re.sub(r"\n\n(\s*\})", r"\n\1", text)
    return text.strip("\n") + "\n"
