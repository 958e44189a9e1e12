"""Options and arguments that several `facetrain data` commands share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from facetrain.data.images.header import MAX_PIXELS

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON, and nothing else on standard output.")
]
Dataset = Annotated[
    Path,
    typer.Argument(
        help="Dataset: a folder with train.rec, a folder per identity, shards, a zip archive, or a mixture's YAML."
    ),
]
Output = Annotated[Path, typer.Option(help="Folder to write the dataset to; it must not exist.")]
MOST_PIXELS = math.isqrt(MAX_PIXELS)
"""Width and height of the largest square image that facetrain decodes."""
ImageSize = Annotated[
    int, typer.Option(min=16, max=MOST_PIXELS, help="Width and height of the written images, in pixels.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random selection or order.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Number of threads that read images; the default is one per usable core."),
]
MinImages = Annotated[
    int, typer.Option(min=1, help="Leave out identities with fewer images than this number.")
]
Model = Annotated[Path, typer.Argument(help="Run folder, model file, or .onnx file.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Number of images per forward pass.")]
Precision = Annotated[
    float,
    typer.Option(
        min=0.5,
        max=0.999,
        help="Share of true findings among the reported ones to aim at; the thresholds are calibrated for it on the "
        "dataset. A higher share reports less.",
    ),
]
