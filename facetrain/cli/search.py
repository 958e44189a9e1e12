"""Command `facetrain search`: the most similar gallery entries for each probe."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from facetrain.cli.devices import Device
from facetrain.cli.outputs import echo_line, require_writable

if TYPE_CHECKING:
    from facetrain.verify.exact_search import Found
    from facetrain.verify.stored_embeddings import StoredEmbeddings

_INPUT = "a file of embeddings that `facetrain embed` wrote (.npz, .parquet), or with --model any images"
_RECALL_PROBES = 1000


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
    index: Annotated[
        Literal["exact", "flat", "ivf"],
        typer.Option(
            help="Search method: exact compares each probe with the whole gallery; flat is the same with faiss; ivf "
            "compares it with the nearest lists of an index of faiss, and may miss entries. flat and ivf need "
            "facetrain[faiss]."
        ),
    ] = "exact",
    nlist: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of lists of a new index; the default is about 4 √N for N gallery entries."
        ),
    ] = None,
    nprobe: Annotated[
        int, typer.Option(min=1, help="Number of lists that --index ivf compares with each probe.")
    ] = 32,
    index_folder: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of the index of --index ivf: opened if it exists, else built; the default is GALLERY.ivf.",
        ),
    ] = None,
    recall: Annotated[
        bool,
        typer.Option(
            "--recall",
            help="Also search the first 1,000 probes exactly, and report on standard error the share of the exact "
            "results that --index ivf finds.",
        ),
    ] = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON only.")] = False,
) -> None:
    """Find the most similar faces of a gallery for each probe, by cosine similarity.

    Files of embeddings are read in blocks: a gallery may be larger than the memory.
    """
    from facetrain.cli.progress import progress_bar

    require_writable(output)
    lowest = _stored_threshold(model, fmr, device) if fmr is not None else threshold
    entries, probes = _embeddings(gallery, model, device), _embeddings(probe, model, device)
    if index == "ivf":
        folder = index_folder or gallery.with_name(f"{gallery.name}.ivf")
        found = _search_ivf(probes, entries, top, folder, nlist, nprobe, recall)
    else:
        from facetrain.verify.exact_search import scan_with_faiss, search_exactly
        from facetrain.verify.ivf_index import import_faiss

        scan = scan_with_faiss(import_faiss()) if index == "flat" else None
        with progress_bar("comparing") as progress:
            found = search_exactly(probes, entries, top, scan=scan, progress=progress)
    if output is not None:
        _write_csv(output, _results(found, probes, entries, lowest))
    if as_json:
        typer.echo(json.dumps(list(_results(found, probes, entries, lowest)), indent=1))
    elif output is None:
        for result in _results(found, probes, entries, lowest):
            for line in _format_result(result):
                echo_line(line)
    else:
        echo_line(f"{output}: searched {probes.count:,} probes in {entries.count:,} gallery entries")


def _search_ivf(
    probes: StoredEmbeddings,
    entries: StoredEmbeddings,
    top: int,
    folder: Path,
    nlist: int | None,
    nprobe: int,
    report_recall: bool,
) -> Found:
    from facetrain.cli.progress import progress_bar
    from facetrain.verify.exact_search import Found, require_same_size, search_exactly
    from facetrain.verify.ivf_index import IvfIndex, build_ivf, default_nlist, recall

    require_same_size(probes, entries)
    if not folder.exists():
        with progress_bar("building the index") as progress:
            build_ivf(entries, folder, nlist or default_nlist(entries.count), progress=progress)
    opened = IvfIndex(folder, entries)
    with progress_bar("searching") as progress:
        found = opened.search(probes, top, nprobe, progress=progress)
    if report_recall:
        with progress_bar("searching exactly") as progress:
            first = replace(probes, count=min(probes.count, _RECALL_PROBES))
            exact = search_exactly(first, entries, top, progress=progress)
        share = recall(Found(found.row_QK[: first.count], found.cosine_QK[: first.count]), exact)
        typer.echo(
            f"recall {share:.4f} of the exact results, {first.count:,} probes, {opened.facts.nlist:,} lists, "
            f"{min(nprobe, opened.facts.nlist):,} per probe",
            err=True,
        )
    return found


def _results(
    found: Found, probes: StoredEmbeddings, entries: StoredEmbeddings, lowest: float | None
) -> Iterator[dict[str, Any]]:
    """Yield the name of each probe, and the entries that were found for it."""
    for probe, rows in enumerate(found.row_QK):
        cosines = found.cosine_QK[probe].tolist()
        yield {
            "probe": probes.name[probe],
            "found": [
                {"name": entries.name[row], "label": int(entries.label[row]), "cosine": cosine, "row": row}
                for row, cosine in zip(rows.tolist(), cosines, strict=True)
                if row >= 0 and (lowest is None or cosine >= lowest)
            ],
        }


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


def _embeddings(path: Path, model: Path | None, device: str) -> StoredEmbeddings:
    from facetrain.cli.progress import progress_bar
    from facetrain.errors import UsageError
    from facetrain.verify.embedding_files import SUFFIXES
    from facetrain.verify.image_embeddings import embed_input
    from facetrain.verify.stored_embeddings import StoredEmbeddings, open_embeddings

    if path.suffix in SUFFIXES:
        return open_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: not a file of embeddings ({', '.join(SUFFIXES)}); add --model MODEL to embed its images"
        )
    with progress_bar(f"embedding {path}") as progress:
        return StoredEmbeddings.of(embed_input(model, path, device=device, progress=progress), path)


def _format_result(result: dict[str, Any]) -> list[str]:
    entries = [f"  {entry['cosine']:.4f}  {entry['name']}" for entry in result["found"]]
    return [result["probe"], *(entries or ["  no entry reaches the threshold"])]


def _write_csv(path: Path, results: Iterator[dict[str, Any]]) -> None:
    from facetrain.errors import UsageError
    from facetrain.files import os_errors_as

    with os_errors_as(UsageError, path), path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["probe", "rank", "name", "label", "cosine", "row"])
        for result in results:
            for rank, entry in enumerate(result["found"], start=1):
                cosine = f"{entry['cosine']:.6f}"
                writer.writerow([result["probe"], rank, entry["name"], entry["label"], cosine, entry["row"]])
