"""Where specs and templates contradict each other: said with the line of the specs, and nothing written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commands import run
from knnpool_gen import folders
from knnpool_gen.codegen.render import Renderer
from knnpool_gen.codegen.spec import load_specs
from knnpool_gen.errors import InvalidArgumentError, SpecError


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    return copy(folders.specs(), tmp_path / "specs", "*.yaml")


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    return copy(folders.templates(), tmp_path / "templates", "*.jinja")


def copy(source: Path, target: Path, pattern: str) -> Path:
    for path in source.rglob(pattern):
        written = target / path.relative_to(source)
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(path.read_bytes())
    return target


Faults = Callable[[], list[str]]


@pytest.fixture
def faults(specs: Path, templates: Path) -> Faults:
    def faults() -> list[str]:
        with pytest.raises(SpecError) as caught:
            Renderer(templates).outputs(load_specs(specs).variants)
        return str(caught.value).splitlines()

    return faults


def change_mode(specs: Path, mode: str, old: str, new: str) -> int:
    """Change one line of the definition of ``mode``; returns its number."""
    path = specs / "modes.yaml"
    before, start, rest = path.read_text().partition(f"\n{mode}:\n")
    definition, blank, after = rest.partition("\n\n")
    assert definition.count(old) == 1
    path.write_text(before + start + definition.replace(old, new) + blank + after)
    return (before + start + definition[: definition.index(old)]).count("\n") + 1


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_every_missing_piece_is_named(specs: Path, templates: Path, faults: Faults) -> None:
    for name in ("dtypes/float16", "dtypes/float64", "accumulate/float64", "modes/sum"):
        (templates / f"{name}.cu.jinja").unlink()
    lines = (specs / "dtypes.yaml").read_text().splitlines()
    float16, float64 = lines.index("float16:") + 1, lines.index("float64:") + 1
    assert faults() == [
        f"specs/dtypes.yaml:{float16}: dtype 'float16' has no template: write templates/dtypes/float16.cu.jinja",
        f"specs/dtypes.yaml:{float64}: accumulate 'float64' has no template: "
        "write templates/accumulate/float64.cu.jinja",
        f"specs/dtypes.yaml:{float64}: dtype 'float64' has no template: write templates/dtypes/float64.cu.jinja",
        f"specs/modes.yaml:{(specs / 'modes.yaml').read_text().splitlines().index('sum:') + 1}: "
        "mode 'sum' has no template: write templates/modes/sum.cu.jinja",
    ]


@pytest.mark.parametrize(
    ("mode", "old", "new", "message"),
    [
        (
            "sum",
            "forward_reads: []",
            "forward_reads: [count]",
            "forward_reads of mode 'sum' names count, which templates/modes/sum.cu.jinja does not read",
        ),
        (
            "avg",
            "forward_reads: [count]",
            "forward_reads: []",
            "forward_reads of mode 'avg' lacks count, which templates/modes/avg.cu.jinja reads",
        ),
        (
            "avg",
            "backward_reads: [count]",
            "backward_reads: []",
            "backward_reads of mode 'avg' lacks count, which templates/modes/avg.cu.jinja reads",
        ),
        (
            "max",
            "backward_reads: []",
            "backward_reads: [count]",
            "backward_reads of mode 'max' names count, which templates/modes/max.cu.jinja does not read",
        ),
        (
            "weighted",
            "forward_reads: [weights]",
            "forward_reads: [count]",
            "forward_reads of mode 'weighted' names count, which templates/modes/weighted.cu.jinja does not read",
        ),
        (
            "weighted",
            "backward_reads: [rev_weights]",
            "backward_reads: []",
            "backward_reads of mode 'weighted' lacks rev_weights, which templates/modes/weighted.cu.jinja reads",
        ),
        (
            "sum",
            "backward_tile: value",
            "backward_tile: accumulate",
            "backward_tile of mode 'sum' must be value, not accumulate: templates/modes/sum.cu.jinja stages the "
            "gradient as it is",
        ),
        (
            "avg",
            "backward_tile: accumulate",
            "backward_tile: value",
            "backward_tile of mode 'avg' must be accumulate, not value: templates/modes/avg.cu.jinja stages what it "
            "works out",
        ),
    ],
)
def test_a_mode_that_its_template_contradicts(
    specs: Path, faults: Faults, mode: str, old: str, new: str, message: str
) -> None:
    number = change_mode(specs, mode, old, new)
    assert f"specs/modes.yaml:{number}: {message}" in faults()


def test_a_template_that_its_mode_contradicts(templates: Path, faults: Faults) -> None:
    """The other way round: the mode is as it was, and the template begins to read another table."""
    change(templates / "modes" / "sum.cu.jinja", "sum[ROWS] = {};", "sum[ROWS] = {}, size = count[n];")
    (message,) = faults()
    assert message.endswith("forward_reads of mode 'sum' lacks count, which templates/modes/sum.cu.jinja reads")


def test_contradictions_are_reported_together(specs: Path, faults: Faults) -> None:
    lines = [
        change_mode(specs, "avg", "forward_reads: [count]", "forward_reads: []"),
        change_mode(specs, "sum", "backward_tile: value", "backward_tile: accumulate"),
    ]
    assert [line.partition(": ")[0] for line in faults()] == [f"specs/modes.yaml:{line}" for line in lines]


def test_a_comment_reads_nothing(templates: Path, specs: Path) -> None:
    change(templates / "modes" / "sum.cu.jinja", "sum[ROWS] = {};", "sum[ROWS] = {};  // not count[n]")
    assert Renderer(templates).outputs(load_specs(specs).variants).files


@pytest.mark.parametrize(
    ("piece", "macro"),
    [("modes/max", "winner"), ("dtypes/float16", "narrow_pair"), ("accumulate/float64", "divide")],
)
def test_a_piece_without_a_macro_that_is_needed(specs: Path, templates: Path, piece: str, macro: str) -> None:
    path = templates / f"{piece}.cu.jinja"
    change(path, f"{{% macro {macro}(", f"{{% macro no_{macro}(")
    with pytest.raises(InvalidArgumentError) as caught:
        Renderer(templates).outputs(load_specs(specs).variants)
    assert f": {piece}.cu.jinja has no macro '{macro}'" in str(caught.value)


def test_nothing_is_written_then(specs: Path, tmp_path: Path) -> None:
    number = change_mode(specs, "sum", "forward_reads: []", "forward_reads: [first_slot]")
    done = run("regenerate", "--specs", str(specs), "--out", str(tmp_path / "out"))
    assert done.code == 2
    assert done.stderr == (
        f"knnpool-gen: specs/modes.yaml:{number}: forward_reads of mode 'sum' names first_slot, which "
        "templates/modes/sum.cu.jinja does not read\n"
    )
    assert not (tmp_path / "out").exists()
