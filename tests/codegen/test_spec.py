"""Specs to variants, and the exact text of everything that can be wrong with specs."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from knnpool_gen import folders
from knnpool_gen.codegen.faults import Place
from knnpool_gen.codegen.spec import Specs, load_specs
from knnpool_gen.codegen.variant import DType, ModeSpec, PlanTable, TileValue, Variant
from knnpool_gen.errors import SpecError
from knnpool_gen.kernel import KernelKey
from knnpool_gen.vocabulary import Direction, Mode, Staging

DTYPES = """\
float16: {bytes: 2, vector: 4, accumulate: float32}
float32: {bytes: 4, vector: 2, accumulate: float32}
"""
MODES = """\
max: {aux: true, forward_reads: [first_slot], backward_reads: [], backward_tile: value}
avg: {aux: false, forward_reads: [count], backward_reads: [count], backward_tile: accumulate}
"""
VARIANTS = """\
matrix:
  direction: [forward, backward]
  mode: [max, avg]
  dtype: [float16, float32]
  staging: [shared]
  rows: [1, 2]
"""

ANYWHERE = Place("specs/some.yaml", 1)
FLOAT16 = DType("float16", 2, 4, "float32", ANYWHERE)
FLOAT32 = DType("float32", 4, 2, "float32", ANYWHERE)
MAX = ModeSpec(Mode.MAX, True, (PlanTable.FIRST_SLOT,), (), TileValue.VALUE, {})
AVG = ModeSpec(Mode.AVG, False, (PlanTable.COUNT,), (PlanTable.COUNT,), TileValue.ACCUMULATE, {})

Load = Callable[..., Specs]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Load specs with these texts; None leaves a file out."""

    def load(
        dtypes: str | bytes | None = DTYPES,
        modes: str | bytes | None = MODES,
        variants: str | bytes | None = VARIANTS,
    ) -> Specs:
        folder = tmp_path / "specs"
        folder.mkdir(exist_ok=True)
        texts = {"dtypes": dtypes, "modes": modes, "variants": variants}
        for name, text in texts.items():
            (folder / f"{name}.yaml").unlink(missing_ok=True)
            if text is not None:
                content = text if isinstance(text, bytes) else text.encode()
                (folder / f"{name}.yaml").write_bytes(content)
        return load_specs(folder)

    return load


@pytest.fixture
def faults(load: Load) -> Callable[..., list[str]]:
    """The lines of the one error that these texts cause."""

    def faults(**texts: str | bytes | None) -> list[str]:
        with pytest.raises(SpecError) as caught:
            load(**texts)
        return str(caught.value).splitlines()

    return faults


Faults = Callable[..., list[str]]


# --- good specs


def test_a_small_spec_gives_exactly_its_variants(load: Load) -> None:
    variants = """\
matrix: {direction: [backward, forward], mode: [max, avg], dtype: [float32, float16], staging: [shared], rows: [2]}
exclude:
  - {dtype: float16, mode: avg, why: for the test}
"""
    specs = load(variants=variants)
    assert specs.dtypes == (FLOAT16, FLOAT32)
    assert specs.modes == (MAX, AVG)
    assert specs.variants == (
        Variant(Direction.BACKWARD, MAX, FLOAT32, Staging.SHARED, 2),
        Variant(Direction.BACKWARD, MAX, FLOAT16, Staging.SHARED, 2),
        Variant(Direction.BACKWARD, AVG, FLOAT32, Staging.SHARED, 2),
        Variant(Direction.FORWARD, MAX, FLOAT32, Staging.SHARED, 2),
        Variant(Direction.FORWARD, MAX, FLOAT16, Staging.SHARED, 2),
        Variant(Direction.FORWARD, AVG, FLOAT32, Staging.SHARED, 2),
    )


def test_a_variant_has_one_name_and_one_key() -> None:
    variant = Variant(Direction.FORWARD, MAX, FLOAT16, Staging.SHARED, 8)
    assert variant.name == "knnpool_forward_max_float16_shared_r8"
    assert variant.key == KernelKey(Direction.FORWARD, Mode.MAX, "float16", Staging.SHARED, 8)


