"""`facetrain data …`: what a dataset's owner does."""

from __future__ import annotations

import signal
import sys

import typer

from facetrain.cli.data import change, faces, look, make

app = typer.Typer(help="Make, look at and change datasets.", no_args_is_help=True)
app.command("synth")(make.synth)
app.command("pack")(make.pack)
app.command("pairs")(make.pairs)
app.command("inspect")(look.inspect_)
app.command("check")(look.check)
app.command("index")(change.index)
app.command("merge")(change.merge)
app.command("split")(change.split)
app.command("shuffle")(change.shuffle)
app.command("subset")(change.subset)
app.command("unpack")(change.unpack)
app.command("overlap")(faces.overlap)
app.command("clean")(faces.clean)


@app.callback()
def leave_nothing_behind() -> None:
    """Make, look at and change datasets."""
    # By default a SIGTERM ends the process where it is, before what it was writing aside is cleared.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
