"""`facetrain data overlap | clean`: what a model sees that the labels do not say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.options import Dataset, Json, Workers
from facetrain.cli.devices import Device
from facetrain.cli.outputs import require_absent, require_writable, write_text

Model = Annotated[Path, typer.Argument(help="A run folder, a model file, or an .onnx.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images at once.")]
Threshold = Annotated[
    float | None,
    typer.Option(min=-1, max=1, help="Cosine from which on two are one person; by default worked out."),
]
_MEANING = {
    "mixed": "identities hold two people",
    "same": "pairs of identities are one person",
    "moved": "images are of another identity",
    "stranger": "images are like no identity",
}


def overlap(
    model: Model,
    dataset: Dataset,
    test: Annotated[Path, typer.Argument(help="A test set: a .bin, a folder of images, or a dataset.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="TXT", help="Write the identities found, one a line, for a mixture's `without`."
        ),
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw the closest pairs: dataset left, test set right.")
    ] = None,
    threshold: Threshold = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    as_json: Json = False,
) -> None:
    """Find identities of a training set that a test set has too."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.overlap import draw_pairs, overlap
    from facetrain.verify.image_embeddings import embed_input, read_input

    require_writable(output, sheet)
    with progress_bar("embedding the dataset") as progress:
        trained = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    with progress_bar("embedding the test set") as progress:
        tested = embed_input(model, test, device=device, batch_size=batch_size, progress=progress)
    used, found = overlap(trained.embedding, trained.label, tested.embedding, threshold=threshold)
    if output is not None:
        write_text(output, "".join(f"{one.identity}\n" for one in found))
    if sheet is not None:
        pairs = [(one.image, one.test_image) for one in found[:40]]
        left, right = read_input(dataset)[0], read_input(test)[0]
        draw_pairs(pairs, left.__getitem__, right.__getitem__, sheet)
    if as_json:
        typer.echo(json.dumps({"threshold": used, "shared": [vars(one) for one in found]}))
        return
    typer.echo(f"{len(found):,} identities of {dataset} are in {test} too (cosine {used:.3f} and more)")
    for one in found[:20]:
        names = f"{trained.name[one.image]} and {tested.name[one.test_image]}"
        typer.echo(f"  identity {one.identity}  {one.similarity:.3f}  {names}")


def clean(
    model: Model,
    dataset: Dataset,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the cleaned dataset; it must not be there yet.")
    ] = None,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Write all findings as JSON.")] = None,
    threshold: Threshold = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels: several people under one identity, one under several, strangers."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools import clean as tool
    from facetrain.verify.image_embeddings import embed_input

    require_absent(output)
    require_writable(report)
    with progress_bar("embedding") as progress:
        embedded = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    cleaning = tool.clean(embedded.embedding, embedded.label, threshold=threshold)
    findings = [
        vars(one) | {"name": embedded.name[one.image] if one.image >= 0 else None}
        for one in cleaning.findings
    ]
    facts: dict[str, object] = {"threshold": cleaning.threshold, "findings": findings}
    if report is not None:
        write_text(report, json.dumps(facts) + "\n")
    if output is not None:
        with progress_bar("writing") as progress:
            written = tool.write_cleaned(dataset, cleaning, output, workers=workers, progress=progress)
        facts["written"] = vars(written)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{dataset}: {len(embedded.label):,} images, threshold {cleaning.threshold:.3f}")
    counts = Counter(one.kind for one in cleaning.findings)
    for kind, meaning in _MEANING.items():
        typer.echo(f"  {counts[kind]:,} {meaning}")
    if output is not None:
        typer.echo(f"{written.folder}: {written.images:,} images of {written.identities:,} identities")
