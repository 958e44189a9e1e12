"""`facetrain data clean | overlap`: wrong labels, and identities of a test set, found by a model."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.data.options import Dataset, Workers, json_facts, print_written
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Float32InferenceOptions, Json, Model, local_file
from facetrain.cli.outputs import (
    echo_line,
    require_absent,
    require_distinct,
    require_no_input,
    require_sheet,
    require_writable,
    write_text,
)
from facetrain.cli.progress import progress_bar
from facetrain.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from facetrain.data.tools.clean import CleanReport
    from facetrain.data.tools.overlap import OverlapReport
    from facetrain.data.tools.similarity import Separation
    from facetrain.embeddings.embedding_files import Embeddings
    from facetrain.embeddings.inference import Inference

_PRINTED_IDENTITIES = 20
_MAX_CUT, _SMALL_CUT = 0.05, 2
"""Share of the images or identities, and number of them in small datasets, that `clean` changes without --yes."""


@dataclass(frozen=True)
class CleanFiles:
    """Files that `clean` writes, and the report that it applies."""

    output: Annotated[
        Path | None,
        typer.Option(help="Write the dataset with corrected labels to this folder; it must not exist."),
    ] = None
    report: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all decisions as JSON, to read, edit and --apply."),
    ] = None
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help="Write the dataset with the decisions of this report: `clean DATASET --apply REPORT --output DIR`. "
            'Decisions with `"apply": false` are left out.',
        ),
    ] = None
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a contact sheet of the first 1,000 decisions for manual review, an .html page.",
        ),
    ] = None


@option_groups
def clean(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="[MODEL] DATASET",
            parser=local_file,
            help="MODEL: run folder, model file or .onnx file; none with --apply. DATASET: a folder with train.rec, a "
            "folder per identity, shards, or a mixture's YAML.",
        ),
    ],
    files: CleanFiles,
    inference: Float32InferenceOptions,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Write the dataset even if over 5 % of the images or identities change."),
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels with a model, and write a corrected dataset."""
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.clean import find_label_faults
    from facetrain.data.tools.clean_report import describe_report, format_report, read_report
    from facetrain.data.tools.contact_sheet import write_fault_sheet
    from facetrain.data.tools.label_faults import apply_faults
    from facetrain.data.tools.selection import select_relabeled
    from facetrain.data.tools.writing import write_dataset

    _check_arguments(inputs, files)
    model, folder = inputs[0], inputs[-1]
    source = open_dataset(folder)
    report = None
    if files.apply is not None:
        label_N = apply_faults(source.labels, read_report(files.apply, source))
        facts: dict[str, Any] = {"images": source.num_images}
    else:
        embedded = _embed_images("embedding", model, folder, inference)
        report = find_label_faults(embedded.embedding, embedded.label)
        label_N = report.label_N
        facts = describe_report(source, report, model)
        if files.report is not None:
            write_text(files.report, format_report(facts))
        if files.sheet is not None:
            write_fault_sheet(source, report.faults, files.sheet)
    written = []
    if files.output is not None:
        _require_safe_changes(source.labels, label_N, folder, report.separation if report else None, yes)
        with progress_bar("writing") as progress:
            selection = select_relabeled(folder, label_N)
            written.append(write_dataset(selection, files.output, workers=workers, progress=progress))
        facts["written"] = json_facts(written[0])
    if as_json:
        typer.echo(json.dumps(facts))
        return
    if report is not None:
        echo_line(f"{folder}: {len(label_N):,} images, {len(report.faults):,} decisions")
        _echo_decisions(report)
    print_written(written)


def _check_arguments(inputs: list[Path], files: CleanFiles) -> None:
    """Check the arguments and the outputs before the model runs.

    Raises:
        UsageError: there is one argument too many or too few, or an output cannot be written.
    """
    if len(inputs) != (2 if files.apply is None else 1):
        raise UsageError(
            f"{inputs[0]}: clean needs a model and a dataset, or a dataset and --apply REPORT, which needs no model"
        )
    if files.apply is not None and files.output is None:
        raise UsageError(f"--apply {files.apply}: give the folder of the new dataset with --output")
    require_absent(files.output)
    require_distinct(files.output, files.report, files.sheet)
    require_no_input((*inputs, files.apply), files.report, files.sheet)
    require_writable(files.report)
    require_sheet(files.sheet)


