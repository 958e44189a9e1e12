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
