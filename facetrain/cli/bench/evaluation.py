"""`facetrain bench embed`, `verification` and `clean`: embeddings, and what is computed from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from facetrain.cli.bench.options import Json, Rounds, Variants, print_report, require_known
from facetrain.cpu_cores import usable_cores


def embed(
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="NAME|FILE",
            help="Backbone (r18, r50, mbf, …), which gets random weights, or model file. May be repeated. The "
            "default is r18, r50 and mbf.",
        ),
    ] = None,
    variants: Variants = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per forward pass.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in which the variants take turns.")] = 10,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default the number of usable cores.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the embedding of images on the CPU, beside onnxruntime with the same weights where it is installed.

    Prints images per second in the fastest round, and the ratio to onnxruntime.
    """
    from facetrain.bench.embedding import VARIANTS, measure_embedding

    require_known("--variant", variants or (), VARIANTS)
    reports = [
        measure_embedding(
            name,
            batch_size=batch_size,
            rounds=rounds,
            threads=threads or usable_cores(),
            variants=variants or VARIANTS,
        )
        for name in model or ("r18", "r50", "mbf")
    ]
    if as_json:
        typer.echo(json.dumps(reports, indent=1))
        return
    for report in reports:
        print_report(report, as_json=False)


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


def search(
    entries: Annotated[int, typer.Option(min=1, help="Embeddings of the generated gallery.")] = 1_000_000,
    size: Annotated[int, typer.Option(min=2, help="Numbers of an embedding.")] = 512,
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="Type of the numbers in the gallery's file.")
    ] = "float16",
    probes: Annotated[int, typer.Option(min=1, help="Number of probes.")] = 1000,
    clustered: Annotated[
        bool, typer.Option(help="Eight images of each person, instead of independent random directions.")
    ] = True,
    faces: Annotated[
        Path | None,
        typer.Option(
            help="Embeddings of real faces with labels (.npz, .parquet): the generated gallery gets their mean and "
            "covariances, and their size instead of --size."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="NAME",
            help="Measure this method of `facetrain search --index`; may be repeated. The default is all.",
        ),
    ] = None,
    nlist: Annotated[
        int | None, typer.Option(min=1, help="Lists of the index; the default is that of `facetrain search`.")
    ] = None,
    nprobes: Annotated[
        list[int] | None,
        typer.Option("--nprobe", min=1, help="Lists per probe; may be repeated. The default is 1, 8 and 32."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the gallery and the index are written; the default is a temporary folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the rate, the peak memory and the recall of searches in a generated gallery.

    Each method runs in a process of its own. Rates are per second of CPU time; OMP_NUM_THREADS=1 measures one core.
    """
    from facetrain.bench.search import METHODS, measure_search

    require_known("--method", methods or (), METHODS)
    report = measure_search(
        entries=entries,
        size=size,
        dtype=dtype,
        probes=probes,
        clustered=clustered,
        faces=faces,
        methods=methods or METHODS,
        nlist=nlist,
        nprobes=nprobes or (1, 8, 32),
        folder=folder,
    )
    print_report(report, as_json=as_json)
