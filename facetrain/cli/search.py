"""Command `facetrain search`: the most similar gallery entries for each probe."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.devices import Device
from facetrain.cli.outputs import echo_line, require_writable, write_text

if TYPE_CHECKING:
    from facetrain.verify.embedding_files import Embeddings

_INPUT = "a file of embeddings that `facetrain embed` wrote (.npz, .parquet), or with --model any images"


def search(
    gallery: Annotated[Path, typer.Argument(help=f"Faces to search among: {_INPUT}.")],
    probe: Annotated[Path, typer.Argument(help=f"Faces to search for: {_INPUT}.")],
    model: Annotated[
        Path | None, typer.Option(help="Model that embeds GALLERY or PROBE if they are images.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of gallery entries per probe.")] = 5,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Smallest cosine similarity of a result, from -1 to 1. The default is -1: all results.",
        ),
    ] = None,
    fmr: Annotated[
        float | None,
        typer.Option(
            help="Use the threshold that `facetrain calibrate` stored in --model for this false match rate of one "
            "comparison, instead of --threshold."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Write probe, rank, name, label and cosine to this file, one line per result."
        ),
    ] = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Find the most similar faces of a gallery for each probe, by cosine similarity."""
    from facetrain.errors import DataError
    from facetrain.verify.identification import top_k

    require_writable(output)
    lowest = _stored_threshold(model, fmr, device) if fmr is not None else threshold
    entries, probes = _embeddings(gallery, model, device), _embeddings(probe, model, device)
    if entries.embedding.shape[1] != probes.embedding.shape[1]:
        raise DataError(
            f"{gallery} has embeddings of size {entries.embedding.shape[1]}, {probe} of size "
            f"{probes.embedding.shape[1]}; embed both with one model"
        )
    row_QK, cosine_QK = top_k(probes.embedding, entries.embedding, top)
    results = [
        {
            "probe": name,
            "found": [
                {"name": entries.name[row], "label": int(entries.label[row]), "cosine": float(cosine)}
                for row, cosine in zip(rows, cosines, strict=True)
                if lowest is None or cosine >= lowest
            ],
        }
        for name, rows, cosines in zip(probes.name, row_QK.tolist(), cosine_QK, strict=True)
    ]
    if output is not None:
        _write_csv(output, results)
    if as_json:
        typer.echo(json.dumps(results, indent=1))
    elif output is None:
        for line in (line for result in results for line in _format_result(result)):
            echo_line(line)
    else:
        echo_line(f"{output}: searched {len(results):,} probes in {len(entries.name):,} gallery entries")


def _stored_threshold(model: Path | None, fmr: float, device: str) -> float:
    from facetrain.distributed.world import join
    from facetrain.errors import UsageError
    from facetrain.models.model_file import open_model
    from facetrain.verify.calibration import pick_threshold, stored_thresholds

    if model is None:
        raise UsageError(
            f"--fmr {fmr:g}: needs --model, whose file has the thresholds of facetrain calibrate"
        )
    with join(device) as world:
        metadata = open_model(model, world.device).metadata
    found = pick_threshold(stored_thresholds(metadata, model), fmr, model)
    assert found is not None, "a given rate has a threshold, or an error"
    return found.cosine


def _embeddings(path: Path, model: Path | None, device: str) -> Embeddings:
    from facetrain.cli.progress import progress_bar
    from facetrain.errors import UsageError
    from facetrain.verify.embedding_files import SUFFIXES, load_embeddings
    from facetrain.verify.image_embeddings import embed_input

    if path.suffix in SUFFIXES:
        return load_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: not a file of embeddings ({', '.join(SUFFIXES)}); add --model MODEL to embed its images"
        )
    with progress_bar(f"embedding {path}") as progress:
        return embed_input(model, path, device=device, progress=progress)


def _format_result(result: dict[str, Any]) -> list[str]:
    entries = [f"  {entry['cosine']:.4f}  {entry['name']}" for entry in result["found"]]
    return [result["probe"], *(entries or ["  no entry reaches the threshold"])]


def _write_csv(path: Path, results: list[dict[str, Any]]) -> None:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["probe", "rank", "name", "label", "cosine"])
    for result in results:
        for rank, entry in enumerate(result["found"], start=1):
            writer.writerow([result["probe"], rank, entry["name"], entry["label"], f"{entry['cosine']:.6f}"])
    write_text(path, table.getvalue())
