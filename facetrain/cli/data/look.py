"""`facetrain data inspect | check`: what a dataset holds, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.options import Json


def inspect_(
    folder: Annotated[Path, typer.Argument(help="A dataset's folder.")],
    sheet: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Write a sheet of pictures, an identity a row.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what a dataset holds: identities, images, how many of each, sizes and formats."""
    from facetrain.data.tools.inspect import contact_sheet, inspect

    found = inspect(folder)
    if sheet is not None:
        contact_sheet(folder, sheet)
    if as_json:
        typer.echo(json.dumps(vars(found)))
        return
    typer.echo(f"{folder}: {found.images:,} images of {found.identities:,} identities")
    if found.identities_without_images:
        typer.echo(f"  {found.identities_without_images:,} identities have no image")
    typer.echo(f"  images per identity: {found.fewest:,} to {found.most:,}, median {found.median:g}")
    for name, count in found.histogram.items():
        typer.echo(f"    {name:>9}  {count:,} identities")
    for what, counts in (("sizes", found.sizes), ("formats", found.formats)):
        typer.echo(
            f"  {what} of {found.sample:,} pictures: " + ", ".join(f"{k} ({v:,})" for k, v in counts.items())
        )
