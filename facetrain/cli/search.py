"""Command `facetrain search`: the most similar gallery entries for each probe."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from facetrain.cli.devices import Device
from facetrain.cli.outputs import echo_line, require_distinct, require_no_input, require_writable
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from facetrain.embeddings.exact_search import Found
    from facetrain.embeddings.stored_embeddings import StoredEmbeddings
    from facetrain.verify.output.search_results import SearchResults

_INPUT = "a file of embeddings that `facetrain embed` wrote (.npz, .parquet), or with --model any images"
_RECALL_PROBES = 1000


def search(
    context: typer.Context,
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
            "facetrain\\[faiss]."
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
    from facetrain.embeddings.embedding_files import SUFFIXES
    from facetrain.verify.output.search_results import SearchResults

    if fmr is not None and threshold is not None:
        raise UsageError("--fmr and --threshold both give the smallest cosine similarity; remove one of them")
    if index != "ivf":
        refuse_given(context, "nlist", "nprobe", "index_folder", "recall", when="without --index ivf")
    if fmr is None and gallery.suffix in SUFFIXES and probe.suffix in SUFFIXES:
        refuse_given(context, "model", "device", when="on files of embeddings without --fmr")
    folder = index_folder or _index_beside(gallery)
    require_distinct(output, folder)
    require_no_input((gallery, probe, model), output)
    require_writable(output)
    lowest = _stored_threshold(model, fmr, device) if fmr is not None else threshold
    entries, probes = _embeddings(gallery, model, device), _embeddings(probe, model, device)
    if index == "ivf":
        found = _search_ivf(probes, entries, top, folder, nlist, nprobe, recall)
    else:
        found = _search_exactly(probes, entries, top, with_faiss=index == "flat")
    results = SearchResults(found, probes, entries, lowest)
    if output is not None:
        results.write_csv(output)
    if as_json:
        typer.echo(json.dumps(list(results), indent=1))
    elif output is None:
        _echo_results(results)
    else:
        echo_line(f"{output}: searched {probes.count:,} probes in {entries.count:,} gallery entries")


def _index_beside(gallery: Path) -> Path:
    """Return the default folder of the index: GALLERY.ivf."""
    named = gallery if gallery.name else gallery.absolute()  # the current folder, given as "."
    return Path(f"{named}.ivf")


def _search_exactly(
    probes: StoredEmbeddings, entries: StoredEmbeddings, top: int, *, with_faiss: bool
) -> Found:
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.exact_search import scan_with_faiss, search_exactly
    from facetrain.embeddings.ivf_index import import_faiss

    scan = scan_with_faiss(import_faiss()) if with_faiss else None
    with progress_bar("comparing") as progress:
        return search_exactly(probes, entries, top, scan=scan, progress=progress)


def _search_ivf(
    probes: StoredEmbeddings,
    entries: StoredEmbeddings,
    top: int,
    folder: Path,
    nlist: int | None,
    nprobe: int,
    report_recall: bool,
) -> Found:
    """Search with the index in `folder`, which is built first if it does not exist."""
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.exact_search import require_same_size
    from facetrain.embeddings.ivf_index import IvfIndex, build_ivf, default_nlist

    require_same_size(probes, entries)
    if not folder.exists():
        try:
            with progress_bar("building the index") as progress:
                build_ivf(entries, folder, nlist or default_nlist(entries.count), progress=progress)
        except DataError:
            if not folder.exists():
                raise
            # Another search has built the index at the same time: it is opened below.
    opened = IvfIndex(folder, entries)
    if nlist not in (None, opened.facts.nlist):
        raise UsageError(
            f"{folder}: the index has {opened.facts.nlist:,} lists, not {nlist:,}; remove the folder to build it "
            "again, or leave out --nlist"
        )
    with progress_bar("searching") as progress:
        found = opened.search(probes, top, nprobe, progress=progress)
    if report_recall:
        share, count = _recall_of_first(found, probes, entries, top)
        lists = opened.facts.nlist
        typer.echo(
            f"recall {share:.4f} of the exact results, {count:,} probes, {lists:,} lists, {min(nprobe, lists):,} per "
            "probe",
            err=True,
        )
    return found


def _recall_of_first(
    found: Found, probes: StoredEmbeddings, entries: StoredEmbeddings, top: int
) -> tuple[float, int]:
    """Return the share of the exact results that were found for the first probes, and the number of these."""
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.exact_search import Found, search_exactly
    from facetrain.embeddings.ivf_index import recall

    first = replace(probes, count=min(probes.count, _RECALL_PROBES))
    with progress_bar("searching exactly") as progress:
        exact = search_exactly(first, entries, top, progress=progress)
    return recall(Found(found.row_QK[: first.count], found.cosine_QK[: first.count]), exact), first.count


def _stored_threshold(model: Path | None, fmr: float, device: str) -> float:
    from facetrain.distributed.world import join
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
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.embeddings.embedding_files import SUFFIXES
    from facetrain.embeddings.stored_embeddings import StoredEmbeddings, open_embeddings

    if path.suffix in SUFFIXES:
        return open_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: not a file of embeddings ({', '.join(SUFFIXES)}); add --model MODEL to embed its images"
        )
    with progress_bar(f"embedding {path}") as progress:
        return StoredEmbeddings.of(embed_input(model, path, device=device, progress=progress), path)


def _echo_results(results: SearchResults) -> None:
    for result in results:
        echo_line(result["probe"])
        for entry in result["found"]:
            echo_line(f"  {entry['cosine']:.4f}  {entry['name']}")
        if not result["found"]:
            echo_line("  no entry reaches the threshold")
