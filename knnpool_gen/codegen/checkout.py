"""The generated files of the checkout, held against its own specs and templates."""

from __future__ import annotations

from knnpool_gen import folders
from knnpool_gen.codegen.outputs import Comparison
from knnpool_gen.codegen.render import Renderer
from knnpool_gen.codegen.spec import load_specs


def compare_generated() -> Comparison:
    """How ``generated/`` differs from what specs and templates would make of it now.

    Raises:
        SpecError, InvalidArgumentError: specs or templates are at fault, or a file cannot be read.
    """
    return Renderer(folders.templates()).outputs(load_specs(folders.specs()).variants).compare(folders.generated())
