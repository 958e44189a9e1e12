"""`facetrain data clean`: wrong labels, found by a model."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from facetrain.cli.data.options import (
    Json,
    Precision,
    Workers,
    embed_images,
    json_facts,
    print_written,
)
from facetrain.cli.evaluation_options import Float32InferenceOptions
from facetrain.cli.option_groups import option_groups
from facetrain.cli.outputs import (
    echo_line,
    require_absent,
    require_distinct,
    require_free_pages,
    require_no_input,
    require_sheet,
    require_writable,
    write_text,
)
from facetrain.cli.unused_options import refuse_given
from facetrain.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from facetrain.data.dataset import FaceDataset
    from facetrain.data.tools.clean import CleanReport
    from facetrain.data.tools.label_faults import LabelFault
    from facetrain.data.tools.writing import WrittenDataset
    from facetrain.embeddings.embedding_files import Embeddings

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
        typer.Option(
            metavar="FILE", help="Write all decisions to this JSON file, to read, edit and --apply."
        ),
    ] = None
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="REPORT",
            help="Apply the decisions of this report: `clean DATASET --apply REPORT`. Decisions with "
            '`"apply": false` are left out.',
        ),
    ] = None
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a contact sheet for manual review: .html with names in any script, or .png. Further pages get "
            "_2, _3, … after the name; such files must not exist.",
        ),
    ] = None


@dataclass(frozen=True)
class CleanChanges:
    """Decisions that change the dataset."""

    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Also merge the pairs of identities that show one person. Look at them on the sheet first: the model "
            "confuses some people.",
        ),
    ] = False
    precision: Precision = 0.95
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            help="With --output, write the dataset even if more than 5 % of the images or identities change.",
        ),
    ] = False


@option_groups
def clean(
    context: typer.Context,
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="[MODEL] DATASET",
            help="MODEL: run folder, model file or .onnx file; none with --apply. DATASET: a folder with train.rec, a "
            "folder per identity, shards, a zip archive, or a mixture's YAML.",
        ),
    ],
    files: CleanFiles,
    changes: CleanChanges,
    inference: Float32InferenceOptions,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels: mixed identities, duplicate identities, mislabeled images and outliers."""
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.clean_report import format_report
    from facetrain.data.tools.contact_sheet import write_fault_sheet
    from facetrain.data.tools.label_faults import apply_faults

    _check_arguments(inputs, files, changes)
    model, folder = inputs[0], inputs[-1]
    if files.apply is not None:
        refuse_given(context, "precision", "device", "batch_size", when="with --apply")
    if files.output is None:
        refuse_given(context, "yes", "workers", when="without --output")
    require_absent(files.output)
    require_distinct(files.output, files.report, files.sheet)
    require_no_input((*inputs, files.apply), files.report, files.sheet)
    require_writable(files.report)
    require_sheet(files.sheet)
    require_free_pages(files.sheet, files.output, files.report)
    source = open_dataset(folder)
    if files.apply is not None:
        decisions = _read_decisions(files.apply, source)
    else:
        embedded = embed_images("embedding", model, folder, inference)
        decisions = _find_decisions(embedded, source, model, changes)
    if files.report is not None:
        write_text(files.report, format_report(decisions.facts))
    label_N = apply_faults(source.labels, decisions.applied)
    if files.sheet is not None:
        write_fault_sheet(folder, decisions.faults, files.sheet)
    written = None
    if files.output is not None:
        require_safe_changes(decisions.report, source.labels, label_N, folder, changes.yes)
        written = _write(folder, label_N, files.output, workers)
    if as_json:
        typer.echo(json.dumps(decisions.facts | ({"written": json_facts(written)} if written else {})))
        return
    echo_line(f"{folder}: {len(label_N):,} images, {len(decisions.faults):,} decisions")
    _echo_decisions(decisions.report, decisions.faults, merge=changes.merge)
    if written is not None:
        print_written([written])


def _write(folder: Path, label_N: np.ndarray, output: Path, workers: int | None) -> WrittenDataset:
    from facetrain.cli.progress import progress_bar
    from facetrain.data.tools.clean import write_cleaned

    with progress_bar("writing") as progress:
        return write_cleaned(folder, label_N, output, workers=workers, progress=progress)


