"""The commands `facetrain data …`, for the owner of a dataset.

`create` makes datasets and landmarks, `pairs` makes verification sets, `transform` makes new datasets from existing
ones, `inspect` shows and checks a dataset, `clean` finds wrong and overlapping identities with a model.
"""

from __future__ import annotations

import signal
import sys

import typer

from facetrain.cli.data import clean, create, inspect, pairs, transform

app = typer.Typer(help="Create, inspect, check, transform and clean datasets.", no_args_is_help=True)
app.command("synth")(create.synth)
app.command("pack")(create.pack)
app.command("pairs")(pairs.pairs)
app.command("landmarks")(create.landmarks)
app.command("inspect")(inspect.inspect)
app.command("check")(inspect.check)
app.command("merge")(transform.merge)
app.command("split")(transform.split)
app.command("convert")(transform.convert)
app.command("overlap")(clean.overlap)
app.command("clean")(clean.clean)


@app.callback()
def prepare() -> None:
    """Create, inspect, check, transform and clean datasets."""
    # The default action of SIGTERM ends the process at once, and would leave the temporary folder of the output.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
