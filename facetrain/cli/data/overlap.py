"""`facetrain data overlap`: identities that a training set and a test set have in common, found by a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.data.options import Dataset, Precision, Sheet, embed_images
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Float32InferenceOptions, Json, Model
from facetrain.cli.outputs import echo_line, require_no_input, require_sheet, require_writable, write_text
from facetrain.errors import UsageError

if TYPE_CHECKING:
    from facetrain.data.tools.overlap import OverlapReport

_PRINTED_IDENTITIES = 20


@option_groups
def overlap(
    model: Model,
    dataset: Dataset,
    test: Annotated[Path, typer.Argument(help="Test set: a .bin, a folder of images, or a dataset.")],
    inference: Float32InferenceOptions,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="TXT",
            help="Write the identities found, one number per line, for `without` in a mixture.",
        ),
    ] = None,
    sheet: Sheet = None,
    precision: Precision = 0.95,
    as_json: Json = False,
) -> None:
    """Find the identities of a training set that a test set also has."""
    from facetrain.data.dataset import identity_name
    from facetrain.data.open_dataset import open_dataset
    from facetrain.data.tools.contact_sheet import identity_title, write_encoded_sheet
    from facetrain.data.tools.overlap import find_overlap
    from facetrain.embeddings.embed_images import read_input

    require_writable(output, sheet)
    require_no_input((model, dataset, test), output, sheet)
    require_sheet(sheet)
    source = open_dataset(dataset)
    train = embed_images("embedding the dataset", model, dataset, inference)
    tested = embed_images("embedding the test set", model, test, inference)
    report = find_overlap(train.embedding, train.label, tested.embedding, precision=precision)
    if output is not None:
        if report.separation.useless:
            raise UsageError(f"{dataset}: {report.separation.sentence()}; nothing is written to {output}")
        write_text(output, "".join(f"{one.identity}\n" for one in report.overlapping))
    titles = [
        f"{number}. {identity_title(source, one.identity)}, {train.name[one.image]} | {tested.name[one.test_image]}, "
        f"cosine {one.similarity:.3f}"
        for number, one in enumerate(report.overlapping, 1)
    ]
    if sheet is not None:
        left, right = read_input(dataset)[0], read_input(test)[0]
        pairs = [[left[one.image], right[one.test_image]] for one in report.overlapping]
        write_encoded_sheet(list(zip(titles, pairs, strict=True)), sheet)
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
    for title in titles[:_PRINTED_IDENTITIES]:
        echo_line(f"  {title}")


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
