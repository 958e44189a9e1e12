"""`facetrain bench verification` and `clean`: what is computed from embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.bench.options import Json, Rounds, print_report, require_known


def verification(
    part: Annotated[
        str,
        typer.Argument(
            metavar="folds|templates|intervals|pair-list",
            help="folds: accuracy over 10 folds; templates: metrics of IJB-C's size; intervals: the same with "
            "bootstrap intervals; pair-list: reading 15.7 million pairs.",
        ),
    ],
    pairs: Annotated[int, typer.Option(min=600, help="Pairs of `folds`.")] = 6000,
    rounds: Rounds = 5,
    replicates: Annotated[int, typer.Option(min=1, help="Bootstrap samples of `intervals`.")] = 100,
    as_json: Json = False,
) -> None:
    """Measure the metrics of verification; `folds` also beside the published loop over all thresholds.

    Prints seconds, for `folds` the median of the rounds. The embeddings are random, because the time does not depend on
    their values.
    """
    from facetrain.bench.verification import PARTS, measure_verification

    require_known("PART", [part], PARTS)
    report = measure_verification(part, pairs=pairs, rounds=rounds, replicates=replicates)
    print_report(report, as_json=as_json)


def clean(
    model: Annotated[Path, typer.Argument(help="Model that embeds the images.")],
    dataset: Annotated[Path, typer.Argument(help="Dataset with correct labels.")],
    wrong: Annotated[int, typer.Option(min=0, help="Images to put under another person's name.")] = 60,
    people: Annotated[int, typer.Option(min=0, help="People to split, and pairs of people to merge.")] = 15,
    seeds: Annotated[int, typer.Option(min=1, help="Number of repetitions with other label errors.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure how many planted label errors `facetrain data clean` finds.

    Prints the faults of the dataset as it is, then one report per repetition. The dataset is not changed: the errors
    are planted in a copy of its labels.
    """
    from facetrain.bench.label_cleaning import measure_label_cleaning

    reports = measure_label_cleaning(model, dataset, wrong=wrong, people=people, seeds=seeds)
    if as_json:
        typer.echo(json.dumps(list(reports), indent=1))
        return
    for report in reports:
        print_report(report, as_json=False)
