"""`facetrain data inspect | check`: what a dataset holds, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Json, Workers
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.inspect import Inspection


def inspect_(
    folder: Annotated[Path, typer.Argument(help="A dataset's folder.")],
    sheet: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Write a sheet of images, an identity a row.")
    ] = None,
    identity: Annotated[
        int | None, typer.Option(min=0, help="List the images of this one; --sheet shows them all.")
    ] = None,
    augment: Annotated[
        Path | None,
        typer.Option(
            metavar="CONFIG", help="With --sheet: show what this run's augmentations do, an image a row."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what a dataset holds: identities, images, how many of each, sizes and formats."""
    if augment is not None and (sheet is None or identity is not None):
        raise UsageError("--augment CONFIG goes with --sheet PNG, and not with --identity")
    from facetrain.data.tools.inspect import images_of, inspect

    found = inspect(folder)
    pictures = None if identity is None else images_of(folder, identity)
    if sheet is not None:
        _draw(folder, sheet, identity, augment)
    if as_json:
        typer.echo(json.dumps(vars(found) | ({} if pictures is None else {"images": pictures})))
        return
    if pictures is not None:
        typer.echo(f"{folder}: identity {identity} has {len(pictures):,} images")
        for where in pictures:
            typer.echo(f"  {where}")
        return
    _tell(found)


def _draw(folder: Path, sheet: Path, identity: int | None, augment: Path | None) -> None:
    from facetrain.data.tools.contact_sheet import augmented_sheet, identities_sheet, identity_sheet

    if augment is not None:
        from facetrain.config.loading import load_config
        from facetrain.run.build import build_augment

        config = load_config(augment)
        augmented_sheet(folder, build_augment(config), sheet, size=config.data.image_size)
    elif identity is not None:
        identity_sheet(folder, identity, sheet)
    else:
        identities_sheet(folder, sheet)


def _tell(found: Inspection) -> None:
    typer.echo(f"{found.folder}: {found.images:,} images of {found.identities:,} identities")
    if found.identities_without_images:
        typer.echo(f"  {found.identities_without_images:,} identities have no image")
    typer.echo(f"  images per identity: {found.fewest:,} to {found.most:,}, median {found.median:g}")
    for name, count in found.histogram.items():
        typer.echo(f"    {name:>9}  {count:,} identities")
    for what, counts in (("sizes", found.sizes), ("formats", found.formats)):
        typer.echo(
            f"  {what} of {found.sample:,} images: " + ", ".join(f"{k} ({v:,})" for k, v in counts.items())
        )


def check(
    folder: Annotated[Path, typer.Argument(help="A dataset's folder.")],
    repair: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a clean copy; it must not be there yet.")
    ] = None,
    near: Annotated[bool, typer.Option(help="Look for images that are nearly the same, too.")] = False,
    show: Annotated[int, typer.Option(min=0, help="Show so many faults of each kind; --json has all.")] = 5,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Read every image and tell what is wrong; the exit code is 2 if training would suffer from it."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import check as tool

    with progress_bar("checking") as progress:
        found = tool.check(folder, near=near, repair=repair, workers=workers, progress=progress)
    if as_json:
        faults = [vars(fault) for fault in found.faults]
        facts = {"images": found.images, "identities": found.identities, "damaged": found.damaged}
        typer.echo(json.dumps(facts | {"good": len(found.good), "faults": faults}))
    else:
        typer.echo(f"{folder}: {found.images:,} whole images of {found.identities:,} identities")
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
