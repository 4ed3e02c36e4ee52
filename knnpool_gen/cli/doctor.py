"""``knnpool-gen doctor``: what is here, what is missing, and how to mend it."""

from __future__ import annotations

import typer

from knnpool_gen.cli.shared import JsonOption, print_json, stderr, stdout

COLOURS = {"ok": "", "note": "yellow", "problem": "red"}


def doctor(as_json: JsonOption = False) -> None:
    """Look at versions, device, compiler, caches, settings and generated files. Exit 1 if something is wrong."""
    from knnpool_gen.doctor import State, examine

    findings = list(examine())
    problems = [finding for finding in findings if finding.state is State.PROBLEM]
    if as_json:
        print_json([finding.as_dict() for finding in findings])
    else:
        for finding in findings:
            line = f"{finding.state.value:8} {finding.subject:11} {finding.text}"
            stdout.print(line, style=COLOURS[finding.state.value], markup=False)
            if finding.mend:
                stdout.print(f"{'':20} to mend it: {finding.mend}", markup=False)
    stderr.print(f"{len(problems)} problem(s)" if problems else "nothing is wrong")
    raise typer.Exit(1 if problems else 0)
