"""`facetrain data clean`: wrong labels, found by a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.data.dataset_options import Workers, json_facts, print_written
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Float32InferenceOptions, Json, local_file
from facetrain.cli.outputs import (
    echo_line,
    leave_to_first_rank,
    require_distinct,
    require_no_input,
    require_sheet,
    require_writable,
    write_text,
)
from facetrain.cli.progress_bar import progress_bar
from facetrain.embeddings.inference import Inference
from facetrain.errors import UsageError
from facetrain.files import require_absent
from facetrain.text import count_text

if TYPE_CHECKING:
    import numpy as np

    from facetrain.data.tools.similarity import Separation
    from facetrain.data.tools.wrong_labels import CleanReport

_MAX_CUT, _SMALL_CUT = 0.05, 2
"""Share of the images or identities, and number of them in small datasets, that `clean` changes without --yes."""
_ADVICE = (
    "write a copy without such images with `facetrain data check DATASET --repair FOLDER`, and give the copy"
)


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
        typer.Option(
            "--yes",
            help="Write the dataset even if over 5 % of the images change, or of the identities disappear.",
        ),
    ] = False,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Find wrong labels with a model, and write a corrected dataset."""
    from facetrain.data.open_dataset import open_aligned
    from facetrain.data.tools.clean_report import describe_report, format_report, read_report
    from facetrain.data.tools.contact_sheet import write_wrong_labels_sheet
    from facetrain.data.tools.selection import select_all, select_relabeled
    from facetrain.data.tools.writing import write_dataset
    from facetrain.data.tools.wrong_labels import corrected_labels, find_wrong_labels
    from facetrain.embeddings.embed_images import embed_input

    _check_arguments(inputs, files, inference, yes=yes, workers=workers)
    model, folder = inputs[0], inputs[-1]
    # What the output gets, such as the card, is read before the model runs, and only for an output.
    selection = None if files.output is None else select_all(folder)
    source = selection.source if selection else open_aligned(folder)
    report = None
    if files.apply is not None:
        wrong = read_report(files.apply, source)
        facts: dict[str, Any] = {"images": source.num_images}
    else:
        with progress_bar("embedding") as progress:
            embedded = embed_input(model, folder, inference, advice=_ADVICE, progress=progress)
        leave_to_first_rank()
        report = find_wrong_labels(embedded.embedding, embedded.label)
        wrong = report.wrong
        facts = describe_report(source, report, model)
        if files.report is not None:
            write_text(files.report, format_report(facts))
        if files.sheet is not None:
            write_wrong_labels_sheet(source, wrong, files.sheet)
    label_N, written = corrected_labels(source.labels, wrong), []
    if files.output is not None and selection is not None:
        _require_safe_changes(source.labels, label_N, folder, report.separation if report else None, yes)
        with progress_bar("writing") as progress:
            relabeled = select_relabeled(folder, selection, label_N)
            written.append(write_dataset(relabeled, files.output, workers=workers, progress=progress))
        facts["written"] = json_facts(written[0])
    if as_json:
        typer.echo(json.dumps(facts))
        return
    if report is not None:
        _echo_report(report, folder, len(label_N), files.sheet)
    print_written(written)


def _check_arguments(
    inputs: list[Path], files: CleanFiles, inference: Inference, *, yes: bool, workers: int | None
) -> None:
    """Check the arguments and the outputs before the model runs.

    Raises:
        UsageError: there is one argument too many or too few, an option has no effect, or an output cannot be written.
    """
    if len(inputs) != (2 if files.apply is None else 1):
        raise UsageError(
            f"{inputs[0]}: clean needs a model and a dataset, or a dataset and --apply REPORT, which needs no model"
        )
    if files.apply is not None and files.output is None:
        raise UsageError(f"--apply {files.apply}: give the folder of the new dataset with --output")
    if files.apply is not None and (unused := files.report or files.sheet):
        raise UsageError(
            f"{unused}: --apply {files.apply} makes no new decisions to write there; leave it out"
        )
    if files.apply is not None and inference != Inference():
        raise UsageError(f"--apply {files.apply}: runs no model; remove --device and --batch-size")
    for option, is_given in {"--yes": yes, f"--workers {workers}": workers is not None}.items():
        if is_given and files.output is None:
            raise UsageError(
                f"{option}: nothing is written without --output FOLDER; give it, or remove {option}"
            )
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
    from facetrain.data.tools.wrong_labels import count_changes
    from facetrain.distinct import distinct

    if separation is not None and separation.useless:
        raise UsageError(f"{dataset}: {separation.sentence()}; nothing is written")
    images, identities = count_changes(label_N, corrected_N)
    for cut, count, change in (
        (images, len(label_N), "images would be left out or get another label"),
        (identities, len(distinct(label_N)), "identities would disappear"),
    ):
        if cut > max(_MAX_CUT * count, _SMALL_CUT) and not yes:
            raise UsageError(
                f"{dataset}: {cut:,} of {count:,} {change} ({cut / count:.1%}); read --report FILE and --sheet FILE, "
                "then repeat the command with --yes, or with a stronger model"
            )


def _echo_report(report: CleanReport, dataset: Path, images: int, sheet: Path | None) -> None:
    """Print the decisions by kind, and how far they are to be trusted."""
    from facetrain.data.remote_dataset import with_addresses
    from facetrain.data.tools.fault_threshold import MIN_IMAGES

    moved = sum(one.target >= 0 for one in report.wrong)
    is_judged = not (report.separation.useless or report.threshold.too_few)
    found = f"{len(report.wrong):,} of {images:,} labels are wrong" if is_judged else "no label is judged"
    echo_line(f"{with_addresses(str(dataset))}: {found}")
    echo_line(f"  {report.separation.sentence()}")
    if report.threshold.too_few:
        echo_line(
            f"  {report.threshold.images:,} images are too few to calibrate on; {MIN_IMAGES} are needed"
        )
    if report.wrong:
        echo_line(
            f"  about {report.threshold.expected_false:.1f} of them by mistake; look at them "
            + (f"in {sheet}" if sheet else "with --sheet FILE")
        )
        echo_line(f"  {count_text(moved, 'image')} of another identity")
        echo_line(
            f"  {count_text(len(report.wrong) - moved, 'image')} that show no identity of the dataset clearly"
        )