def test_two_variants_of_one_name_are_refused() -> None:
    variant = Variant(Direction.FORWARD, MAX, FLOAT16, Staging.SHARED, 8)
    with pytest.raises(SpecError) as caught:
        Specs((FLOAT16,), (MAX,), (variant, variant))
    assert str(caught.value) == "more than one variant is named knnpool_forward_max_float16_shared_r8"


@pytest.mark.parametrize("exclude", ["", "exclude: []\n"])
def test_exclude_may_be_absent_or_empty(load: Load, exclude: str) -> None:
    assert len(load(variants=VARIANTS + exclude).variants) == 16


def test_rows_16_takes_nothing_but_yaml(load: Load) -> None:
    before = {variant.name for variant in load().variants}
    after = {variant.name for variant in load(variants=VARIANTS.replace("[1, 2]", "[1, 2, 16]")).variants}
    assert after - before == {
        f"knnpool_{direction}_{mode}_{dtype}_shared_r16"
        for direction, mode, dtype in itertools.product(("forward", "backward"), ("max", "avg"), ("float16", "float32"))
    }
    assert before < after


def test_modes_stagings_and_dtypes_to_come_have_room_in_the_model(load: Load) -> None:
    specs = load(
        dtypes="float64: {bytes: 8, vector: 1, accumulate: float64}\n",
        modes="""\
sum: {aux: false, forward_reads: [], backward_reads: [], backward_tile: value}
weighted: {aux: false, forward_reads: [], backward_reads: [], backward_tile: value}
""",
        variants="""\
matrix: {direction: [forward, backward], mode: [sum, weighted], dtype: [float64], staging: [direct], rows: [1]}
""",
    )
    assert [variant.name for variant in specs.variants] == [
        "knnpool_forward_sum_float64_direct_r1",
        "knnpool_forward_weighted_float64_direct_r1",
        "knnpool_backward_sum_float64_direct_r1",
        "knnpool_backward_weighted_float64_direct_r1",
    ]


def test_crlf_and_lf_read_the_same(load: Load) -> None:
    lf = load()
    crlf = load(*(text.replace("\n", "\r\n").encode() for text in (DTYPES, MODES, VARIANTS)))
    assert crlf == lf


def test_lines_are_counted_the_same_with_crlf(faults: Faults) -> None:
    text = VARIANTS.replace("float32", "float31")
    assert faults(variants=text) == faults(variants=text.replace("\n", "\r\n"))


def test_the_project_s_own_specs_give_unique_variants_in_a_stable_order() -> None:
    specs = load_specs(folders.specs())
    names = [variant.name for variant in specs.variants]
    assert len(set(names)) == len(names) > 0
    assert load_specs(folders.specs()) == specs


