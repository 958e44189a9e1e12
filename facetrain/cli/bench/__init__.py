"""`facetrain bench …`: measure parts of facetrain on this machine."""

from __future__ import annotations

import typer

from facetrain.cli.bench import embed, head, loader, training

app = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this machine.")
app.command("train")(training.train)
app.command("loader")(loader.loader)
app.command("head")(head.head)
app.command("backbone")(training.backbone)
app.command("embed")(embed.embed)
