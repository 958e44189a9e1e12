"""Command `facetrain align`: a map that makes a gallery of an old model one of a new model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Float32InferenceOptions, Json, local_file
from facetrain.cli.outputs import (
    echo_line,
    leave_to_first_rank,
    require_existing,
    require_no_input,
    require_writable,
)
from facetrain.errors import UsageError
from facetrain.own_parts import allow_option
from facetrain.text import count_text, shell_path


@option_groups
def align(
    old: Annotated[
        Path, typer.Argument(parser=local_file, metavar="OLD", help="Model that embedded the gallery.")
    ],
    new: Annotated[
        Path, typer.Argument(parser=local_file, metavar="NEW", help="Model that embeds the probes.")
    ],
    images: Annotated[
        Path,
        typer.Argument(
            metavar="IMAGES",
            parser=local_file,
            help="Dataset of known people, which both models embed: the map is learned on it.",
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="File for the map, .npz.")],
    inference: Float32InferenceOptions,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the people who are set aside.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn a map from the embeddings of an old model to a new one, so that a gallery needs no new enrollment.

    To align faces, use `facetrain data pack PHOTOS --output FOLDER --detector yunet`.
    """
    if output.suffix != ".npz":
        raise UsageError(f"{output}: a map is a .npz file; change the suffix")
    require_no_input((old, new, images), output)
    require_writable(output)
    require_existing(old, new, images)
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.embeddings.embedding_map import save_map
    from facetrain.models.read_model import names_code
    from facetrain.verify.align_models import align_models
    from facetrain.verify.output.formatting import format_number

    with progress_bar("embedding") as progress:
        found = align_models(old, new, images, inference=inference, seed=seed, progress=progress)
    leave_to_first_rank()
    save_map(output, found.map)
    if as_json:
        typer.echo(json.dumps({"output": str(output)} | found.as_json(), indent=1))
        return
    echo_line(
        f"{output}: map of {count_text(found.images, 'image')}; measured on "
        f"{count_text(found.people, 'person', 'people')} who were set aside:"
    )
    echo_line(f"  mean cosine of mapped and new embedding of an image: {found.cosine:z.4f}")
    for name, metrics in found.accuracy.items():
        values = (f"{metric} {format_number(metric, value)}" for metric, value in metrics.items())
        echo_line(f"  {name:12}  {'  '.join(values)}")
    echo_line(
        f"next: facetrain search GALLERY PROBES --model {shell_path(new)} --map {shell_path(output)}"
        f"{allow_option(names_code(new))}"
    )