def _require_safe_changes(
    label_N: np.ndarray, corrected_N: np.ndarray, dataset: Path, separation: Separation | None, yes: bool
) -> None:
    """Refuse to write with a model that cannot separate identities, or more than 5 % of changes without --yes.

    Raises:
        UsageError: the dataset is not to be written.
    """
    import numpy as np

    from facetrain.data.tools.label_faults import count_changes

    if separation is not None and separation.useless:
        raise UsageError(f"{dataset}: {separation.sentence()}; nothing is written")
    images, identities = count_changes(label_N, corrected_N)
    for cut, count, change in (
        (images, len(label_N), "images would be left out or get another label"),
        (identities, len(np.unique(label_N)), "identities would disappear"),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT) and not yes:
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {change} ({cut / count:.1%}); read --report FILE and --sheet FILE, "
                "then repeat the command with --yes, or with a stronger model"
            )


def _echo_decisions(report: CleanReport) -> None:
    """Print the decisions by kind, and how far they are to be trusted."""
    from facetrain.data.tools.fault_calibration import MIN_SCORES
    from facetrain.data.tools.label_faults import DUPLICATE_IDENTITY, FAULT_KINDS

    counts = Counter(fault.kind for fault in report.faults)
    echo_line(f"  {report.separation.sentence()}")
    if counts.total() > counts[DUPLICATE_IDENTITY]:
        echo_line(
            f"  about {report.expected_false:.1f} of the decisions on images and mixed identities are mistakes; "
            "look at them with --sheet FILE"
        )
    for kind, description in FAULT_KINDS.items():
        threshold = report.thresholds.get(kind)
        few = (
            f" (not judged: {threshold.scores:,} candidates are too few to calibrate on; {MIN_SCORES} are needed)"
            if threshold is not None and threshold.too_few
            else ""
        )
        echo_line(f"  {counts[kind]:,} {description}{few}")
    if counts[DUPLICATE_IDENTITY]:
        echo_line(
            "  pairs of identities are not merged: a model may confuse some people much more than others. Look at them "
            'on the sheet, set `"apply": true` in the report, and use --apply'
        )


@option_groups
def overlap(
    model: Model,
    dataset: Dataset,
    test: Annotated[Path, typer.Argument(help="Test set: a .bin, a folder of images, or a dataset.")],
    inference: Float32InferenceOptions,
    output: Annotated[
        Path | None, typer.Option(metavar="TXT", help="Write the identities, for `without` in a mixture.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find identities that a training set and a test set share."""
    from facetrain.data.dataset import identity_name
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.contact_sheet import identity_title
    from facetrain.data.tools.overlap import find_overlap

    require_writable(output)
    require_no_input((model, dataset, test), output)
    source = open_dataset(dataset)
    train = _embed_images("embedding the dataset", model, dataset, inference)
    tested = _embed_images("embedding the test set", model, test, inference)
    report = find_overlap(train.embedding, train.label, tested.embedding)
    if output is not None:
        if report.separation.useless:
            raise UsageError(f"{dataset}: {report.separation.sentence()}; nothing is written to {output}")
        write_text(output, "".join(f"{one.identity}\n" for one in report.overlapping))
    if as_json:
        threshold = report.threshold.threshold
        facts = {
            "eer": report.separation.eer,
            "expected_false": report.threshold.expected_false,
            "threshold": threshold if math.isfinite(threshold) else None,
            "overlapping": [
                vars(one) | {"identity_name": identity_name(source, one.identity)}
                for one in report.overlapping
            ],
        }
        typer.echo(json.dumps(facts))
        return
    _echo_report(report, dataset, test)
    for number, one in enumerate(report.overlapping[:_PRINTED_IDENTITIES], 1):
        echo_line(
            f"  {number}. {identity_title(source, one.identity)}, {train.name[one.image]} | "
            f"{tested.name[one.test_image]}, cosine {one.similarity:.3f}"
        )


def _echo_report(report: OverlapReport, dataset: Path, test: Path) -> None:
    from facetrain.data.tools.fault_calibration import MIN_SCORES

    expected = (
        f", about {report.threshold.expected_false:.1f} by mistake, more if the model confuses some people"
    )
    count = len(report.overlapping)
    echo_line(f"{count:,} identities of {dataset} are also in {test}{expected if count else ''}")
    echo_line(f"  {report.separation.sentence()}")
    if report.threshold.too_few and not report.separation.useless:
        echo_line(
            f"  not judged: {report.threshold.scores:,} images of the dataset are too few to calibrate on; "
            f"{MIN_SCORES} are needed"
        )


def _embed_images(title: str, model: Path, images: Path, inference: Inference) -> Embeddings:
    """Return the embeddings of a dataset, a verification set or a folder of images, with a progress bar."""
    from facetrain.embeddings.embed_images import embed_input

    with progress_bar(title) as progress:
        return embed_input(model, images, inference, progress=progress)