def test_codegen_needs_neither_torch_nor_cupy_nor_numpy(tmp_path: Path) -> None:
    program = """\
import sys
sys.modules.update(dict.fromkeys(("torch", "cupy", "numpy")))  # importing one of them now fails
import knnpool_gen.codegen.outputs, knnpool_gen.codegen.render, knnpool_gen.codegen.variant
from knnpool_gen import folders
from knnpool_gen.codegen.spec import load_specs
print(len(load_specs(folders.specs()).variants))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == len(load_specs(folders.specs()).variants)


# --- files


def test_missing_files_are_reported_and_nothing_that_follows_from_them(faults: Faults) -> None:
    assert faults(dtypes=None) == ["specs/dtypes.yaml:1: cannot be read: No such file or directory"]
    assert faults(dtypes=None, modes=None, variants=None) == [
        "specs/dtypes.yaml:1: cannot be read: No such file or directory",
        "specs/modes.yaml:1: cannot be read: No such file or directory",
        "specs/variants.yaml:1: cannot be read: No such file or directory",
    ]


def test_a_folder_that_is_named_by_a_dot_is_shown_by_its_name(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults(variants="matrix: 3\n")
    monkeypatch.chdir(tmp_path / "specs")
    with pytest.raises(SpecError) as caught:
        load_specs(Path("."))
    assert str(caught.value) == "specs/variants.yaml:1: matrix must be a mapping, not '3'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("matrix:\n\tmode: [max]\n", "2: not YAML: found character '\\t' that cannot start any token"),
        ("matrix:\n  mode: [max\n  x: 1\n", "3: not YAML: expected ',' or ']', but got ':'"),
        ("matrix: *other\n", "1: not YAML: found undefined alias 'other'"),
        (b"matrix: \xff\n", "1: cannot be read: not UTF-8: invalid start byte"),
        ("", "1: variants.yaml must be a mapping, not nothing"),
        ("# a comment\n", "1: variants.yaml must be a mapping, not nothing"),
        ("- matrix\n", "1: variants.yaml must be a mapping, not a list"),
        ("\nmatrix\n", "2: variants.yaml must be a mapping, not 'matrix'"),
        ("exclude: []\n", "1: variants.yaml lacks the key 'matrix'"),
        ("matrix: !!python/name:os.system x\n", "1: matrix must be a mapping, not 'x'"),
    ],
)
def test_a_file_that_is_not_what_it_should_be(faults: Faults, text: str | bytes, message: str) -> None:
    assert faults(variants=text) == [f"specs/variants.yaml:{message}"]


# --- dtypes.yaml


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        (
            "vector: 2",
            "vektor: 2",
            [
                "2: dtype 'float32' lacks the key 'vector'",
                "2: unknown key 'vektor' in dtype 'float32'; allowed: accumulate, bytes, vector",
            ],
        ),
        ("bytes: 4", "bytes: true", ["2: bytes of dtype 'float32' must be an integer, not 'true'"]),
        ("bytes: 4", "bytes: 4.0", ["2: bytes of dtype 'float32' must be an integer, not '4.0'"]),
        ("bytes: 4", "bytes: 3", ["2: bytes of dtype 'float32' must be a power of two from 1 to 8, not 3"]),
        ("vector: 2", "vector: 32", ["2: vector of dtype 'float32' must be a power of two from 1 to 16, not 32"]),
        ("vector: 2", "vector:", ["2: vector of dtype 'float32' must be an integer, not nothing"]),
        ("bytes: 4", "bytes: 8", ["2: bytes of dtype 'float32' is 8, but by its name it has 32 bits"]),
        ("bytes: 4", "bytes: 2", ["2: bytes of dtype 'float32' is 2, but by its name it has 32 bits"]),
        (
            "vector: 2",
            "vector: 8",
            ["2: vector of dtype 'float32' must be at most 4, not 8: a load brings 16 bytes, a value has 4"],
        ),
        (
            "vector: 2, accumulate: float32",
            "vector: 2, accumulate: float64",
            [
                "2: accumulate of dtype 'float32' must be float32, not float64: everything is added in float64 "
                "for values of 8 bytes, otherwise in float32"
            ],
        ),
        (
            "vector: 2, accumulate: float32",
            "vector: 2, accumulate: float16",
            ["2: unknown accumulate 'float16'; allowed: float32, float64"],
        ),
        (
            "{bytes: 4, vector: 2, accumulate: float32}",
            "4",
            ["2: dtype 'float32' must be a mapping, not '4'"],
        ),
        (
            "float32: {bytes: 4",
            "float16: {bytes: 4",
            ["2: duplicate key 'float16' in dtypes.yaml; it stands in line 1 already"],
        ),
        (
            "{bytes: 4,",
            "{bytes: 4, bytes: 4,",
            ["2: duplicate key 'bytes' in dtype 'float32'; it stands in line 2 already"],
        ),
    ],
)
def test_faults_of_dtypes(faults: Faults, old: str, new: str, messages: list[str]) -> None:
    assert DTYPES.count(old) == 1
    found = faults(dtypes=DTYPES.replace(old, new), variants=VARIANTS.replace("float16, float32", "float16"))
    unused = "specs/dtypes.yaml:2: dtype 'float32' is defined here and used by no variant"
    assert [line for line in found if line != unused] == [f"specs/dtypes.yaml:{text}" for text in messages]
    assert (unused in found) == ("duplicate key 'float16'" not in messages[0])


@pytest.mark.parametrize("name", ["../float16", "Float16", "16", "float 16", "half"])
def test_the_name_of_a_dtype_can_be_part_of_a_file_name(faults: Faults, name: str) -> None:
    assert faults(dtypes=DTYPES.replace("float16", f'"{name}"'), variants=VARIANTS.replace("float16", f'"{name}"')) == [
        f"specs/dtypes.yaml:1: dtype {name!r} must be named as in torch: small letters, the size in bits, and what "
        "follows it"
    ]


# --- modes.yaml


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("true", "1", "1: aux of mode 'max' must be true or false, not '1'"),
        ("true", "false", "1: aux of mode 'max' must be true: it has its winning slots"),
        ("aux: false", "aux: true", "2: aux of mode 'avg' must be false: it has no winning slot"),
        (
            "[first_slot]",
            "[first]",
            "1: unknown forward table 'first'; allowed: first_slot, count",
        ),
        (
            "[first_slot]",
            "[weights]",
            "1: unknown forward table 'weights'; allowed: first_slot, count",
        ),
        (
            "backward_reads: []",
            "backward_reads: [first_slot]",
            "1: unknown backward table 'first_slot'; allowed: count",
        ),
        ("[first_slot]", "first_slot", "1: forward_reads of mode 'max' must be a list, not 'first_slot'"),
        ("[first_slot]", "[count, count]", "1: 'count' stands twice in forward_reads of mode 'max'"),
        ("tile: value", "tile: values", "1: unknown backward_tile 'values'; allowed: value, accumulate"),
        ("aux: true, ", "", "1: mode 'max' lacks the key 'aux'"),
    ],
)
def test_faults_of_modes(faults: Faults, old: str, new: str, message: str) -> None:
    assert MODES.count(old) == 1
    assert faults(modes=MODES.replace(old, new)) == [f"specs/modes.yaml:{message}"]


def test_a_mode_without_rules(faults: Faults) -> None:
    assert faults(modes=f"{MODES}median: {{}}\n") == [
        "specs/modes.yaml:3: unknown key 'median' in modes.yaml; allowed: avg, max, sum, weighted"
    ]


# --- the matrix


@pytest.mark.parametrize(
    ("old", "new", "messages"),
    [
        ("[forward,", "[forwards,", ["2: unknown direction 'forwards'; allowed: forward, backward"]),
        ("[max,", "[maximum,", ["3: unknown mode 'maximum'; allowed: max, avg"]),
        ("[max,", "[max, sum,", ["3: unknown mode 'sum'; allowed: max, avg"]),
        ("float32]", "float31]", ["4: unknown dtype 'float31'; allowed: float16, float32"]),
        ("[shared]", "[registers]", ["5: unknown staging 'registers'; allowed: shared, direct"]),
        ("[shared]", "[yes]", ["5: staging must be a string, not 'yes'"]),
        ("[shared]", "shared", ["5: staging must be a list, not 'shared'"]),
        ("[shared]", "", ["5: staging must be a list, not nothing"]),
        ("[shared]", "{shared: 1}", ["5: staging must be a list, not a mapping"]),
        ("[1, 2]", "[]", ["6: rows lists nothing"]),
        ("[1, 2]", "[1, 1]", ["6: 1 stands twice in rows"]),
        ("[1, 2]", "[true]", ["6: rows must be an integer, not 'true'"]),
        ("[1, 2]", "[2.0]", ["6: rows must be an integer, not '2.0'"]),
        ("[1, 2]", "[[2]]", ["6: rows must be an integer, not a list"]),
        (
            "[1, 2]",
            "[0, -2, 6, 64]",
            [f"6: rows must be a power of two from 1 to 32, not {rows}" for rows in (-2, 0, 6, 64)],
        ),
        (
            "  rows:",
            "  mode: [max]\n  rows:",
            ["6: duplicate key 'mode' in matrix; it stands in line 3 already"],
        ),
        ("matrix:", "extra: 1\nmatrix:", ["1: unknown key 'extra' in variants.yaml; allowed: exclude, matrix"]),
    ],
)
def test_faults_of_the_matrix(faults: Faults, old: str, new: str, messages: list[str]) -> None:
    assert VARIANTS.count(old) == 1
    assert faults(variants=VARIANTS.replace(old, new)) == [f"specs/variants.yaml:{text}" for text in messages]


def test_a_misspelt_axis_is_unknown_and_missing(faults: Faults) -> None:
    assert faults(
        variants="""\
