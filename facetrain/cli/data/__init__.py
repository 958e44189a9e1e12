"""The commands `facetrain data …`, for the owner of a dataset.

`create` makes datasets and landmarks, `pairs` makes verification sets, `transform` makes new datasets from existing
ones, `inspect` shows and checks a dataset, `clean` finds wrong labels with a model.
"""

from __future__ import annotations

import typer

from facetrain.cli.commands import DataCommands

app = typer.Typer(cls=DataCommands, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def prepare() -> None:
    """Create, inspect, check, transform and clean datasets."""
