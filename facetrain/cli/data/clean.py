"""`facetrain data overlap | clean`: overlapping and wrong identities, found by a model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Dataset, Json, Workers
from facetrain.cli.devices import Device
from facetrain.cli.outputs import echo_line, require_absent, require_writable, write_text
from facetrain.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from facetrain.data.tools.clean import CleanReport

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
_MAX_CUT, _SMALL_CUT = 0.05, 2
"""Share of the images or identities, and number of them in small datasets, that `clean` leaves out without --yes."""
_UNTRUSTED_CONFUSION = 0.2


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
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.contact_sheet import identity_title, write_pair_sheet
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
    source = open_dataset(dataset)
    echo_line(f"{len(found):,} identities of {dataset} are also in {test} (cosine ≥ {used:.3f})")
    for one in found[:_PRINTED_IDENTITIES]:
        names = f"{train.name[one.image]} and {tested.name[one.test_image]}"
        echo_line(f"  {identity_title(source, one.identity)}  {one.similarity:.3f}  {names}")


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
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG",
            help="Write a contact sheet of the first 40 faults, for a decision by eye: the image, images of its "
            "identity, and images of the other identity.",
        ),
    ] = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="With --output, write the dataset even if more than 5 % of the images or identities are cut.",
        ),
    ] = False,
    threshold: Threshold = None,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels: mixed identities, duplicate identities, mislabeled images and outliers."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.dataset import identity_name
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.clean import FAULT_KINDS, find_label_faults, write_cleaned
    from facetrain.data.tools.contact_sheet import write_fault_sheet
    from facetrain.verify.image_embeddings import embed_input

    require_absent(output)
    require_writable(report, sheet)
    with progress_bar("embedding") as progress:
        embedded = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    found = find_label_faults(embedded.embedding, embedded.label, threshold=threshold)
    source = open_dataset(dataset)
    faults = [
        vars(fault)
        | {
            "identity_name": identity_name(source, fault.identity),
            "other_name": identity_name(source, fault.other) if fault.other >= 0 else None,
            "name": embedded.name[fault.image] if fault.image >= 0 else None,
        }
        for fault in found.faults
    ]
    facts: dict[str, object] = {
        "threshold": found.threshold, "confusion": found.confusion, "faults": faults,
    }  # fmt: skip
    if report is not None:
        write_text(report, json.dumps(facts) + "\n")
    if sheet is not None:
        write_fault_sheet(dataset, found.faults, sheet)
    if output is not None:
        if not yes:
            _require_small_cut(found, embedded.label, dataset)
        with progress_bar("writing") as progress:
            written = write_cleaned(dataset, found, output, workers=workers, progress=progress)
        facts["written"] = vars(written)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    echo_line(f"{dataset}: {len(embedded.label):,} images, threshold {found.threshold:.3f}")
    echo_line(f"  {_trust(found.confusion)}")
    counts = Counter(fault.kind for fault in found.faults)
    for kind, description in FAULT_KINDS.items():
        echo_line(f"  {counts[kind]:,} {description}")
    if output is not None:
        echo_line(f"{written.folder}: {written.images:,} images of {written.identities:,} identities")


def _trust(confusion: float) -> str:
    """Return a sentence on how far the reports of a model can be trusted, by its own error on the dataset."""
    line = f"{confusion:.1%} of the images are closer to another identity than to their own"
    if confusion > _UNTRUSTED_CONFUSION:
        return f"{line}: the model is too weak for this dataset, or most labels are wrong; do not trust the faults"
    return f"{line}: so many errors are to be expected among the faults; look at --sheet PNG"


def _require_small_cut(found: CleanReport, label_N: np.ndarray, dataset: Path) -> None:
    """Refuse to write a dataset without more than 5 % of the images or identities.

    Raises:
        UsageError: the cut is larger.
    """
    identities = len(set(label_N.tolist()))
    for cut, count, what in (
        (found.cut_images, len(label_N), "images would be left out or moved"),
        (found.cut_identities(label_N), identities, "identities would disappear"),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT):
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {what} ({cut / count:.1%}), and {_trust(found.confusion)}; "
                "read --report FILE and --sheet PNG, then repeat the command with --yes, or with a stronger model"
            )
