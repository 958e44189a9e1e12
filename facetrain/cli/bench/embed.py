"""`facetrain bench embed`: embedding images on the CPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from facetrain.cli.bench.options import Json, Variants, print_report, require_known
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
