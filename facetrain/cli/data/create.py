"""`facetrain data synth | pack | landmarks`: datasets, and landmarks of their images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.faces import FaceLandmarks, first_names, print_detections
from facetrain.cli.data.options import ImageSize, Json, MinImages, Output, Seed, Workers
from facetrain.cli.option_groups import option_groups
from facetrain.cli.outputs import echo_line
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError
from facetrain.files import shell_path


def synth(
    output: Output,
    identities: Annotated[int, typer.Option(min=1, help="Number of training identities.")] = 400,
    images_per_identity: Annotated[
        int, typer.Option(min=1, help="Number of training images of each identity.")
    ] = 20,
    eval_identities: Annotated[
        int, typer.Option(min=2, help="Number of other identities, for the verification set.")
    ] = 100,
    eval_pairs: Annotated[
        int, typer.Option(min=20, help="Number of pairs in synth.bin, a multiple of 20.")
    ] = 1000,
    image_size: ImageSize = 112,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the identities and their images.")] = 0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of rendering processes; the default is one per usable core."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Render synthetic identities: a training set, and verification pairs of other identities."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.synthetic import write_dataset

    with progress_bar("rendering identities") as progress:
        written = write_dataset(
            output,
            identities=identities,
            images_per_identity=images_per_identity,
            eval_identities=eval_identities,
            eval_pairs=eval_pairs,
            image_size=image_size,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(vars(written) | {"folder": str(written.folder)}))
    else:
        echo_line(
            f"{written.folder}: {written.images:,} images of {written.identities:,} identities, "
            f"and {written.pairs:,} verification pairs of other identities"
        )


@option_groups
def pack(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help="Dataset: a folder per identity, tar or Parquet shards, a zip archive, a list file, or a folder with "
            "train.rec."
        ),
    ],
    output: Output,
    faces: FaceLandmarks,
    images: Annotated[
        Path | None,
        typer.Option(
            help="With a list file, the folder that its paths are relative to; the default is the file's folder."
        ),
    ] = None,
    image_size: ImageSize = 112,
    quality: Annotated[
        int, typer.Option(min=1, max=100, help="JPEG quality of images that have to be encoded.")
    ] = 95,
    min_images: MinImages = 1,
    shuffle: Annotated[bool, typer.Option(help="Write the images in random order.")] = False,
    seed: Seed = 0,
    skip_bad: Annotated[
        bool,
        typer.Option(help="Leave out images that cannot be read or have no landmarks, and list them."),
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write a dataset as train.rec, train.idx and property, in InsightFace's format."""
    from facetrain.cli.progress import progress_bars
    from facetrain.data.formats.image_list import LIST_SUFFIXES
    from facetrain.data.skipped_files import skipped_summary
    from facetrain.data.tools import pack as tool

    if source.suffix.lower() not in LIST_SUFFIXES:
        refuse_given(context, "images", when=f"on {source}, which is not a list file")
    if not shuffle:
        refuse_given(context, "seed", when="without --shuffle")
    finder = faces.finder()
    with progress_bars("checking", "packing") as (checking, progress):
        packed = tool.pack(
            source,
            output,
            images=images,
            image_size=image_size,
            quality=quality,
            min_images_per_identity=min_images,
            landmarks=finder,
            shuffle=shuffle,
            seed=seed,
            skip_bad=skip_bad,
            workers=workers,
            checking=checking,
            progress=progress,
        )
    if as_json:
        skipped = [vars(one) for one in packed.skipped]
        typer.echo(json.dumps(vars(packed) | {"folder": str(packed.folder), "skipped": skipped}))
        return
    echo_line(f"{packed.folder}: {packed.images:,} images of {packed.identities:,} identities")
    if packed.skipped:
        echo_line(f"  left out {len(packed.skipped):,} files, see {packed.folder / tool.SKIPPED_FILE}:")
        for line in skipped_summary(packed.skipped):
            echo_line(f"    {line}")
    print_detections(finder)
    _print_next_steps(packed.folder, image_size)


@option_groups
def landmarks(
    data: Annotated[
        Path, typer.Argument(help="Dataset of any format but a mixture, or a verification set (.bin).")
    ],
    faces: FaceLandmarks,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write the landmarks of the images to a file beside them, for backbones with KP-RPE."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.detect_landmarks import write_dataset_landmarks

    finder = faces.finder()
    if finder is None:
        raise UsageError(f"{data}: give --detector with a YuNet model, or --landmarks with a file")
    with progress_bar("finding landmarks") as progress:
        written = write_dataset_landmarks(data, finder, workers=workers, progress=progress)
    if as_json:
        typer.echo(json.dumps(vars(written) | {"file": str(written.file)}))
        return
    echo_line(f"{written.file}: landmarks of {written.images - len(written.missing):,} images")
    if written.missing:
        echo_line(
            f"  no face found in {len(written.missing):,} images, which get the landmarks of an aligned face: "
            f"{first_names(written.missing)}"
        )


def _print_next_steps(folder: Path, image_size: int) -> None:
    path = shell_path(folder)
    echo_line("Next, look at the images and search for faults:")
    echo_line(f"  facetrain data inspect {path} --sheet faces.png")
    echo_line(f"  facetrain data check {path} --near-duplicates")
    echo_line("Then train with a config such as this one, CONFIG.yaml:")
    for line in (
        f"data: {{train: {json.dumps(str(folder), ensure_ascii=False)}, image_size: {image_size}}}",
        "model: {backbone: mbf}",
        "optim: {lr: 0.05, warmup_epochs: 1}",
        "train: {global_batch_size: 64, epochs: 20}",
        "eval: {targets: []}",
    ):
        echo_line(f"    {line}")
    echo_line("  facetrain train --config CONFIG.yaml")