matrix: {direction: [forward], mode: [max, avg], dtype: [float16, float32], staging: [shared], rowz: [1]}
"""
    ) == [
        "specs/variants.yaml:1: matrix lacks the key 'rows'",
        "specs/variants.yaml:1: unknown key 'rowz' in matrix; allowed: direction, dtype, mode, rows, staging",
    ]


def test_definitions_that_no_variant_uses(faults: Faults) -> None:
    variants = VARIANTS.replace("[max, avg]", "[avg]").replace("[float16, float32]", "[float16]")
    assert faults(variants=variants) == [
        "specs/dtypes.yaml:2: dtype 'float32' is defined here and used by no variant",
        "specs/modes.yaml:1: mode 'max' is defined here and used by no variant",
    ]


# --- exclude


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{mode: max, rows: 2}", "8: exclude lacks the key 'why'"),
        ("{mode: max, rows: 2, why: ' '}", "8: why is empty; say what speaks against these variants"),
        ("{mode: max, rows: 2, why: 3}", "8: why must be a string, not '3'"),
        ("{why: none}", "8: exclude names no axis; allowed: direction, mode, dtype, staging, rows"),
        (
            "{mode: max, rows: 2, colour: red, why: x}",
            "8: unknown key 'colour' in exclude; allowed: direction, dtype, mode, rows, staging, why",
        ),
        ("{dtype: float64, why: x}", "8: unknown dtype 'float64'; allowed: float16, float32"),
        ("{mode: [max, sum], why: x}", "8: unknown mode 'sum'; allowed: max, avg"),
        ("{rows: 3, why: x}", "8: rows must be a power of two from 1 to 32, not 3"),
        ("{rows: [], why: x}", "8: rows lists nothing"),
        ("{mode: max, rows: [2, 2], why: x}", "8: 2 stands twice in rows"),
        ("{rows: 8, why: x}", "8: this exclude matches no variant that is left; remove it"),
        ("{staging: direct, why: x}", "8: this exclude matches no variant that is left; remove it"),
        (
            "{mode: max, rows: 2, why: x}\n  - {mode: max, rows: 2, why: y}",
            "9: this exclude matches no variant that is left; remove it",
        ),
        ("{rows: 2, why: x}", "6: no variant uses rows 2: every one is excluded"),
        ("{dtype: float32, why: x}", "4: no variant uses dtype 'float32': every one is excluded"),
        ("{mode: avg, why: x}", "3: no variant uses mode 'avg': every one is excluded"),
        ("rows", "8: exclude must be a mapping, not 'rows'"),
    ],
)
def test_faults_of_exclude(faults: Faults, entry: str, message: str) -> None:
    assert faults(variants=f"{VARIANTS}exclude:\n  - {entry}\n") == [f"specs/variants.yaml:{message}"]


def test_exclude_is_a_list(faults: Faults) -> None:
    assert faults(variants=f"{VARIANTS}exclude:\n") == ["specs/variants.yaml:7: exclude must be a list, not nothing"]


def test_an_exclude_may_overlap_an_earlier_one(load: Load) -> None:
    specs = load(
        variants=f"{VARIANTS}exclude:\n  - {{mode: max, rows: 2, why: x}}\n  - {{dtype: float32, rows: 2, why: y}}\n"
    )
    assert [variant.name for variant in specs.variants if variant.rows == 2] == [
        "knnpool_forward_avg_float16_shared_r2",
        "knnpool_backward_avg_float16_shared_r2",
    ]


def test_a_faulty_matrix_is_not_blamed_on_excludes(faults: Faults) -> None:
    variants = VARIANTS.replace("[1, 2]", "[1, two]") + "exclude: [{rows: 2, why: x}]\n"
    assert faults(variants=variants) == ["specs/variants.yaml:6: rows must be an integer, not 'two'"]


# --- both directions


@pytest.mark.parametrize(("listed", "missing"), [("forward", "backward"), ("backward", "forward")])
def test_a_matrix_of_one_direction(faults: Faults, listed: str, missing: str) -> None:
    assert faults(variants=VARIANTS.replace("[forward, backward]", f"[{listed}]")) == [
        f"specs/variants.yaml:2: direction lists {listed} without {missing}; a mode and dtype need both"
    ]


def test_an_exclude_that_takes_one_direction_of_a_mode_and_dtype(faults: Faults) -> None:
    excludes = """\
