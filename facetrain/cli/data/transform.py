"""`facetrain data merge | split | shuffle | subset | unpack | convert | index`: new datasets from existing ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from facetrain.cli.data.options import Dataset, Json, MinImages, Output, Seed, Workers
from facetrain.cli.outputs import echo_line
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.rewrite import WrittenDataset


def merge(
    datasets: Annotated[list[Path], typer.Argument(metavar="DATASET", help="Two or more datasets.")],
    output: Output,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write several datasets as one; identities of different datasets stay different."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    if len(datasets) < 2:
        raise UsageError(
            f"{datasets[0]}: merge needs two or more datasets; to copy one, use `facetrain data pack`"
        )
    with progress_bar("merging") as progress:
        written = rewrite.merge(datasets, output, workers=workers, progress=progress)
    _print_written([written], as_json)
    if written.without_landmarks and not as_json:
        echo_line(
            f"  landmarks are left out, because {', '.join(written.without_landmarks)} has none; "
            "`facetrain data landmarks` can write them"
        )


def split(
    dataset: Dataset,
    output: Annotated[
        Path, typer.Option(help="Folder to write OUTPUT/train and OUTPUT/validation to; it must not exist.")
    ],
    validation: Annotated[
        float, typer.Option(help="Fraction of the identities for validation, above 0 and below 1.")
    ] = 0.1,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Split a dataset into a training set and a validation set without common identities."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    with progress_bar("splitting") as progress:
        written = rewrite.split(
            dataset, output, validation=validation, seed=seed, workers=workers, progress=progress
        )
    _print_written(list(written), as_json)


def shuffle(
    dataset: Dataset, output: Output, seed: Seed = 0, workers: Workers = None, as_json: Json = False
) -> None:
    """Write a dataset in random order, for slow disks and for readers that shuffle only nearby images."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    with progress_bar("shuffling") as progress:
        written = rewrite.shuffle(dataset, output, seed=seed, workers=workers, progress=progress)
    _print_written([written], as_json)


def subset(
    context: typer.Context,
    dataset: Dataset,
    output: Output,
    listed: Annotated[
        Path | None,
        typer.Option(
            "--list",
            metavar="FILE",
            help="File with the identities to keep, one number per line; the default is all.",
        ),
    ] = None,
    identities: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of identities to keep, selected at random; the default is all of them."
        ),
    ] = None,
    min_images: MinImages = 1,
    max_images: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of images to keep of each identity, selected at random; the default is all."
        ),
    ] = None,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write some identities of a dataset, renumbered without gaps."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import rewrite

    if identities is None and max_images is None:
        refuse_given(context, "seed", when="without --identities and --max-images")
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
    _print_written([written], as_json)


def unpack(dataset: Dataset, output: Output, workers: Workers = None, as_json: Json = False) -> None:
    """Write every image, its bytes unchanged, into a folder per identity."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import unpack as tool

    with progress_bar("unpacking") as progress:
        written = tool.unpack(dataset, output, workers=workers, progress=progress)
    _print_written([written], as_json)


def convert(
    dataset: Dataset,
    output: Annotated[
        Path,
        typer.Option(help="Folder to write, or file for lmdb (.lmdb) and zip (.zip); it must not exist."),
    ],
    to: Annotated[
        Literal["recordio", "webdataset", "parquet", "lmdb", "zip"], typer.Option(help="Format to write.")
    ],
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write a dataset in another format, with the same bytes, order and names; labels lose their gaps."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import convert as tool

    with progress_bar("converting") as progress:
        written = tool.convert(dataset, output, to, workers=workers, progress=progress)
    _print_written([written], as_json)
    if written.empty_identities and not as_json:
        echo_line(
            f"  identities without images: {written.empty_identities:,}, left out; the labels after them are "
            f"renumbered, so that a run on {dataset} cannot continue on {output}"
        )


def index(
    rec: Annotated[Path, typer.Argument(help="The .rec file.")],
    overwrite: Annotated[bool, typer.Option(help="Replace the .idx if it exists.")] = False,
    as_json: Json = False,
) -> None:
    """Write the .idx of a .rec file whose .idx is missing or wrong."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.formats.record_index import rebuild_index

    with progress_bar("scanning (bytes)") as progress:
        records = rebuild_index(rec, overwrite=overwrite, progress=progress)
    path = rec.with_suffix(".idx")
    typer.echo(
        json.dumps({"index": str(path), "records": records}) if as_json else f"{path}: {records:,} records"
    )


def _print_written(written: list[WrittenDataset], as_json: bool) -> None:
    if as_json:
        results = [vars(one) for one in written]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results))
        return
    for one in written:
        echo_line(f"{one.folder}: {one.images:,} images of {one.identities:,} identities")
