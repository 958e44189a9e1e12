"""`facetrain data overlap | clean`: overlapping and wrong identities, found by a model."""

from __future__ import annotations

import json
import math
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

    from facetrain.data.tools.clean import CleanReport, LabelFault

Model = Annotated[Path, typer.Argument(help="Run folder, model file, or .onnx file.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Number of images per forward pass.")]
Precision = Annotated[
    float,
    typer.Option(
        min=0.5,
        max=0.999,
        help="Share of true findings among the reported ones to aim at; the thresholds are calibrated for it on the "
        "dataset. A higher share reports less.",
    ),
]
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a contact sheet of every decision, for a decision by eye: .html with names in any script, or .png. "
        "Further pages get _2, _3, … after the name.",
    ),
]
_PRINTED_IDENTITIES = 20
_MAX_CUT, _SMALL_CUT = 0.05, 2
"""Share of the images or identities, and number of them in small datasets, that `clean` changes without --yes."""


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
    sheet: Sheet = None,
    precision: Precision = 0.95,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    as_json: Json = False,
) -> None:
    """Find the identities of a training set that a test set also has."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.dataset import identity_name
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.contact_sheet import identity_title, write_pair_sheet
    from facetrain.data.tools.fault_calibration import MIN_SCORES
    from facetrain.data.tools.overlap import find_overlap
    from facetrain.verify.image_embeddings import embed_input, read_input

    require_writable(output, sheet)
    with progress_bar("embedding the dataset") as progress:
        train = embed_input(model, dataset, device=device, batch_size=batch_size, progress=progress)
    with progress_bar("embedding the test set") as progress:
        tested = embed_input(model, test, device=device, batch_size=batch_size, progress=progress)
    report = find_overlap(train.embedding, train.label, tested.embedding, precision=precision)
    found, source = report.found, open_dataset(dataset)
    if output is not None:
        if report.separation.useless:
            raise UsageError(f"{dataset}: {report.separation.sentence()}; nothing is written to {output}")
        write_text(output, "".join(f"{one.identity}\n" for one in found))
    names = [
        f"{number}. {identity_title(source, one.identity)}, {train.name[one.image]} | {tested.name[one.test_image]}, "
        f"cosine {one.similarity:.3f}"
        for number, one in enumerate(found, 1)
    ]
    if sheet is not None:
        pairs = [(one.image, one.test_image) for one in found]
        left, right = read_input(dataset)[0], read_input(test)[0]
        write_pair_sheet(pairs, left.__getitem__, right.__getitem__, sheet, labels=names)
    if as_json:
        threshold = report.threshold.threshold
        facts = {
            "eer": report.separation.eer, "expected_false": report.threshold.expected_false,
            "threshold": threshold if math.isfinite(threshold) else None,
            "overlapping": [
                vars(one) | {"identity_name": identity_name(source, one.identity)} for one in found
            ],
        }  # fmt: skip
        typer.echo(json.dumps(facts))
        return
    expected = f"{report.threshold.expected_false:.1f}"
    false = f", about {expected} by mistake, more if the model confuses some people" if found else ""
    echo_line(f"{len(found):,} identities of {dataset} are also in {test}{false}")
    echo_line(f"  {report.separation.sentence()}")
    if report.threshold.too_few and not report.separation.useless:
        echo_line(
            f"  not judged: {report.threshold.scores:,} images of the dataset are too few to calibrate on; "
            f"{MIN_SCORES} are needed"
        )
    for name in names[:_PRINTED_IDENTITIES]:
        echo_line(f"  {name}")


def clean(
    model: Annotated[
        Path,
        typer.Argument(
            help="Run folder, model file, or .onnx file; with --apply, the dataset instead, and no model."
        ),
    ],
    dataset: Annotated[
        Path | None,
        typer.Argument(
            help="Dataset: a folder with train.rec, a folder per identity, shards, a zip archive, or a mixture's YAML.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the dataset with corrected labels to this folder; it must not exist."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all decisions to this file, as JSON, to read, edit and --apply."
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help='Take the decisions of a report in place of a model; those with `"apply": false` are left out.',
        ),
    ] = None,
    sheet: Sheet = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="With --output, write the dataset even if more than 5 % of the images or identities change.",
        ),
    ] = False,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Also merge the pairs of identities that show one person. Look at them on the sheet first: the model "
            "confuses some people.",
        ),
    ] = False,
    precision: Precision = 0.95,
    device: Device = "auto",
    batch_size: BatchSize = 256,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels: mixed identities, duplicate identities, mislabeled images and outliers."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.clean import applied_by_default, apply_faults, write_cleaned
    from facetrain.data.tools.clean_report import format_report, read_report
    from facetrain.data.tools.contact_sheet import write_fault_sheet

    folder = _dataset_argument(model, dataset, apply, report, merge)
    require_absent(output)
    require_writable(report, sheet)
    source = open_dataset(folder)
    facts: dict[str, object] = {}
    found: CleanReport | None = None
    if apply is not None:
        applied = faults = read_report(apply, source)
    else:
        found, facts = _find_faults(model, folder, precision, merge, device, batch_size)
        faults = found.faults
        applied = applied_by_default(faults, merge=merge)
        if report is not None:
            write_text(report, format_report(facts))
    label_N = apply_faults(source.labels, applied)
    if sheet is not None:
        write_fault_sheet(folder, faults, sheet)
    if output is not None:
        _require_sound_cut(found, source.labels, label_N, folder, yes)
        with progress_bar("writing") as progress:
            written = write_cleaned(folder, label_N, output, workers=workers, progress=progress)
        facts["written"] = vars(written)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    echo_line(f"{folder}: {len(label_N):,} images, {len(faults):,} decisions")
    _echo_decisions(found, faults, merge=merge)
    if output is not None:
        echo_line(f"{written.folder}: {written.images:,} images of {written.identities:,} identities")


def _echo_decisions(found: CleanReport | None, faults: list[LabelFault], *, merge: bool) -> None:
    """Print the decisions by kind, and how far they are to be trusted; `found` is None if a report is applied."""
    from facetrain.data.tools.clean import DUPLICATE_IDENTITY, FAULT_KINDS
    from facetrain.data.tools.fault_calibration import MIN_SCORES

    if found is not None:
        echo_line(f"  {found.separation.sentence()}")
    counts = Counter(fault.kind for fault in faults)
    if found is not None and counts.total() > counts[DUPLICATE_IDENTITY]:
        echo_line(
            f"  about {found.expected_false:.1f} of the decisions on images and mixed identities are mistakes; look at "
            "them with --sheet FILE"
        )
    for kind, description in FAULT_KINDS.items():
        threshold = found.thresholds.get(kind) if found is not None else None
        few = (
            f" (not judged: {threshold.scores:,} candidates are too few to calibrate on; {MIN_SCORES} are needed)"
            if threshold is not None and threshold.too_few
            else ""
        )
        echo_line(f"  {counts[kind]:,} {description}{few}")
    if found is not None and counts[DUPLICATE_IDENTITY]:
        echo_line(
            f"  pairs of identities are {'merged' if merge else 'not merged without --merge'}; look at them first: the "
            "number of mistakes is not known, because a model may confuse some people much more than others"
        )


def _dataset_argument(
    model: Path, dataset: Path | None, apply: Path | None, report: Path | None, merge: bool
) -> Path:
    """Return the dataset: the only argument with --apply, otherwise the second one.

    Raises:
        UsageError: there is one argument too many or too few.
    """
    if apply is None:
        if dataset is None:
            raise UsageError(f"{model}: clean needs a model and a dataset, or --apply REPORT and a dataset")
        return dataset
    if dataset is not None:
        raise UsageError(f"{model}: --apply needs no model; give the dataset only")
    if report is not None:
        raise UsageError("--report cannot be combined with --apply; edit the report that you apply")
    if merge:
        raise UsageError('--merge cannot be combined with --apply; set `"apply": true` in the report')
    return model


def _find_faults(
    model: Path, folder: Path, precision: float, merge: bool, device: str, batch_size: int
) -> tuple[CleanReport, dict[str, object]]:
    """Return the faults of a dataset, and the content of the report file."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.clean import find_label_faults
    from facetrain.data.tools.clean_report import describe_report
    from facetrain.verify.image_embeddings import embed_input

    with progress_bar("embedding") as progress:
        embedded = embed_input(model, folder, device=device, batch_size=batch_size, progress=progress)
    found = find_label_faults(embedded.embedding, embedded.label, precision=precision, merge=merge)
    return found, describe_report(open_dataset(folder), found, model, merge=merge)


def _require_sound_cut(
    found: CleanReport | None, label_N: np.ndarray, corrected_N: np.ndarray, dataset: Path, yes: bool
) -> None:
    """Refuse to write with a model that cannot separate identities, or more than 5 % of changes without --yes.

    Raises:
        UsageError: the dataset is not to be written.
    """
    import numpy as np

    if found is not None and found.separation.useless:
        raise UsageError(f"{dataset}: {found.separation.sentence()}; nothing is written")
    kept = corrected_N >= 0
    identities = len(np.unique(label_N))
    for cut, count, what in (
        (int((label_N != corrected_N).sum()), len(label_N), "images would be left out or get another label"),
        (
            identities - len(np.unique(label_N[kept & (label_N == corrected_N)])),
            identities,
            "identities would disappear",
        ),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT) and not yes:
            trust = f", and {found.separation.sentence()}" if found else ""
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {what} ({cut / count:.1%}){trust}; read --report FILE and "
                "--sheet FILE, then repeat the command with --yes, or with a stronger model"
            )
