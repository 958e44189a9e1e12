"""The table of commands. Each imports what it needs when it is called, so that `--help` does not wait for torch."""

from __future__ import annotations

from typing import Annotated

import typer

from facetrain import __version__
from facetrain.cli import bench, config, data, doctor, evaluate, export, plan, search, train

app = typer.Typer(
    name="facetrain",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("eval")(evaluate.evaluate)
app.command("embed")(evaluate.embed)
app.command("compare")(evaluate.compare)
app.command("search")(search.search)
app.command("export")(export.export)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Train, verify and export face-recognition models, on one CPU or on many GPUs."""
