"""`facetrain eval`, `embed` and `compare`: what a model makes of faces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    Path,
    typer.Argument(
        help="A run's folder, a checkpoint, .safetensors, arcface_torch's .pt or .pth, .onnx, MXNet's -symbol.json."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cuda or cpu.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Pictures at a time.")]


def evaluate(
    model: Model,
    target: Annotated[
        list[str], typer.Option(help="Name of a .bin set in the data folder, or its path; may be repeated.")
    ],
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the sets; by default the one of the run.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the numbers here too; - for standard output alone."
        ),
    ] = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
) -> None:
    """Score a model on verification sets by the published 10-fold protocol, with exact curves beside it."""
    from facetrain.verify.evaluate import evaluate as score

    description, found, leader = score(
        model, target, data_dir or _data_dir(model), device=device, batch_size=batch_size
    )
    if not leader:
        return
    result = json.dumps({"model": str(model), "description": description, "sets": found}, indent=1)
    if json_file is not None and str(json_file) == "-":
        typer.echo(result)
        return
    typer.echo(f"{model}: {description}")
    for name, metrics in found.items():
        typer.echo(_line(name, metrics))
    if json_file is not None:
        _write(json_file, result)


def embed(
    model: Model,
    input: Annotated[
        Path, typer.Argument(help="An image, a folder of images or of a dataset, a .rec or a .bin.")
    ],
    output: Annotated[Path, typer.Option(help="Where to write: .npz with `embedding`, `name` and `label`.")],
    flip: Annotated[bool, typer.Option(help="Add the embedding of the mirror image.")] = True,
    device: Device = "auto",
    batch_size: BatchSize = 256,
) -> None:
    """Embed pictures; the rows have length 1."""
    from facetrain.verify.gallery import embed_input, save_embeddings

    found = embed_input(model, input, flip=flip, device=device, batch_size=batch_size)
    save_embeddings(output, found)
    typer.echo(f"{output}: {len(found.embedding):,} embeddings of {found.embedding.shape[1]} numbers")


def compare(
    model: Model,
    first: Annotated[Path, typer.Argument(help="A picture, aligned and cropped.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Tell how alike two faces are: 1 the same direction, 0 unrelated."""
    from facetrain.verify.gallery import embed_pictures_at

    embedding = embed_pictures_at(model, [first, second], device=device)
    cosine = float(embedding[0] @ embedding[1])
    typer.echo(json.dumps({"cosine": cosine}) if as_json else f"cosine similarity {cosine:.4f}")


def _data_dir(model: Path) -> Path:
    from facetrain.config.load import load_config

    config = model / "config.yaml"
    return Path(load_config(config).eval_dir) if config.is_file() else Path()


def _line(name: str, metrics: dict[str, float]) -> str:
    parts = [f"  {name:12} accuracy {metrics['accuracy']:.4%} ± {metrics['accuracy_std']:.4%}"]
    if "auc" in metrics:
        parts.append(f"AUC {metrics['auc']:.5f}  EER {metrics['eer']:.3%}")
        parts += [
            f"TAR@FAR {far[4:]} {value:.2%}" for far, value in metrics.items() if far.startswith("tar@")
        ]
    else:
        parts.append("all pairs are of one kind: no curve")
    return "  ".join([*parts, f"{metrics['pairs']:.0f} pairs"])


def _write(path: Path, text: str) -> None:
    from facetrain.errors import UsageError

    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
