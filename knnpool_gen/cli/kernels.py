"""Commands for kernel authors: regenerate, list, show, compile, verify."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from knnpool_gen.cli.shared import JsonOption, errors, print_json, print_text, progress, stderr, stdout
from knnpool_gen.errors import InvalidArgumentError, KNNPoolError, StaleDispatchError
from knnpool_gen.kernel import Kernel, KernelKey

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

VariantsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[VARIANT]...", help="Names of variants; all if none is given.")
]


def regenerate(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if anything differs.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show every difference.")] = False,
    specs: Annotated[Path | None, typer.Option(help="Folder of the YAML specs.")] = None,
    templates: Annotated[Path | None, typer.Option(help="Folder of the templates.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the generated files.")] = None,
) -> None:
    """Render every variant of the specs and write what changed."""
    from knnpool_gen import folders
    from knnpool_gen.codegen.render import Renderer
    from knnpool_gen.codegen.spec import load_specs

    out = (out or folders.generated()).absolute()  # lines begin with its name, which "." does not have
    with errors():
        variants = load_specs(specs or folders.specs()).variants
        outputs = Renderer(templates or folders.templates()).outputs(variants)
        shown = outputs.diff(out) if diff else ""
        comparison = outputs.compare(out) if check else outputs.write(out)
    print_text(shown, "diff")
    verb = ("differs", "missing", "orphaned") if check else ("updated", "created", "removed")
    for what, paths in zip(verb, (comparison.changed, comparison.missing, comparison.orphaned), strict=True):
        for path in paths:
            stdout.print(f"{what:8} {out.name}/{path}", markup=False)
    differing = len(comparison.changed) + len(comparison.missing) + len(comparison.orphaned)
    if check and differing:
        stderr.print(f"{differing} file(s) differ from specs and templates; run `knnpool-gen regenerate`")
        raise typer.Exit(1)
    stdout.print(f"{len(variants)} variants, {len(outputs.files)} file(s) up to date")


def list_variants(
    problem: Annotated[
        tuple[int, int, int] | None,
        typer.Option(metavar="NIN NOUT K", help="Show what serves a table of this size, instead of all variants."),
    ] = None,
    rows: Annotated[int, typer.Option(help="With --problem: rows of the input (B * C).")] = 4096,
    as_json: JsonOption = False,
) -> None:
    """List every variant of the dispatch table, or those chosen for a problem."""
    if problem is not None:
        _list_choices(*problem, rows, as_json)
        return
    with errors():
        entries = _select_variants(None)
    if as_json:
        print_json([_describe(key, kernel) for key, kernel in entries])
        return
    table = Table("variant", "arguments", "bytes a node", box=None)
    for _, kernel in entries:
        table.add_row(kernel.name, ", ".join(kernel.arguments), str(kernel.node_bytes))
    stdout.print(table)


def _list_choices(nin: int, nout: int, k: int, rows: int, as_json: bool) -> None:
    from knnpool_gen.runtime.choices import choices, current_device

    device_name, device = current_device()
    with errors():
        found = choices(nin, nout, k, rows, device)
    if as_json:
        print_json([choice.as_dict() for choice in found])
        return
    table = Table("variant", "nan", "stack", "grid", "threads", "shared bytes", box=None)
    for choice in found:
        cells = (choice.variant, choice.nan, choice.stack, choice.grid, choice.threads, choice.shared_bytes)
        table.add_row(*map(str, cells))
    stdout.print(table)
    stderr.print(f"Nin {nin}, Nout {nout}, K {k}, {rows} rows, on {device_name}")


def show(variant: Annotated[str, typer.Argument(help="Name of a variant, as `list` prints it.")]) -> None:
    """Show the facts and the CUDA source of one variant."""
    from knnpool_gen.runtime.compile import read_source

    with errors():
        ((key, kernel),) = _select_variants([variant])
        source = read_source(kernel)
    for name, value in _describe(key, kernel).items():
        stdout.print(f"// {name}: {value}", markup=False)
    print_text(source, "cuda")


def compile_variants(
    variants: VariantsArgument = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Architecture, such as sm_90; may be repeated. All known ones if absent."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile variants with NVRTC; needs no GPU. Exit 1 if one fails or spills registers."""
    from knnpool_gen.compilation import Compilation, architectures, compile_matrix

    with errors():
        chosen = [kernel for _, kernel in _select_variants(variants)]
        _note_if_stale()
        archs = architectures(arch or (), ARCHITECTURES)
        results: list[Compilation] = []
        for result in progress(compile_matrix(chosen, archs), len(chosen) * len(archs), "compiling"):
            results.append(result)
    bad = [result for result in results if not result.ok]
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        table = Table("variant", "arch", "cubin bytes", "registers", "spill bytes", "shared bytes", box=None)
        for result in results:
            table.add_row(*(str(cell) for cell in result.as_row()), style="" if result.ok else "red")
        stdout.print(table)
        for result in bad:
            if result.error:
                stderr.print(result.error, markup=False)
    stderr.print(f"{len(results) - len(bad)} of {len(results)} compiled without spills")
    raise typer.Exit(1 if bad else 0)


