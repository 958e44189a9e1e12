"""The table of commands. Each is imported when it is called, so that `--help` does not wait for torch."""

from __future__ import annotations

import typer

from facetrain import __version__
from facetrain.cli import bench, config, data, doctor, evaluate, export, plan, train

app = typer.Typer(
    name="facetrain",
    help="Train, verify and export face-recognition models, on one CPU or on many GPUs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("train")(train.train)
app.command("resume")(train.resume)
app.command("eval")(evaluate.evaluate)
app.command("embed")(evaluate.embed)
app.command("compare")(evaluate.compare)
app.command("search")(evaluate.search)
app.command("export")(export.export)
app.command("plan")(plan.plan)
app.command("doctor")(doctor.doctor)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench.bench)
app.add_typer(data.app, name="data")
app.add_typer(config.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show it."),
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error; may stand anywhere."),
) -> None:
    """Train, verify and export face-recognition models, on one CPU or on many GPUs."""
