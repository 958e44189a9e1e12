"""`facetrain search`: who in a gallery looks most like each probe."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.devices import Device
from facetrain.cli.outputs import require_writable, write_text

if TYPE_CHECKING:
    from facetrain.verify.embedding_files import Embeddings

_WHAT = "embeddings as `facetrain embed` writes them (.npz, .parquet), or with --model images of any kind it takes"


def search(
    gallery: Annotated[Path, typer.Argument(help=f"Whom to search among: {_WHAT}.")],
    probe: Annotated[Path, typer.Argument(help="Whom to look for: the same.")],
    model: Annotated[Path | None, typer.Option(help="What embeds images.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Entries told for each probe.")] = 5,
    threshold: Annotated[
        float, typer.Option(min=-1, max=1, help="Leave out entries whose cosine is below this.")
    ] = -1.0,
    output: Annotated[
        Path | None,
        typer.Option(metavar="CSV", help="Write probe, rank, entry and cosine here, a line for each."),
    ] = None,
    device: Device = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Find the faces of a gallery that are most like each probe, by cosine similarity."""
    from facetrain.errors import DataError
    from facetrain.verify.identification import top_k

    require_writable(output)
    among, sought = _embeddings(gallery, model, device), _embeddings(probe, model, device)
    if among.embedding.shape[1] != sought.embedding.shape[1]:
        raise DataError(
            f"{gallery} has {among.embedding.shape[1]} numbers per face and {probe} {sought.embedding.shape[1]}; "
            "both must come from one model"
        )
    entry, cosine = top_k(sought.embedding, among.embedding, top)
    found = [
        {
            "probe": name,
            "found": [
                {"name": among.name[row], "label": int(among.label[row]), "cosine": float(alike)}
                for row, alike in zip(rows, values, strict=True)
                if alike >= threshold
            ],
        }
        for name, rows, values in zip(sought.name, entry.tolist(), cosine, strict=True)
    ]
    if output is not None:
        _write(output, found)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
    elif output is None:
        typer.echo("\n".join(line for one in found for line in _lines(one)))
    else:
        typer.echo(f"{output}: {len(found):,} probes in {len(among.name):,} entries")


def _embeddings(path: Path, model: Path | None, device: str) -> Embeddings:
    from facetrain.cli.progress import progress_bar
    from facetrain.errors import UsageError
    from facetrain.verify.embedding_files import SUFFIXES, load_embeddings
    from facetrain.verify.image_embeddings import embed_input

    if path.suffix in SUFFIXES:
        return load_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: is no file of embeddings ({', '.join(SUFFIXES)}); --model says what embeds it"
        )
    with progress_bar(f"embedding {path}") as progress:
        return embed_input(model, path, device=device, progress=progress)


def _lines(one: dict[str, Any]) -> list[str]:
    entries = [f"  {entry['cosine']:.4f}  {entry['name']}" for entry in one["found"]]
    return [one["probe"], *(entries or ["  nobody"])]


def _write(path: Path, found: list[dict[str, Any]]) -> None:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["probe", "rank", "name", "label", "cosine"])
    for one in found:
        for rank, entry in enumerate(one["found"], start=1):
            writer.writerow([one["probe"], rank, entry["name"], entry["label"], f"{entry['cosine']:.6f}"])
    write_text(path, table.getvalue())
