"""Commands `facetrain embed` and `facetrain compare`."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Detector, Device, InferenceOptions, Json, MinQuality, Model
from facetrain.cli.outputs import echo_line, require_existing, require_no_input, require_writable
from facetrain.errors import UsageError
from facetrain.plural import count_text

_TEACHER_SUFFIX = ".safetensors"


@option_groups
def embed(
    model: Model,
    input: Annotated[
        Path, typer.Argument(help="Images: one image, a folder of images, a dataset, a .rec or a .bin file.")
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
) -> None:
    """Write the embeddings of images to a file.

    Every embedding has length 1, except in .safetensors files.
    """
    from facetrain.embeddings.embedding_files import require_format, save_embeddings

    is_teacher = output.suffix == _TEACHER_SUFFIX
    require_no_input((model, input), output)
    if is_teacher and detector:
        raise UsageError(f"{output}: a teacher's embeddings need aligned faces; remove --detector")
    if not is_teacher:
        if output.suffix == ".parquet" and output.parent.resolve() == input.resolve():
            raise UsageError(
                f"{output}: the folder of images would be read as a Parquet dataset; choose another folder"
            )
        require_format(output)
    require_writable(output)
    require_existing(model, input, detector)
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.run.parts.teacher_embeddings import write_teacher_embeddings

    if is_teacher:
        with progress_bar("embedding") as progress:
            count, size = write_teacher_embeddings(
                model,
                input,
                output,
                inference,
                flip=flip,
                progress=progress,
            )
        rows = "plain and mirrored" if flip else "plain"
        typer.echo(f"{output}: {count_text(count, 'image')}, {rows}, embeddings of size {size}")
        return
    with progress_bar("embedding") as progress:
        embeddings = embed_input(model, input, inference, flip=flip, detector=detector, progress=progress)
    save_embeddings(output, embeddings)
    count, size = embeddings.embedding.shape
    mirrored = (
        "; each is the sum of the image's and its mirror image's embedding (--no-flip: only the image's)"
    )
    echo_line(f"{output}: {count_text(count, 'embedding')} of size {size}{mirrored if flip else ''}")


def compare(
    model: Model,
    first: Annotated[Path, typer.Argument(help="First image: an aligned face, or with --detector a photo.")],
    second: Annotated[Path, typer.Argument(help="Second image: as FIRST.")],
    fmr: Annotated[
        float | None,
        typer.Option(
            help="False match rate whose threshold decides, one that `facetrain calibrate` stored. The default is the "
            "lowest with an FNMR below one half; a model without thresholds gives no decision."
        ),
    ] = None,
    min_quality: MinQuality = 0,
    detector: Detector = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compare two faces: cosine similarity, and if it is one person.

    Whether it is one person needs a calibrated MODEL: see `facetrain calibrate`.

    An image of lower quality than --min-quality is refused, as a photo without a face.
    """
    require_existing(model, first, second, detector)
    from facetrain.api.model import load_model

    opened = load_model(model, device, detector)
    threshold = opened.stored_threshold(fmr)
    compared = opened.compare(first, second, min_quality=min_quality)
    cosine = compared.cosine
    same = threshold and cosine >= threshold.cosine
    if as_json:
        decision = {"same": same, "threshold": asdict(threshold)} if threshold else {}
        quality = [None if math.isnan(each) else each for each in compared.quality]
        typer.echo(json.dumps({"cosine": cosine, "quality": quality} | decision))
        return
    line = f"cosine similarity {cosine:.4f}"
    if threshold:
        verdict = "same person" if same else "different people"
        line += (
            f": {verdict} at FMR {threshold.fmr:g} (threshold {threshold.cosine:.4f}, from {threshold.data})"
        )
    echo_line(line)
    if not any(map(math.isnan, compared.quality)):
        echo_line(f"quality {compared.quality[0]:.4g} and {compared.quality[1]:.4g}")