def _check_arguments(inputs: list[Path], files: CleanFiles, changes: CleanChanges) -> None:
    """Check that there is a dataset, and a model or a report to apply.

    Raises:
        UsageError: there is one argument too many or too few, or an option has no meaning with --apply.
    """
    if files.apply is None:
        if len(inputs) != 2:
            raise UsageError(
                f"{inputs[0]}: clean needs a model and a dataset, or --apply REPORT and a dataset"
            )
        return
    if len(inputs) > 1:
        raise UsageError(f"{inputs[0]}: --apply needs no model; give the dataset only")
    if files.report is not None:
        raise UsageError("--report cannot be combined with --apply; edit the report that you apply")
    if changes.merge:
        raise UsageError('--merge cannot be combined with --apply; set `"apply": true` in the report')


class _Decisions(NamedTuple):
    """Decisions on label faults: found by a model, or read from a report."""

    faults: list[LabelFault]
    applied: list[LabelFault]
    """Faults whose decisions change the labels."""
    report: CleanReport | None
    """How far the decisions are to be trusted; None for decisions that were read."""
    facts: dict[str, object]
    """Content of the report file; for decisions of a report, the number of images and the applied decisions."""


def _read_decisions(path: Path, source: FaceDataset) -> _Decisions:
    from facetrain.data.tools.clean_report import describe_decisions, read_report

    applied = read_report(path, source)
    facts = {"images": source.num_images, "decisions": describe_decisions(source, applied, applied)}
    return _Decisions(applied, applied, report=None, facts=facts)


def _find_decisions(
    embedded: Embeddings, source: FaceDataset, model: Path, changes: CleanChanges
) -> _Decisions:
    from facetrain.data.tools.clean import find_label_faults
    from facetrain.data.tools.clean_report import describe_report
    from facetrain.data.tools.label_faults import applied_by_default

    merge = changes.merge
    report = find_label_faults(embedded.embedding, embedded.label, precision=changes.precision, merge=merge)
    facts = describe_report(source, report, model, merge=merge)
    return _Decisions(report.faults, applied_by_default(report.faults, merge=merge), report, facts)


def require_safe_changes(
    report: CleanReport | None, label_N: np.ndarray, corrected_N: np.ndarray, dataset: Path, yes: bool
) -> None:
    """Refuse to write with a model that cannot separate identities, or more than 5 % of changes without --yes.

    Raises:
        UsageError: the dataset is not to be written.
    """
    import numpy as np

    from facetrain.data.tools.label_faults import count_changes

    if report is not None and report.separation.useless:
        raise UsageError(f"{dataset}: {report.separation.sentence()}; nothing is written")
    images, identities = count_changes(label_N, corrected_N)
    for cut, count, change in (
        (images, len(label_N), "images would be left out or get another label"),
        (identities, len(np.unique(label_N)), "identities would disappear"),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT) and not yes:
            trust = f", and {report.separation.sentence()}" if report else ""
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {change} ({cut / count:.1%}){trust}; read --report FILE and "
                "--sheet FILE, then repeat the command with --yes, or with a stronger model"
            )


def _echo_decisions(report: CleanReport | None, faults: list[LabelFault], *, merge: bool) -> None:
    """Print the decisions by kind, and how far they are to be trusted; `report` is None for read decisions."""
    from facetrain.data.tools.fault_calibration import MIN_SCORES
    from facetrain.data.tools.label_faults import DUPLICATE_IDENTITY, FAULT_KINDS

    if report is not None:
        echo_line(f"  {report.separation.sentence()}")
    counts = Counter(fault.kind for fault in faults)
    if report is not None and counts.total() > counts[DUPLICATE_IDENTITY]:
        echo_line(
            f"  about {report.expected_false:.1f} of the decisions on images and mixed identities are mistakes; look "
            "at them with --sheet FILE"
        )
    for kind, description in FAULT_KINDS.items():
        threshold = report.thresholds.get(kind) if report is not None else None
        few = (
            f" (not judged: {threshold.scores:,} candidates are too few to calibrate on; {MIN_SCORES} are needed)"
            if threshold is not None and threshold.too_few
            else ""
        )
        echo_line(f"  {counts[kind]:,} {description}{few}")
    if report is not None and counts[DUPLICATE_IDENTITY]:
        echo_line(
            f"  pairs of identities are {'merged' if merge else 'not merged without --merge'}; look at them first: the "
            "number of mistakes is not known, because a model may confuse some people much more than others"
        )
