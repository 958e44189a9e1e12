"""`facetrain data synth | pack | landmarks`: datasets, and landmarks of their images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.dataset_options import (
    IMAGE_SIZE,
    SEED,
    FaceLandmarks,
    Workers,
    Writing,
    detections,
    first_names,
    print_detections,
    print_written,
)
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Json, local_file
from facetrain.cli.outputs import echo_line
from facetrain.cli.progress_bar import progress_bar, progress_bars
from facetrain.data.synthetic.options import SyntheticFaces
from facetrain.errors import UsageError
from facetrain.remote.address import is_remote, public
from facetrain.text import count_text, shell_path


@option_groups
def synth(
    faces: Annotated[
        SyntheticFaces,
        {
            "identities": typer.Option(min=1, help="Number of training identities."),
            "images_per_identity": typer.Option(min=1, help="Training images of each identity."),
            "eval_identities": typer.Option(min=2, help="Other identities, for verification."),
            "eval_pairs": typer.Option(min=20, help="Pairs in synth.bin, a multiple of 20."),
            "image_size": IMAGE_SIZE,
            "seed": SEED,
        },
    ],
    writing: Writing,
) -> None:
    """Draw people that do not exist: a training set, and pairs."""
    from facetrain.data.synthetic.dataset_writer import write_synthetic

    with progress_bar("drawing identities") as progress:
        written = write_synthetic(writing.output, faces, workers=writing.workers, progress=progress)
    print_written([written], writing.as_json, pairs=faces.eval_pairs)
    if not writing.as_json:
        echo_line(f"  {faces.eval_pairs:,} verification pairs of other identities")


@option_groups
def pack(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            parser=local_file,
            help="Dataset: a folder per identity, tar or Parquet shards, a list file, or a folder with "
            "train.rec.",
        ),
    ],
    writing: Writing,
    faces: FaceLandmarks,
    image_size: Annotated[int, IMAGE_SIZE] = 112,
    skip_bad: Annotated[
        bool, typer.Option(help="Leave out images that cannot be read or have no landmarks, and list them.")
    ] = False,
    images: Annotated[Path | None, typer.Option(help="Folder of the paths in a list file.")] = None,
) -> None:
    """Write a dataset as train.rec, train.idx and property."""
    from facetrain.data.label_problems import FEWEST_PEOPLE
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools import pack as tool
    from facetrain.data.tools.photo_shapes import describe_photos
    from facetrain.telemetry.log import warn

    finder, output = faces.finder(), writing.output
    with progress_bars("checking", "packing") as (checking, progress):
        packed = tool.pack(
            source, output, image_size=image_size, skip_bad=skip_bad,
            images=images, landmarks=finder, workers=writing.workers, checking=checking, progress=progress,
        )  # fmt: skip
    if writing.as_json:
        print_written([packed], as_json=True, **detections(finder))
        return
    print_written([packed])
    if packed.resized:
        resized = count_text(packed.resized, "image was", "images were")
        echo_line(f"  {resized} resized to {image_size} × {image_size} pixels (--image-size)")
    print_detections(finder)
    if packed.identities == 1:
        warn(
            f"{source}: all images are of one identity, and a model needs many; give a folder with a folder of images "
            "per person, or the list file of the people with --images FOLDER"
        )
    packed_from = open_dataset(source, root=images)
    listed = packed_from.photo_landmarks if finder is None else None
    if listed is not None:
        echo_line("  the faces were aligned by the landmarks of the list")
    elif finder is None and (photos := describe_photos(packed_from)):
        warn(f"{source}: {photos}")
    path = shell_path(output)
    size = "" if image_size == 112 else f" --set data.image_size={image_size}"
    then, command = "Then train:", f"train --data {path} --batch 64{size}"
    if packed.identities < FEWEST_PEOPLE:
        then = "Then fine-tune a model; a new one needs thousands of people:"
        command = f"finetune {path} --model MODEL"
    for line in (
        "Next, look at the images and search for faults:",
        f"  facetrain data inspect {path} --sheet faces.html",
        f"  facetrain data check {path}",
        then,
        f"  facetrain {command}",
    ):
        echo_line(line)


def _local_folder(text: str) -> Path:
    if is_remote(text):
        raise UsageError(
            f"{public(text)}: the landmarks are written beside the images; download these with `facetrain get`, and "
            "give their path"
        )
    return Path(text)


@option_groups
def landmarks(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            parser=_local_folder,
            help="Dataset but no mixture, or verification set (.bin).",
        ),
    ],
    faces: FaceLandmarks,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write landmarks to a file beside the images.

    They come from --detector or --landmarks; backbones with KP-RPE need them.
    """
    from facetrain.data.formats.landmark_file import landmarks_path
    from facetrain.data.tools.landmark_writer import write_dataset_landmarks

    finder = faces.finder()
    if finder is None:
        raise UsageError(f"{data}: give --detector with a YuNet model, or --landmarks with a file")
    with progress_bar("finding landmarks") as progress:
        images, missing = write_dataset_landmarks(data, finder, workers=workers, progress=progress)
    path = landmarks_path(data)
    if as_json:
        typer.echo(json.dumps({"file": str(path), "images": images, "missing": missing}))
        return
    echo_line(f"{path}: landmarks of {count_text(images - len(missing), 'image')}")
    if missing:
        echo_line(
            f"  {f'{faces.landmarks} has no landmarks of' if faces.landmarks else 'no face found in'} "
            f"{count_text(len(missing), 'image')}, which get the landmarks of an aligned face: {first_names(missing)}"
        )
