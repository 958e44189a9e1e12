"""`facetrain data synth | pack | pairs`: make datasets and verification sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Json, Output, Seed, Workers
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.landmarks import Finder

Landmarks = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Align faces by the points of a CSV or JSON: name,x1,y1,…,x5,y5."),
]
Detector = Annotated[
    Path | None,
    typer.Option(metavar="ONNX", help="Align faces by the points that OpenCV's YuNet finds; its model file."),
]


def synth(
    output: Annotated[Path, typer.Option(help="Folder to draw into; it must not be there yet.")],
    identities: Annotated[int, typer.Option(min=1, help="People to train on.")] = 400,
    images_per_identity: Annotated[int, typer.Option(min=1, help="Images of each.")] = 20,
    eval_identities: Annotated[
        int, typer.Option(min=2, help="Further people, for verification alone.")
    ] = 100,
    eval_pairs: Annotated[int, typer.Option(min=20, help="Pairs in synth.bin, a multiple of 20.")] = 1000,
    image_size: Annotated[int, typer.Option(min=16, help="Pixels a side.")] = 112,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other people.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Draw people who do not exist: a training set, and verification pairs of people it does not have."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.synthetic import write_dataset

    with progress_bar("drawing people") as progress:
        drawn = write_dataset(
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
        typer.echo(json.dumps(vars(drawn) | {"folder": str(drawn.folder)}))
    else:
        typer.echo(
            f"{drawn.folder}: {drawn.images:,} images of {drawn.identities:,} people, "
            f"and {drawn.pairs:,} pairs of others"
        )


def pack(
    source: Annotated[
        Path,
        typer.Argument(help="A dataset: a folder per identity, tar or Parquet shards, a list file, records."),
    ],
    output: Output,
    images: Annotated[
        Path | None,
        typer.Option(help="With a list file: the folder where its paths begin; by default its own."),
    ] = None,
    landmarks: Landmarks = None,
    detector: Detector = None,
    image_size: Annotated[int, typer.Option(min=16, help="Pixels a side.")] = 112,
    quality: Annotated[
        int, typer.Option(min=1, max=100, help="Of images that have to be encoded anew.")
    ] = 95,
    min_images: Annotated[int, typer.Option(min=1, help="Leave out identities with fewer images.")] = 1,
    shuffle: Annotated[bool, typer.Option(help="Mix the images of all identities.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another seed mixes otherwise.")] = 0,
    skip_bad: Annotated[
        bool, typer.Option(help="Leave out images that cannot be decoded or have no face; list them.")
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write a dataset as train.rec, train.idx and property, as InsightFace has it."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.pack import pack as packed

    points = _finder(landmarks, detector)
    with progress_bar("packing") as progress:
        done = packed(
            source,
            output,
            images=images,
            image_size=image_size,
            quality=quality,
            min_images_per_identity=min_images,
            landmarks=points,
            shuffle=shuffle,
            seed=seed,
            skip_bad=skip_bad,
            workers=workers,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(vars(done) | {"folder": str(done.folder)}))
        return
    typer.echo(f"{done.folder}: {done.images:,} images of {done.identities:,} identities")
    for said in done.skipped:
        typer.echo(f"  left out: {said}")


def pairs(
    source: Annotated[
        Path,
        typer.Argument(
            help="A list of LFW's, CALFW's, CPLFW's, AgeDB's or CFP's form; or a dataset to draw from."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The .bin to write.")],
    images: Annotated[
        Path | None, typer.Option(help="With a list: the folder of its images; CFP's list knows its own.")
    ] = None,
    count: Annotated[
        int, typer.Option(min=20, help="With a dataset: how many pairs to draw, a multiple of 20.")
    ] = 6000,
    landmarks: Landmarks = None,
    detector: Detector = None,
    image_size: Annotated[int, typer.Option(min=16, help="Pixels a side of faces that are aligned.")] = 112,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Build a verification set from a list of pairs and its images, or from a dataset."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.pair_lists import build_pairs, is_pair_list
    from facetrain.data.tools.sample_pairs import sample_pairs

    points = _finder(landmarks, detector)
    listed = is_pair_list(source, images)
    if points is not None and not listed:
        raise UsageError(
            "--landmarks and --detector go with a list of pairs; `facetrain data pack` aligns a dataset"
        )
    with progress_bar("reading images") as progress:
        if listed:
            made, same = build_pairs(
                source, images, output,
                landmarks=points, image_size=image_size, workers=workers, progress=progress,
            )  # fmt: skip
        else:
            made, same = sample_pairs(
                source, output, pairs=count, seed=seed, workers=workers, progress=progress
            )
    if as_json:
        typer.echo(json.dumps({"output": str(output), "pairs": made, "same": same}))
    else:
        typer.echo(f"{output}: {made:,} pairs, {same:,} of one person")


def _finder(landmarks: Path | None, detector: Path | None) -> Finder | None:
    if landmarks is not None and detector is not None:
        raise UsageError("--landmarks and --detector: give one of them")
    from facetrain.data.tools.landmarks import YuNet, read_landmarks

    if landmarks is not None:
        return read_landmarks(landmarks)
    return YuNet(detector) if detector is not None else None
