"""``knnpool-gen``: what is typed into a terminal.

Exit codes: 0 done, 1 the answer is no (differences, a kernel that fails, a machine that lacks something), 2 wrong usage
or bad input.
"""

from __future__ import annotations

import typer

from knnpool_gen.cli import bench, doctor, kernels, tune
from knnpool_gen.cli.kernels import ARCHITECTURES

__all__ = ["ARCHITECTURES", "app"]

app = typer.Typer(
    name="knnpool-gen",
    help="Generate, inspect, compile, verify and measure the kernels of k-nearest-neighbour pooling.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(kernels.regenerate)
app.command("list")(kernels.list_variants)
app.command()(kernels.show)
app.command("compile")(kernels.compile_variants)
app.command()(kernels.verify)
app.command()(bench.bench)
app.command()(tune.tune)
app.command()(doctor.doctor)
