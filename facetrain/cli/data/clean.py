"""`facetrain data overlap | clean`: overlapping and wrong identities, found by a model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.data.options import Dataset, Json, Workers
from facetrain.cli.devices import Device
from facetrain.cli.outputs import require_absent, require_writable, write_text

Model = Annotated[Path, typer.Argument(help="Run folder, model file, or .onnx file.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Number of images per forward pass.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        min=-1,
        max=1,
        help="Cosine similarity from which two images show one person; "
        "the default is computed from the images of the dataset.",
    ),
]
_SHEET_PAIRS = 40
_PRINTED_IDENTITIES = 20


def overlap(
    model: Model,
    dataset: Dataset,
    test: Annotated[Path, typer.Argument(help="Test set: a .bin, a folder of images, or a dataset.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="TXT",
            help="Write the identities found, one number per line, for `without` in a mixture.",
        ),
    ] = None,
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG",
            help="Write the 40 most similar pairs of images: the dataset on the left, the test set on the right.",
        ),
    ] = None,
    threshold: Threshold = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    as_json: Json = False,
) -> None:
    """Find the identities of a training set that a test set also has."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.contact_sheet import write_pair_sheet
    from facetrain.data.tools.overlap import find_overlap
    from facetrain.verify.image_embeddings import embed_input, read_input

    require_writable(output, sheet)
    with progress_bar("embedding the dataset") as progress:
        train = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    with progress_bar("embedding the test set") as progress:
        tested = embed_input(model, test, device=device, batch_size=batch_size, progress=progress)
    used, found = find_overlap(train.embedding, train.label, tested.embedding, threshold=threshold)
    if output is not None:
        write_text(output, "".join(f"{one.identity}\n" for one in found))
    if sheet is not None:
        pairs = [(one.image, one.test_image) for one in found[:_SHEET_PAIRS]]
        left, right = read_input(dataset)[0], read_input(test)[0]
        write_pair_sheet(pairs, left.__getitem__, right.__getitem__, sheet)
    if as_json:
        typer.echo(json.dumps({"threshold": used, "overlapping": [vars(one) for one in found]}))
        return
    typer.echo(f"{len(found):,} identities of {dataset} are also in {test} (cosine ≥ {used:.3f})")
    for one in found[:_PRINTED_IDENTITIES]:
        names = f"{train.name[one.image]} and {tested.name[one.test_image]}"
        typer.echo(f"  identity {one.identity}  {one.similarity:.3f}  {names}")


def clean(
    model: Model,
    dataset: Dataset,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the dataset with corrected labels to this folder; it must not exist."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all faults found to this file, as JSON.")
    ] = None,
    threshold: Threshold = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels: mixed identities, duplicate identities, mislabeled images and outliers."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.clean import FAULT_KINDS, find_label_faults, write_cleaned
    from facetrain.verify.image_embeddings import embed_input

    require_absent(output)
    require_writable(report)
    with progress_bar("embedding") as progress:
        embedded = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    found = find_label_faults(embedded.embedding, embedded.label, threshold=threshold)
    faults = [
        vars(fault) | {"name": embedded.name[fault.image] if fault.image >= 0 else None}
        for fault in found.faults
    ]
    facts: dict[str, object] = {"threshold": found.threshold, "faults": faults}
    if report is not None:
        write_text(report, json.dumps(facts) + "\n")
    if output is not None:
        with progress_bar("writing") as progress:
            written = write_cleaned(dataset, found, output, workers=workers, progress=progress)
        facts["written"] = vars(written)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    typer.echo(f"{dataset}: {len(embedded.label):,} images, threshold {found.threshold:.3f}")
    counts = Counter(fault.kind for fault in found.faults)
    for kind, description in FAULT_KINDS.items():
        typer.echo(f"  {counts[kind]:,} {description}")
    if output is not None:
        typer.echo(f"{written.folder}: {written.images:,} images of {written.identities:,} identities")