def verify(
    variants: VariantsArgument = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="Run the CUDA sources on the CPU.")] = False,
    sanitizer: Annotated[
        str, typer.Option(help="With --emulate: none, address (and undefined behaviour) or thread.")
    ] = "none",
    as_json: JsonOption = False,
) -> None:
    """Compare variants with the reference, bit for bit, on this machine's GPU or in emulation."""
    with errors():
        chosen = _select_variants(variants)  # before torch is loaded
        _note_if_stale()

    from knnpool_gen.verification import Verdict, choose_backend, verify_kernel

    with errors():
        backend = choose_backend(emulate, sanitizer)
        verdicts: list[Verdict] = []
        for key, kernel in progress(chosen, len(chosen), f"verifying ({backend.name})"):
            verdicts.append(verify_kernel(key, kernel, backend))
    bad = [verdict for verdict in verdicts if verdict.faults]
    if as_json:
        print_json([verdict.as_dict() for verdict in verdicts])
    else:
        table = Table("variant", "cases", "faults", box=None)
        for verdict in verdicts:
            table.add_row(
                verdict.name,
                str(verdict.cases),
                str(len(verdict.faults)),
                style="red" if verdict.faults else "",
            )
        stdout.print(table)
        for verdict in bad:
            for fault in verdict.faults[:5]:
                stderr.print(f"{verdict.name}: {fault}", markup=False)
    stderr.print(f"{len(verdicts) - len(bad)} of {len(verdicts)} variants agree with the reference ({backend.name})")
    raise typer.Exit(1 if bad else 0)


def _note_if_stale() -> None:
    """Say so where specs or templates have changed: what is judged is what was generated before."""
    from knnpool_gen.codegen.checkout import compare_generated

    try:
        comparison = compare_generated()
    except KNNPoolError as error:
        stderr.print(f"specs or templates are at fault, and generated/ is older:\n{error}", markup=False)
        return
    if comparison.differs:
        stderr.print("generated/ differs from specs and templates; `knnpool-gen regenerate` brings it up to date")


def _select_variants(names: Sequence[str] | None) -> list[tuple[KernelKey, Kernel]]:
    """The entries of the dispatch table with these names, or all."""
    try:
        from knnpool_gen.generated.dispatch import KERNELS
    except (ImportError, SyntaxError, TypeError, AttributeError) as error:
        raise StaleDispatchError(
            f"generated/dispatch.py cannot be loaded ({error}); run `knnpool-gen regenerate`"
        ) from error

    by_name = {kernel.name: (key, kernel) for key, kernel in KERNELS.items()}
    unknown = [name for name in names or () if name not in by_name]
    if unknown:
        raise InvalidArgumentError(f"no variant {', '.join(unknown)}; `knnpool-gen list` shows all {len(by_name)}")
    return [by_name[name] for name in names or by_name]


def _describe(key: KernelKey, kernel: Kernel) -> dict[str, Any]:
    return {
        "variant": kernel.name,
        "direction": key.direction.value,
        "mode": key.mode.value,
        "dtype": key.dtype,
        "staging": key.staging.value,
        "rows": key.rows,
        "file": f"generated/{kernel.file}",
        "arguments": list(kernel.arguments),
        "node_bytes": kernel.node_bytes,
    }
