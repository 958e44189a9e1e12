"""`facetrain data merge | split | shuffle | subset | unpack | index`: datasets made of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Dataset, Json, Output, Seed, Workers
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.rewrite import Written


def merge(
    datasets: Annotated[list[Path], typer.Argument(help="Two datasets or more.")],
    output: Output,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write several datasets as one, their identities kept apart."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    if len(datasets) < 2:
        raise UsageError(f"{datasets[0]}: merge takes two datasets or more; `facetrain data pack` copies one")
    with progress_bar("merging") as progress:
        written = rewrite.merge(datasets, output, workers=workers, progress=progress)
    _say([written], as_json)


def split(
    dataset: Dataset,
    output: Annotated[
        Path, typer.Option(help="Folder to write: OUTPUT/train and OUTPUT/validation; must not be there yet.")
    ],
    validation: Annotated[float, typer.Option(help="Part of the identities for validation.")] = 0.1,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Divide a dataset in two that have no identity in common."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    with progress_bar("splitting") as progress:
        written = rewrite.split(
            dataset, output, validation=validation, seed=seed, workers=workers, progress=progress
        )
    _say(list(written), as_json)


def shuffle(
    dataset: Dataset, output: Output, seed: Seed = 0, workers: Workers = None, as_json: Json = False
) -> None:
    """Write a dataset with all its images mixed, for slow disks and readers that shuffle only a little."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    with progress_bar("shuffling") as progress:
        written = rewrite.shuffle(dataset, output, seed=seed, workers=workers, progress=progress)
    _say([written], as_json)


def subset(
    dataset: Dataset,
    output: Output,
    listed: Annotated[
        Path | None, typer.Option("--list", help="File of the identities to keep, one number a line.")
    ] = None,
    identities: Annotated[
        int | None, typer.Option(min=1, help="Keep so many identities, chosen by the seed.")
    ] = None,
    min_images: Annotated[int, typer.Option(min=1, help="Leave out identities with fewer images.")] = 1,
    max_images: Annotated[
        int | None, typer.Option(min=1, help="Keep so many images of each, chosen by the seed.")
    ] = None,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write a part of a dataset; its identities are numbered anew."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    with progress_bar("writing") as progress:
        written = rewrite.subset(
            dataset,
            output,
            listed=listed,
            identities=identities,
            min_images_per_identity=min_images,
            max_images_per_identity=max_images,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    _say([written], as_json)


def unpack(dataset: Dataset, output: Output, workers: Workers = None, as_json: Json = False) -> None:
    """Write every image, its bytes unchanged, into a folder per identity."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.rewrite import Written
    from facetrain.data.tools.unpack import unpack as unpacked

    with progress_bar("unpacking") as progress:
        identities, images = unpacked(dataset, output, workers=workers, progress=progress)
    _say([Written(str(output), identities, images)], as_json)


def index(
    rec: Annotated[Path, typer.Argument(help="A .rec file.")],
    overwrite: Annotated[bool, typer.Option(help="Replace the .idx that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write the .idx of a .rec that has none, or a wrong one."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.unpack import index as indexed

    with progress_bar("walking through the bytes") as progress:
        records = indexed(rec, overwrite=overwrite, progress=progress)
    path = rec.with_suffix(".idx")
    typer.echo(
        json.dumps({"index": str(path), "records": records}) if as_json else f"{path}: {records:,} records"
    )


def _say(written: list[Written], as_json: bool) -> None:
    if as_json:
        said = [vars(one) for one in written]
        typer.echo(json.dumps(said[0] if len(said) == 1 else said))
        return
    for one in written:
        typer.echo(f"{one.folder}: {one.images:,} images of {one.identities:,} identities")
