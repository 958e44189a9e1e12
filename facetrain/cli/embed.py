"""Commands `facetrain embed` and `facetrain compare`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import (
    SKIP_BAD_ADVICE,
    Detector,
    Device,
    InferenceOptions,
    Json,
    MinQuality,
    Model,
    SkipBad,
    local_file,
)
from facetrain.cli.outputs import (
    echo_line,
    leave_to_first_rank,
    require_existing,
    require_no_input,
    require_writable,
    write_text,
)
from facetrain.data.skipped_files import SkippedFile, skipped_summary, skipped_table
from facetrain.errors import UsageError
from facetrain.text import count_text, percent

_TEACHER_SUFFIX, _SKIPPED_SUFFIX = ".safetensors", ".skipped.csv"


@option_groups
def embed(
    model: Model,
    input: Annotated[
        Path,
        typer.Argument(
            metavar="INPUT",
            parser=local_file,
            help="Images: one image, a folder of images, a dataset, a .rec or a .bin file.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            help="File for the columns `embedding`, `quality`, `name` and `label`: .npz, or .parquet, which needs "
            "facetrain[parquet]; or .safetensors, a teacher's embeddings of a dataset for `distill.cache`."
        ),
    ],
    inference: InferenceOptions,
    flip: Annotated[
        bool, typer.Option(help="Add the embedding of the mirror image to the embedding of each image.")
    ] = True,
    detector: Detector = None,
    skip_bad: SkipBad = False,
) -> None:
    """Write the embeddings of images to a file.

    Every embedding has length 1, except in .safetensors files. With --skip-bad, images that have none are listed in
    OUTPUT.skipped.csv.
    """
    from facetrain.embeddings.embedding_files import require_format, save_embeddings

    is_teacher = output.suffix == _TEACHER_SUFFIX
    skipped_file = output.with_name(output.name + _SKIPPED_SUFFIX)
    require_no_input((model, input), output, skipped_file)
    if is_teacher and detector:
        raise UsageError(f"{output}: a teacher's embeddings need aligned faces; remove --detector")
    if is_teacher and skip_bad:
        raise UsageError(
            f"{output}: a teacher's embeddings have a row for every image; remove --skip-bad, and write a copy of the "
            "dataset without such images with `facetrain data check DATASET --repair FOLDER`"
        )
    if not is_teacher:
        if output.suffix == ".parquet" and output.parent.resolve() == input.resolve():
            raise UsageError(
                f"{output}: the folder of images would be read as a Parquet dataset; choose another folder"
            )
        require_format(output)
    require_writable(output, skipped_file)
    require_existing(model, input, detector)
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings

    if is_teacher:
        with progress_bar("embedding") as progress:
            count, size = write_teacher_embeddings(
                model, input, output, inference, flip=flip, progress=progress
            )
        leave_to_first_rank()
        rows = "plain and mirrored" if flip else "plain"
        echo_line(f"{output}: {count_text(count, 'image')}, {rows}, embeddings of size {size}")
        return
    skipped = list[SkippedFile]() if skip_bad else None
    with progress_bar("embedding") as progress:
        embeddings = embed_input(
            model, input, inference, flip=flip, detector=detector, skipped=skipped, advice=SKIP_BAD_ADVICE,
            progress=progress,
        )  # fmt: skip
    leave_to_first_rank()
    save_embeddings(output, embeddings)
    count, size = embeddings.embedding.shape
    mirrored = (
        "; each is the sum of the image's and its mirror image's embedding (--no-flip: only the image's)"
    )
    echo_line(f"{output}: {count_text(count, 'embedding')} of size {size}{mirrored if flip else ''}")
    _list_skipped(skipped_file, skipped or [])


def _list_skipped(path: Path, skipped: list[SkippedFile]) -> None:
    """Write the images that were left out to a table, and print how many they are; remove the table of another call."""
    if not skipped:
        path.unlink(missing_ok=True)
        return
    write_text(path, skipped_table(skipped))
    echo_line(f"  left out {count_text(len(skipped), 'image')}, see {path}:")
    for line in skipped_summary(skipped):
        echo_line(f"    {line}")


def compare(
    model: Model,
    first: Annotated[
        Path,
        typer.Argument(
            metavar="FIRST",
            parser=local_file,
            help="First image: an aligned face, or with --detector a photo.",
        ),
    ],
    second: Annotated[
        Path, typer.Argument(metavar="SECOND", parser=local_file, help="Second image: as FIRST.")
    ],
    fmr: Annotated[
        float | None,
        typer.Option(
            help="False match rate whose threshold decides, one that `facetrain calibrate` stored. The default is the "
            "lowest with an FNMR below one half, or the highest if there is none; a model without thresholds gives no "
            "decision."
        ),
    ] = None,
    min_quality: MinQuality = 0,
    detector: Detector = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare two faces: print their cosine similarity, and whether they show one person.

    The decision needs a model with thresholds: see `facetrain calibrate`.

    With --min-quality, an image of lower quality is refused, like a photo without a face.
    """
    require_existing(model, first, second, detector)
    from facetrain.api.model import load_model

    opened = load_model(model, device, detector)
    threshold = opened.stored_threshold(fmr)
    limit = threshold.cosine if threshold else None
    compared = opened.compare(first, second, threshold=limit, min_quality=min_quality)
    cosine = compared.cosine
    if as_json:
        decision = {"same": compared.same, "threshold": asdict(threshold)} if threshold else {}
        quality = [None if math.isnan(each) else each for each in compared.quality]
        typer.echo(json.dumps({"cosine": cosine, "quality": quality} | decision))
        return
    line = f"cosine similarity {cosine:z.4f}"
    if threshold:
        verdict = "same person" if compared.same else "different people"
        line += (
            f": {verdict} at FMR {threshold.fmr:g} (threshold {threshold.cosine:z.4f}, from {threshold.data})"
        )
    echo_line(line)
    if threshold and threshold.rejects_most:
        assert threshold.fnmr is not None, "it is at least one half"
        echo_line(
            f"warning: at this threshold {percent(threshold.fnmr)} of the pairs of one person count as different people"
        )
    if not any(map(math.isnan, compared.quality)):
        echo_line(f"quality {compared.quality[0]:.4g} and {compared.quality[1]:.4g}")
