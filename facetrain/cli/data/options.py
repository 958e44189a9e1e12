"""Options and arguments that several `facetrain data` commands share, and their printed result."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import Json
from facetrain.cli.outputs import echo_line
from facetrain.data.images.header import MAX_PIXELS

if TYPE_CHECKING:
    from facetrain.data.tools.selection import Selection
    from facetrain.data.tools.writing import WrittenDataset
    from facetrain.embeddings.embedding_files import Embeddings
    from facetrain.embeddings.inference import Inference

Dataset = Annotated[
    Path,
    typer.Argument(
        help="Dataset: a folder with train.rec, a folder per identity, shards, a zip archive, or a mixture's YAML."
    ),
]
Output = Annotated[Path, typer.Option(help="Folder or file to write the dataset to; it must not exist.")]
MOST_PIXELS = math.isqrt(MAX_PIXELS)
"""Width and height of the largest square image that facetrain decodes."""
IMAGE_SIZE = typer.Option(min=16, max=MOST_PIXELS, help="Width and height of the written images, in pixels.")
SEED = typer.Option(min=0, help="Seed of the random selection or order.")
Seed = Annotated[int, SEED]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of threads, or processes that render; the default is one per usable core."
    ),
]
MIN_IMAGES = typer.Option(min=1, help="Leave out identities with fewer images than this number.")
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a contact sheet for manual review: .html with names in any script, or .png. Further pages get _2, "
        "_3, … after the name; such files must not exist.",
    ),
]
Precision = Annotated[
    float,
    typer.Option(
        min=0.5,
        max=0.999,
        help="Share of true findings among the reported ones to aim at; the thresholds are calibrated for it on the "
        "dataset. A higher share reports less.",
    ),
]


@dataclass(frozen=True)
class Writing:
    """Output of a command that writes a dataset."""

    output: Output
    workers: Workers = None
    as_json: Json = False

    def write(self, title: str, selection: Selection, to: str = "recordio") -> WrittenDataset:
        """Write a dataset with a progress bar, and print its size."""
        from facetrain.cli.progress import progress_bar
        from facetrain.data.tools.writing import write_dataset

        with progress_bar(title) as progress:
            written = write_dataset(selection, self.output, to=to, workers=self.workers, progress=progress)
        print_written([written], self.as_json)
        return written


def print_written(written: Sequence[WrittenDataset], as_json: bool = False, **facts: Any) -> None:
    """Print the datasets that a command wrote: a line for each, or JSON with further facts."""
    if as_json:
        results = [json_facts(dataset) | facts for dataset in written]
        typer.echo(json.dumps(results[0] if len(results) == 1 else results))
        return
    for dataset in written:
        echo_line(f"{dataset.folder}: {dataset.images:,} images of {dataset.identities:,} identities")


def json_facts(dataset: WrittenDataset) -> dict[str, Any]:
    """Return a written dataset as JSON values."""
    return vars(dataset) | {"skipped": [vars(file) for file in dataset.skipped]}


def embed_images(title: str, model: Path, images: Path, inference: Inference) -> Embeddings:
    """Return the embeddings of a dataset, a verification set or a folder of images, with a progress bar."""
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.embed_images import embed_input

    with progress_bar(title) as progress:
        return embed_input(model, images, inference, progress=progress)
