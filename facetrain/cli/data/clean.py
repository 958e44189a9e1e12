"""`facetrain data clean`: wrong labels, found by a model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from facetrain.cli.data.options import BatchSize, Json, Precision, Workers, json_facts
from facetrain.cli.devices import Device
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
    from facetrain.embeddings.embedding_files import Embeddings

_MAX_CUT, _SMALL_CUT = 0.05, 2
"""Share of the images or identities, and number of them in small datasets, that `clean` changes without --yes."""


def clean(
    context: typer.Context,
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
    sheet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a contact sheet of every decision, for a decision by eye: .html with names in any script, or "
            ".png. Further pages get _2, _3, … after the name; such files must not exist.",
        ),
    ] = None,
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
    from facetrain.data.tools.clean import write_cleaned
    from facetrain.data.tools.clean_report import format_report
    from facetrain.data.tools.contact_sheet import write_fault_sheet
    from facetrain.data.tools.label_faults import apply_faults

    folder = _dataset_argument(model, dataset, apply, report, merge)
    if apply is not None:
        refuse_given(context, "precision", "device", "batch_size", when="with --apply")
    if output is None:
        refuse_given(context, "yes", "workers", when="without --output")
    require_absent(output)
    require_distinct(output, report, sheet)
    require_no_input((model, dataset, apply), report, sheet)
    require_writable(report)
    require_sheet(sheet)
    require_free_pages(sheet, output, report)
    source = open_dataset(folder)
    if apply is not None:
        decisions = _read_decisions(apply, source)
    else:
        embedded = _embed(model, folder, device, batch_size)
        decisions = _find_decisions(embedded, source, model, precision, merge)
    if report is not None:
        write_text(report, format_report(decisions.facts))
    label_N = apply_faults(source.labels, decisions.applied)
    if sheet is not None:
        write_fault_sheet(folder, decisions.faults, sheet)
    facts = decisions.facts
    if output is not None:
        _require_sound_cut(decisions.found, source.labels, label_N, folder, yes)
        with progress_bar("writing") as progress:
            written = write_cleaned(folder, label_N, output, workers=workers, progress=progress)
        facts = facts | {"written": json_facts(written)}
    if as_json:
        typer.echo(json.dumps(facts))
        return
    echo_line(f"{folder}: {len(label_N):,} images, {len(decisions.faults):,} decisions")
    _echo_decisions(decisions.found, decisions.faults, merge=merge)
    if output is not None:
        echo_line(f"{written.folder}: {written.images:,} images of {written.identities:,} identities")


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


class _Decisions(NamedTuple):
    """Decisions on label faults: found by a model, or read from a report."""

    faults: list[LabelFault]
    applied: list[LabelFault]
    """Those that change the labels."""
    found: CleanReport | None
    """How far the decisions are to be trusted; None for those of a report."""
    facts: dict[str, object]
    """Content of the report file; for decisions of a report, the number of images and the applied decisions."""


def _read_decisions(report: Path, source: FaceDataset) -> _Decisions:
    from facetrain.data.tools.clean_report import describe_decisions, read_report

    applied = read_report(report, source)
    facts = {"images": source.num_images, "decisions": describe_decisions(source, applied, applied)}
    return _Decisions(applied, applied, found=None, facts=facts)


def _embed(model: Path, folder: Path, device: str, batch_size: int) -> Embeddings:
    from facetrain.cli.progress import progress_bar
    from facetrain.embeddings.embed_images import embed_input
    from facetrain.embeddings.inference import Inference

    with progress_bar("embedding") as progress:
        return embed_input(model, folder, Inference(device, batch_size), progress=progress)


def _find_decisions(
    embedded: Embeddings, source: FaceDataset, model: Path, precision: float, merge: bool
) -> _Decisions:
    from facetrain.data.tools.clean import find_label_faults
    from facetrain.data.tools.clean_report import describe_report
    from facetrain.data.tools.label_faults import applied_by_default

    found = find_label_faults(embedded.embedding, embedded.label, precision=precision, merge=merge)
    facts = describe_report(source, found, model, merge=merge)
    return _Decisions(found.faults, applied_by_default(found.faults, merge=merge), found, facts)


def _require_sound_cut(
    found: CleanReport | None, label_N: np.ndarray, corrected_N: np.ndarray, dataset: Path, yes: bool
) -> None:
    """Refuse to write with a model that cannot separate identities, or more than 5 % of changes without --yes.

    Raises:
        UsageError: the dataset is not to be written.
    """
    import numpy as np

    from facetrain.data.tools.label_faults import count_changes

    if found is not None and found.separation.useless:
        raise UsageError(f"{dataset}: {found.separation.sentence()}; nothing is written")
    images, identities = count_changes(label_N, corrected_N)
    for cut, count, change in (
        (images, len(label_N), "images would be left out or get another label"),
        (identities, len(np.unique(label_N)), "identities would disappear"),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT) and not yes:
            trust = f", and {found.separation.sentence()}" if found else ""
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {change} ({cut / count:.1%}){trust}; read --report FILE and "
                "--sheet FILE, then repeat the command with --yes, or with a stronger model"
            )


def _echo_decisions(found: CleanReport | None, faults: list[LabelFault], *, merge: bool) -> None:
    """Print the decisions by kind, and how far they are to be trusted; `found` is None if a report is applied."""
    from facetrain.data.tools.fault_calibration import MIN_SCORES
    from facetrain.data.tools.label_faults import DUPLICATE_IDENTITY, FAULT_KINDS

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
