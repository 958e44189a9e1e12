"""`facetrain data synth | pack | pairs | landmarks`: datasets, verification sets, and landmarks of their images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import MOST_PIXELS, ImageSize, Json, MinImages, Output, Seed, Workers
from facetrain.cli.outputs import echo_line, require_absent, require_writable
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError
from facetrain.files import shell_path

if TYPE_CHECKING:
    from facetrain.data.tools.landmarks import LandmarkFinder

_SHOWN_NAMES = 10
"""Names of images that a list on the console has at most."""

Landmarks = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Align the faces by the landmarks in this file: JSON, or CSV with lines name,x1,y1,…,x5,y5.",
    ),
]
Detector = Annotated[
    Path | None,
    typer.Option(
        metavar="ONNX",
        help="Align the faces by the landmarks that OpenCV's YuNet detects with this model file.",
    ),
]


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
    images: Annotated[
        Path | None,
        typer.Option(
            help="With a list file, the folder that its paths are relative to; the default is the file's folder."
        ),
    ] = None,
    landmarks: Landmarks = None,
    detector: Detector = None,
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
    finder = _landmark_finder(landmarks, detector)
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
    _print_fallbacks(packed.fallbacks)
    _print_several_faces(packed.several_faces)
    _print_next_steps(packed.folder, image_size)


def pairs(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            help="Pair list in the form of LFW, CALFW, CPLFW, SLLFW, AgeDB, MLFW or CFP; the unpacked folder of one of "
            "these sets, of XQLFW or of RFW; a set as .bin, .xz, .parquet or prepared folder; or a dataset to sample "
            "pairs from."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The .bin file to write.")],
    images: Annotated[
        Path | None,
        typer.Option(
            help="With a pair list, the folder of its images; not needed for CFP and for folders of sets."
        ),
    ] = None,
    count: Annotated[
        int, typer.Option(min=20, help="With a dataset, the number of pairs to sample, a multiple of 20.")
    ] = 6000,
    landmarks: Landmarks = None,
    detector: Detector = None,
    image_size: Annotated[
        int, typer.Option(min=16, max=MOST_PIXELS, help="Width and height of aligned faces, in pixels.")
    ] = 112,
    reduce_to: Annotated[
        int | None,
        typer.Option(
            min=4,
            metavar="PIXELS",
            help="With a set as .bin or in another form, shrink its images to this width and height, for an "
            "evaluation on small faces.",
        ),
    ] = None,
    seed: Seed = 0,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write a verification set from a pair list and its images, from a set of another form, or from a dataset."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.formats.pair_archives import is_pair_archive
    from facetrain.data.tools.pair_images import alignment_path
    from facetrain.data.tools.pair_lists import convert_pair_archive, convert_pair_list, is_pair_list
    from facetrain.data.tools.published_sets import find_group_bins, join_group_bins
    from facetrain.data.tools.sample_pairs import sample_pairs

    finder = _landmark_finder(landmarks, detector, center_crop=True)
    listed = is_pair_list(source, images)
    if finder is not None and not listed:
        raise UsageError(
            "--landmarks and --detector need a pair list; to align a dataset, use `facetrain data pack`"
        )
    if reduce_to is not None and not is_pair_archive(source):
        raise UsageError(
            "--reduce-to needs a set of pairs; write it first without --reduce-to, then reduce the .bin"
        )
    if not listed:
        refuse_given(context, "image_size", when=f"on {source}: only a pair list is aligned")
    if listed or is_pair_archive(source):
        refuse_given(context, "count", "seed", when=f"on {source}, which has its own pairs")
    if output.suffix != ".bin":
        raise UsageError(f"{output}: a verification set is a .bin file; change the suffix")
    require_absent(output)
    require_writable(output)
    with progress_bar("reading images") as progress:
        if listed:
            count, same = convert_pair_list(
                source, images, output,
                landmarks=finder, image_size=image_size, workers=workers, progress=progress,
            )  # fmt: skip
        elif find_group_bins(source):
            count, same = join_group_bins(source, output)
        elif is_pair_archive(source):
            count, same = convert_pair_archive(source, output, reduce_to=reduce_to)
        else:
            count, same = sample_pairs(
                source, output, pairs=count, seed=seed, workers=workers, progress=progress
            )
    fallbacks = getattr(finder, "fallbacks", {})
    if as_json:
        facts = {"output": str(output), "pairs": count, "same": same, "fallbacks": fallbacks}
        typer.echo(json.dumps(facts))
    else:
        echo_line(f"{output}: {count:,} pairs, {same:,} of one person")
        _print_fallbacks(fallbacks)
        if hasattr(finder, "fallbacks"):
            typer.echo(f"  how each image was aligned: {alignment_path(output)}")


def landmarks(
    data: Annotated[
        Path, typer.Argument(help="Dataset of any format but a mixture, or a verification set (.bin).")
    ],
    detector: Annotated[
        Path | None,
        typer.Option(metavar="ONNX", help="Find the landmarks with OpenCV's YuNet and this model file."),
    ] = None,
    listed: Annotated[
        Path | None,
        typer.Option(
            "--landmarks",
            metavar="FILE",
            help="Take the landmarks of this file, in pixels: JSON, or CSV with lines name,x1,y1,…,x5,y5.",
        ),
    ] = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Write the landmarks of the images to a file beside them, for backbones with KP-RPE."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.detect_landmarks import write_dataset_landmarks

    finder = _landmark_finder(listed, detector)
    if finder is None:
        raise UsageError(f"{data}: give --detector with a YuNet model, or --landmarks with a file")
    with progress_bar("finding landmarks") as progress:
        written = write_dataset_landmarks(data, finder, workers=workers, progress=progress)
    if as_json:
        typer.echo(json.dumps(vars(written) | {"file": str(written.file)}))
        return
    echo_line(f"{written.file}: landmarks of {written.images - len(written.missing):,} images")
    if written.missing:
        shown = ", ".join(written.missing[:_SHOWN_NAMES])
        more = ", …" if len(written.missing) > _SHOWN_NAMES else ""
        echo_line(
            f"  no face found in {len(written.missing):,} images, which get the landmarks of an aligned face: "
            f"{shown}{more}"
        )


def _print_fallbacks(fallbacks: dict[str, str]) -> None:
    """Print the images whose face was not detected at first. All of them: they are few, or the detector is wrong."""
    if fallbacks:
        echo_line(f"  no face detected at first in {len(fallbacks):,} images:")
        for name, fallback in sorted(fallbacks.items()):
            echo_line(f"    {name}: {fallback}")


def _print_several_faces(several_faces: dict[str, int]) -> None:
    """Print images in which another face could have been meant."""
    if several_faces:
        shown = sorted(several_faces)[:_SHOWN_NAMES]
        more = ", …" if len(several_faces) > _SHOWN_NAMES else ""
        echo_line(
            f"  several faces of similar size in {len(several_faces):,} images, of which the one nearest the center "
            f"was taken (--json lists all): {', '.join(shown)}{more}"
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


def _landmark_finder(
    landmarks: Path | None, detector: Path | None, *, center_crop: bool = False
) -> LandmarkFinder | None:
    if landmarks is not None and detector is not None:
        raise UsageError("--landmarks and --detector cannot be combined; give one of them")
    from facetrain.data.tools.landmarks import YuNet, read_landmarks

    if landmarks is not None:
        return read_landmarks(landmarks)
    return YuNet(detector, center_crop=center_crop) if detector is not None else None
