"""`facetrain runs` and `facetrain report`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds the run folders.")] = Path(
        "runs"
    ),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list instead of a table; it has every field.")
    ] = False,
) -> None:
    """List the runs of a folder with their state, step, last loss and best accuracy."""
    from facetrain.run.list_runs import format_runs, list_runs

    found = list_runs(folder)
    if as_json:
        typer.echo(json.dumps([asdict(run) for run in found], indent=1))
    elif found:
        typer.echo(format_runs(found))
    else:
        typer.echo(f"{folder}: no runs")


def report(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run.")],
    output: Annotated[
        Path | None, typer.Option(help="HTML file to write; the default is report.html in the run folder.")
    ] = None,
) -> None:
    """Write a report of a run, as one HTML page that needs no network."""
    from facetrain.cli.outputs import require_writable
    from facetrain.run.report import write_run_report

    require_writable(output)
    page = output or run_dir / "report.html"
    write_run_report(run_dir, page)
    typer.echo(page)
