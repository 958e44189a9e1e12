"""`facetrain eval`, `embed` and `compare`: what a model makes of faces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.devices import Device
from facetrain.cli.outputs import require_writable, write_text
from facetrain.verify.formatting import format_evaluation

Model = Annotated[
    Path,
    typer.Argument(
        help="A run's folder, a checkpoint, .safetensors, arcface_torch's .pt or .pth, .onnx, MXNet's -symbol.json."
    ),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Images at a time.")]
Bf16 = Annotated[bool, typer.Option("--bf16", help="Embed in bfloat16.")]


def evaluate(
    model: Model,
    target: Annotated[
        list[str],
        typer.Option(
            help="A .bin set, or a folder of IJB, TinyFace or MegaFace, by name in the data folder or by path; "
            "may be repeated."
        ),
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the sets; by default the one of the run.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="MODEL", help="Test the difference to this model on the same sets.")
    ] = None,
    slices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]CSV",
            help="Error rates by each column, which has a row for each pair or each image of the set.",
        ),
    ] = None,
    slice_fmr: Annotated[
        float | None,
        typer.Option(
            min=1e-9,
            max=1,
            help="False match rate over all that sets the threshold of the slices; else the folds do.",
        ),
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=0, help="BootstrapOptions of subjects for the 95 % intervals; 0 for none.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of those draws.")] = 0,
    flip: Annotated[
        bool, typer.Option(help="Add mirror images; sets of pairs are always scored both ways.")
    ] = True,
    detector_score: Annotated[
        bool, typer.Option(help="Weight IJB's images by the detector's confidence.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the numbers here too; - for standard output alone."
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write report.html there, its figures and its numbers.")
    ] = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    bf16: Bf16 = False,
) -> None:
    """Score a model by the published protocols, with exact curves and intervals over subjects."""
    from facetrain.cli.progress import progress_bar
    from facetrain.verify.evaluate import evaluate as score
    from facetrain.verify.protocols import Options

    for_scripts = str(json_file) == "-"
    require_writable(None if for_scripts else json_file)
    if report is not None:
        from facetrain.verify.report import require_report

        require_report(report)
    with progress_bar("embedding") as progress:
        found = score(
            model,
            target,
            data_dir or data_dir_of(model),
            against=against,
            tables=_tables(slices or [], target),
            options=Options(bootstrap, seed, flip, detector_score, slice_fmr=slice_fmr),
            device=device,
            batch_size=batch_size,
            bf16=bf16,
            progress=progress,
        )
    if not found.is_leader:
        return
    page = None
    if report is not None:
        from facetrain.verify.report import write_report

        page = write_report(report, found, model=str(model))
    result = json.dumps({"model": str(model)} | found.as_json(), indent=1)
    if for_scripts:
        typer.echo(result)
        return
    typer.echo(f"{model}: {found.description}")
    for line in format_evaluation(found):
        typer.echo(line)
    if page is not None:
        typer.echo(f"report: {page}")
    if json_file is not None:
        write_text(json_file, result + "\n")


def embed(
    model: Model,
    input: Annotated[
        Path, typer.Argument(help="An image, a folder of images or of a dataset, a .rec or a .bin.")
    ],
    output: Annotated[
        Path, typer.Option(help="Where to write `embedding`, `name` and `label`: .npz or .parquet.")
    ],
    flip: Annotated[bool, typer.Option(help="Add the embedding of the mirror image.")] = True,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    bf16: Bf16 = False,
) -> None:
    """Embed images; the rows have length 1."""
    from facetrain.cli.progress import progress_bar
    from facetrain.verify.embedding_files import require_format, save_embeddings
    from facetrain.verify.image_embeddings import embed_input

    require_format(output)
    require_writable(output)
    with progress_bar("embedding") as progress:
        found = embed_input(
            model, input, flip=flip, device=device, batch_size=batch_size, bf16=bf16, progress=progress
        )
    save_embeddings(output, found)
    typer.echo(f"{output}: {len(found.embedding):,} embeddings of {found.embedding.shape[1]} numbers")


def compare(
    model: Model,
    first: Annotated[Path, typer.Argument(help="An image, aligned and cropped.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Tell how alike two faces are: 1 the same direction, 0 unrelated."""
    from facetrain.verify.image_embeddings import embed_image_files

    embedding = embed_image_files(model, [first, second], device=device)
    cosine = float(embedding[0] @ embedding[1])
    typer.echo(json.dumps({"cosine": cosine}) if as_json else f"cosine similarity {cosine:.4f}")


def data_dir_of(model: Path) -> Path:
    """Return the folder of a run's verification sets; of a model that is no run, this folder."""
    from facetrain.config.loading import load_config

    config = model / "config.yaml"
    return Path(load_config(config).eval_dir) if config.is_file() else Path()


def _tables(slices: list[str], targets: list[str]) -> dict[str, Path]:
    from facetrain.errors import UsageError

    tables = {}
    for given in slices:
        name, equals, path = given.partition("=")
        if not equals and len(targets) > 1:
            raise UsageError(f"--slices {given}: there are {len(targets)} sets; say which as SET={given}")
        tables[name if equals else Path(targets[0]).stem] = Path(path if equals else given)
    return tables