exclude:
  - {mode: max, rows: 2, why: harmless}
  - {direction: backward, mode: max, dtype: float16, why: x}
  - {direction: forward, dtype: float32, rows: 1, why: leaves the tall ones of avg}
"""
    assert faults(variants=VARIANTS + excludes) == [
        "specs/variants.yaml:9: mode 'max' of dtype 'float16' is left with a forward and no backward; it needs both",
        "specs/variants.yaml:10: mode 'max' of dtype 'float32' is left with a backward and no forward; it needs both",
    ]


def test_excludes_may_take_the_directions_of_a_mode_and_dtype_one_after_the_other(load: Load) -> None:
    excludes = """\
exclude:
  - {direction: backward, mode: max, dtype: float16, why: x}
  - {direction: forward, mode: max, dtype: float16, why: y}
"""
    specs = load(variants=VARIANTS + excludes)
    assert {(variant.mode.mode.value, variant.dtype.name) for variant in specs.variants} == {
        ("max", "float32"),
        ("avg", "float16"),
        ("avg", "float32"),
    }


def test_a_direction_that_nothing_is_left_of_is_reported_once(faults: Faults) -> None:
    assert faults(variants=f"{VARIANTS}exclude:\n  - {{direction: backward, why: x}}\n") == [
        "specs/variants.yaml:2: no variant uses direction 'backward': every one is excluded"
    ]


def test_an_exclude_that_cannot_be_read_is_not_blamed_twice(faults: Faults) -> None:
    excludes = """\
