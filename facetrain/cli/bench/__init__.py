"""`facetrain bench …`: measure parts of facetrain on this machine."""

from __future__ import annotations

import typer

from facetrain.cli.bench import data, evaluation, head, training

app = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this machine.")
app.command("loader")(data.loader)
app.command("formats")(data.formats)
app.command("index")(data.index)
app.command("shuffle")(data.shuffle)
app.command("head")(head.head)
app.command("head-traffic")(head.head_traffic)
app.command("backbone")(training.backbone)
app.command("train")(training.train)
app.command("scaling")(training.scaling)
app.command("checkpoint")(training.checkpoint)
app.command("embed")(evaluation.embed)
app.command("search")(evaluation.search)
app.command("verification")(evaluation.verification)
app.command("clean")(evaluation.clean)
