"""Command `facetrain search`: the most similar gallery entries for each probe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.options import SKIP_BAD_ADVICE, Detector, Device, Json, MinQuality, SkipBad, local_file
from facetrain.cli.outputs import echo_line, leave_to_first_rank, require_existing
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import UsageError
from facetrain.text import count_text

if TYPE_CHECKING:
    import numpy as np

    from facetrain.embeddings.embeddings import Embeddings
    from facetrain.embeddings.gallery_search import Found

_INPUT = "a file of embeddings that `facetrain embed` wrote (.npz, .parquet), or with --model any images"
_ROUNDING = 1e-12
"""Tolerance of the threshold: the cosine of an embedding with itself is 1 up to float64 rounding."""


def search(
    gallery: Annotated[
        Path,
        typer.Argument(metavar="GALLERY", parser=local_file, help=f"Faces to search among: {_INPUT}."),
    ],
    probe: Annotated[
        Path, typer.Argument(metavar="PROBE", parser=local_file, help=f"Faces to search for: {_INPUT}.")
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of gallery entries per probe.")] = 5,
    threshold: Annotated[
        float,
        typer.Option(min=-1, max=1, help="Smallest cosine similarity of a result; -1 lists all results."),
    ] = -1,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL", parser=local_file, help="Model that embeds GALLERY or PROBE if they are images."
        ),
    ] = None,
    map_file: Annotated[
        Path | None,
        typer.Option(
            "--map",
            metavar="FILE",
            help="Map of `facetrain align`, for a GALLERY that an older model embedded.",
        ),
    ] = None,
    other_model: Annotated[
        bool,
        typer.Option(
            "--other-model", help="Compare embeddings of two models that were trained to fit together."
        ),
    ] = False,
    min_quality: MinQuality = 0,
    detector: Detector = None,
    skip_bad: SkipBad = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the most similar faces of a gallery for each probe.

    A .npz file is read in blocks: a gallery may be larger than the memory. With --min-quality,
    probes and entries of lower quality are left out, and warnings say how many. Entries are kept
    where their scale of quality is another one: with --map or --other-model, and if only one of the
    two files was made with mirror images.
    """
    from facetrain.cli.progress_bar import progress_bar

    require_existing(gallery, probe, model, detector, map_file)
    from facetrain.embeddings.embedding_files import SUFFIXES
    from facetrain.embeddings.gallery_search import search_gallery

    of_images = {
        "--model": model,
        "--detector": detector,
        "--skip-bad": skip_bad or None,
        "--device": None if device == "auto" else device,
    }
    for option, value in of_images.items():
        if value is not None and {gallery.suffix, probe.suffix} <= set(SUFFIXES):
            given = option if value is True else f"{option} {value}"
            raise UsageError(f"{given}: {gallery} and {probe} are embedded already; remove it")

    embedding_map = None
    if map_file is not None:  # before the images are embedded, which can take hours
        from facetrain.embeddings.embedding_map import open_map

        embedding_map = open_map(map_file)
    entries, probes = (
        _embeddings(faces, model, detector, device, skip_bad=skip_bad) for faces in (gallery, probe)
    )
    leave_to_first_rank()
    if embedding_map is not None:
        entries = embedding_map.mapped(entries)
    usable_Q = _usable(probes, min_quality)
    is_of_other_model = other_model or map_file is not None
    usable_G = _usable(
        entries, _min_quality_of_gallery(entries, probes, min_quality, is_of_other_model=is_of_other_model)
    )
    with progress_bar("comparing") as progress:
        matches = search_gallery(
            probes, entries, top, among=usable_G, other_model=other_model, progress=progress
        )
    named = _name_results(matches, probes, entries, threshold)
    results = [result for result, usable in zip(named, usable_Q, strict=True) if usable]
    if as_json:
        typer.echo(json.dumps(results, indent=1))
        return
    for result in results:
        echo_line(result["probe"])
        for entry in result["found"]:
            echo_line(f"  {entry['cosine']:z.4f}  {entry['name']}")
        if not result["found"]:
            echo_line("  no entry reaches the threshold")


def _embeddings(
    path: Path, model: Path | None, detector: Path | None, device: str, *, skip_bad: bool
) -> Embeddings:
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.embeddings.embedding_files import SUFFIXES, open_embeddings
    from facetrain.embeddings.inference import Inference
    from facetrain.telemetry.log import warn

    if path.suffix in SUFFIXES:
        return open_embeddings(path)
    if model is None:
        raise UsageError(
            f"{path}: not a file of embeddings ({', '.join(SUFFIXES)}); add --model MODEL to embed its images"
        )
    skipped = list[SkippedFile]()
    with progress_bar(f"embedding {path}") as progress:
        embeddings = embed_input(
            model, path, Inference(device), detector=detector, skipped=skipped if skip_bad else None,
            advice=SKIP_BAD_ADVICE, progress=progress,
        )  # fmt: skip
    for file in skipped:
        warn(f"left out {file.reason}")
    return embeddings


def _min_quality_of_gallery(
    gallery: Embeddings, probes: Embeddings, min_quality: float, *, is_of_other_model: bool
) -> float:
    """Return the lowest quality of an entry that is searched; 0 with a warning if it means nothing there."""
    from facetrain.telemetry.log import warn

    if not min_quality:
        return 0
    if is_of_other_model:
        reason = "has qualities of another model, whose scale is another one"
    elif None not in (gallery.flip, probes.flip) and gallery.flip != probes.flip:
        # The length of a sum of two embeddings is about twice that of one.
        mirrored = "with" if gallery.flip else "without"
        reason = f"has qualities {mirrored} mirror images, whose scale is not that of {probes.path}"
    elif gallery.quality is None:
        reason = "has no column `quality`"
    else:
        return min_quality
    warn(f"{gallery.path}: {reason}; all its images are searched")
    return 0


def _usable(faces: Embeddings, min_quality: float) -> np.ndarray:
    """Return which images have at least a quality, bool (N,); warn of the others."""
    from facetrain.telemetry.log import warn

    usable_N = faces.usable(min_quality)
    if left_out := int((~usable_N).sum()):
        warn(
            f"{faces.path}: {left_out:,} of {count_text(faces.count, 'image')}"
            f" left out; quality below {min_quality:g}"
        )
    return usable_N


def _name_results(
    matches: Found, probes: Embeddings, gallery: Embeddings, threshold: float
) -> Iterator[dict[str, Any]]:
    """Yield the name of each probe, and the entries that were found for it."""
    for probe, rows in enumerate(matches.row_QK):
        cosines = matches.cosine_QK[probe].tolist()
        yield {
            "probe": probes.name[probe],
            "found": [
                {"name": gallery.name[row], "label": int(gallery.label[row]), "cosine": cosine, "row": row}
                for row, cosine in zip(rows.tolist(), cosines, strict=True)
                if cosine >= threshold - _ROUNDING
            ],
        }
