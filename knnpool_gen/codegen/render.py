"""Variants to text: one CUDA source each, and the dispatch table of all of them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

import jinja2

from knnpool_gen.codegen.facts import KernelFacts
from knnpool_gen.codegen.outputs import Outputs, banner
from knnpool_gen.codegen.variant import Variant
from knnpool_gen.errors import InvalidArgumentError
from knnpool_gen.kernel import Kernel, KernelKey


class Renderer:
    """Renders the templates of one folder.

    Raises :class:`~knnpool_gen.errors.InvalidArgumentError` with template name and line for a template that is
    missing, malformed, or uses a name that nobody gives.
    """

    def __init__(self, templates: Path) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(templates, encoding="utf-8"),
            undefined=jinja2.StrictUndefined,
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
        files: dict[str, str] = {}
        kernels: list[tuple[KernelKey, Kernel]] = []
        for variant in variants:
            text = self.source(variant)
            kernel = dataclasses.replace(KernelFacts.of(variant).kernel, sha256=digest(text.encode()))
            files[kernel.file] = text
            kernels.append((variant.key, kernel))
        files["dispatch.py"] = self._render("dispatch.py.jinja", banner=banner("#", "dispatch table"), kernels=kernels)
        files["__init__.py"] = self._render("init.py.jinja", banner=banner("#", "package of the kernels"))
        return Outputs(files)

    def _render(self, template: str, **context: object) -> str:
        try:
            text = self._environment.get_template(template).render(**context)
        except jinja2.TemplateNotFound as error:
            raise InvalidArgumentError(f"template {error.name} is missing") from error
        except jinja2.TemplateSyntaxError as error:
            raise InvalidArgumentError(f"template {error.name}:{error.lineno}: {error.message}") from error
        except jinja2.UndefinedError as error:
            raise InvalidArgumentError(f"template {template}: {error.message}") from error
        return _tidy(text)


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
