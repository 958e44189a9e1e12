"""`facetrain data inspect | check`: what a dataset holds, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.options import Json, Workers


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


def check(
    folder: Annotated[Path, typer.Argument(help="A dataset's folder.")],
    repair: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a clean copy; it must not be there yet.")
    ] = None,
    near: Annotated[bool, typer.Option(help="Look for pictures that are nearly the same, too.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Show so many faults of each kind; --json has all.")] = 5,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Read every picture and tell what is wrong; the exit code is 2 if training would suffer from it."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import check as tool

    with progress_bar("checking") as progress:
        found = tool.check(folder, near=near, repair=repair, workers=workers, progress=progress)
    if as_json:
        faults = [vars(fault) for fault in found.faults]
        facts = {"images": found.images, "identities": found.identities, "damaged": found.damaged}
        typer.echo(json.dumps(facts | {"good": len(found.good), "faults": faults}))
    else:
        typer.echo(f"{folder}: {found.images:,} whole pictures of {found.identities:,} identities")
        for kind, meaning in tool.KINDS.items():
            said = [fault.said for fault in found.faults if fault.kind == kind]
            if said:
                typer.echo(f"  {meaning}: {len(said):,}")
                for line in said[:show]:
                    typer.echo(f"    {line}")
        if not found.faults:
            typer.echo("  nothing is wrong with it")
        if repair is not None:
            typer.echo(f"{repair}: {len(found.good):,} images")
    if found.damaged and repair is None:
        raise typer.Exit(2)