exclude:
  - {direction: backward, mode: max, dtype: float16, why: x}
  - {direction: forward, mode: max, dtype: float15, why: y}
"""
    assert faults(variants=VARIANTS + excludes) == [
        "specs/variants.yaml:9: unknown dtype 'float15'; allowed: float16, float32"
    ]


# --- together


def test_all_faults_of_all_files_are_reported_together_in_order(faults: Faults) -> None:
    assert faults(
        dtypes=DTYPES.replace("bytes: 2", "bytes: two"),
        modes=MODES.replace("first_slot", "last_slot").replace("aux: false", "aux: maybe"),
        variants=VARIANTS.replace("[1, 2]", "[1, 3]").replace("shared", "shelf") + "exclude:\n  - {rows: 1}\n",
    ) == [
        "specs/dtypes.yaml:1: bytes of dtype 'float16' must be an integer, not 'two'",
        "specs/modes.yaml:1: unknown forward table 'last_slot'; allowed: first_slot, count",
        "specs/modes.yaml:2: aux of mode 'avg' must be true or false, not 'maybe'",
        "specs/variants.yaml:5: unknown staging 'shelf'; allowed: shared, direct",
        "specs/variants.yaml:6: rows must be a power of two from 1 to 32, not 3",
        "specs/variants.yaml:8: exclude lacks the key 'why'",
    ]


def test_specerror_is_a_valueerror(load: Load) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load(variants=None)
