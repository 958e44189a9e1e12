"""Command `facetrain search`: the most similar gallery entries for each probe."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Device, Json, local_file
from facetrain.cli.outputs import echo_line, require_existing, require_no_input, require_writable
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.embeddings.embedding_files import Embeddings
    from facetrain.verify.output.search_results import SearchResults

_INPUT = "a file of embeddings that `facetrain embed` wrote (.npz, .parquet), or with --model any images"


@dataclass(frozen=True)
class SearchOptions:
    """Options of the results that are listed."""

    top: Annotated[int, typer.Option(min=1, help="Number of gallery entries per probe.")] = 5
    threshold: Annotated[
        float | None,
        typer.Option(
            min=-1,
            max=1,
            help="Smallest cosine similarity of a result, from -1 to 1. The default is -1: all results.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV", help="Write probe, rank, name, label and cosine to this file, one line per result."
        ),
    ] = None
    as_json: Json = False


@option_groups
def search(
    context: typer.Context,
    gallery: Annotated[Path, typer.Argument(help=f"Faces to search among: {_INPUT}.")],
    probe: Annotated[Path, typer.Argument(help=f"Faces to search for: {_INPUT}.")],
    results: SearchOptions,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", parser=local_file, help="Model that embeds GALLERY or PROBE if they are images."
        ),
    ] = None,
    device: Device = "auto",
) -> None:
    """Find the most similar faces of a gallery for each probe, by cosine similarity.

    Files of embeddings are read in blocks: a gallery may be larger than the memory.
    """
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.embedding_files import SUFFIXES

    output = results.output
    if gallery.suffix in SUFFIXES and probe.suffix in SUFFIXES:
        refuse_given(context, "model", "device", when="on files of embeddings")
    require_no_input((gallery, probe, model), output)
    require_writable(output)
    require_existing(gallery, probe, model)
    from facetrain.embeddings.exact_search import search_exactly
    from facetrain.verify.output.search_results import SearchResults

    entries, probes = _embeddings(gallery, model, device), _embeddings(probe, model, device)
    with progress_bar("comparing") as progress:
        matches = search_exactly(probes, entries, results.top, progress=progress)
    named = SearchResults(matches, probes, entries, results.threshold)
    if output is not None:
        named.write_csv(output)
    if results.as_json:
        typer.echo(json.dumps(list(named), indent=1))
    elif output is None:
        _echo_results(named)
    else:
        echo_line(f"{output}: searched {probes.count:,} probes in {entries.count:,} gallery entries")


def _embeddings(path: Path, model: Path | None, device: str) -> Embeddings:
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.embeddings.embedding_files import SUFFIXES, open_embeddings
    from facetrain.embeddings.inference import Inference

    if path.suffix in SUFFIXES:
        return open_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: not a file of embeddings ({', '.join(SUFFIXES)}); add --model MODEL to embed its images"
        )
    with progress_bar(f"embedding {path}") as progress:
        return embed_input(model, path, Inference(device), progress=progress)


def _echo_results(results: SearchResults) -> None:
    for result in results:
        echo_line(result["probe"])
        for entry in result["found"]:
            echo_line(f"  {entry['cosine']:.4f}  {entry['name']}")
        if not result["found"]:
            echo_line("  no entry reaches the threshold")
