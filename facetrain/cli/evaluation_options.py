"""Arguments and options of the commands that run a model on images: `eval`, `embed`, `compare` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_MODEL_HELP = (
    "Model to run: a run folder, a checkpoint, a .safetensors file, a .pt or .pth file of arcface_torch, an .onnx "
    "file, or a -symbol.json file of MXNet."
)
Model = Annotated[Path, typer.Argument(help=_MODEL_HELP)]
BatchSize = Annotated[int, typer.Option(min=1, help="Images per forward pass on each process.")]
Bf16 = Annotated[
    bool, typer.Option("--bf16", help="Run the network in bfloat16 autocast; the default is float32.")
]

OptionalModel = Annotated[
    Path | None, typer.Argument(help=f"{_MODEL_HELP} Not with --scores or --embeddings.")
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SET",
        help="Evaluation set: a .bin file, or a folder in the layout of IJB, TinyFace or MegaFace; a path, or a "
        "name in the data folder. Repeat the option for several sets.",
    ),
]
Scores = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV[:COLUMN]",
        help="Scores of another system instead of MODEL: a table with the columns score and genuine, see "
        "docs/evaluation.md. COLUMN is the name of another score column.",
    ),
]
Embeddings = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Embeddings of another system instead of MODEL, .npz or .parquet with the columns embedding, name "
        "and label; needs --pairs.",
    ),
]
Pairs = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV", help="Pairs of --embeddings: a table with the columns first, second and genuine."
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the sets that are given by name. The default is the evaluation folder of the run, or "
        "the current folder if MODEL is not a run."
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        metavar="MODEL",
        help="Second model, or a file of another system's scores or embeddings: test the difference to it on the "
        "same pairs and bootstrap draws.",
    ),
]
Slices = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[SET=]CSV",
        help="Table with one row for each pair or each image of a set of pairs: report error rates for each "
        "value of each column. SET= is needed if there are several sets.",
    ),
]
SliceFmr = Annotated[
    float | None,
    typer.Option(
        min=1e-9,
        max=1,
        help="False match rate over all impostor pairs that defines the threshold of the slices and of the "
        "error-versus-discard curves, from 0 to 1. The default is the mean threshold of the folds.",
    ),
]
BootstrapDraws = Annotated[
    int, typer.Option(min=0, help="Bootstrap draws of subjects for the 95 % intervals; 0 computes none.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the bootstrap draws.")]
Flip = Annotated[
    bool,
    typer.Option(
        help="Add the embedding of the mirror image. Sets of pairs are always scored with and without it."
    ),
]
DetectorScore = Annotated[
    bool, typer.Option(help="Weight the images of an IJB template by their detector scores.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write all metrics to this JSON file; - prints the JSON only."
    ),
]
ReportDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Folder for an HTML report with figures and metrics."),
]
