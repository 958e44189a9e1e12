"""`facetrain data …`: what a dataset's owner does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Make, look at and change datasets.", no_args_is_help=True)
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]


@app.command()
def synth(
    output: Annotated[Path, typer.Option(help="Folder to draw into; it must not be there yet.")],
    identities: Annotated[int, typer.Option(min=1, help="People to train on.")] = 400,
    images_per_identity: Annotated[int, typer.Option(min=1, help="Pictures of each.")] = 20,
    eval_identities: Annotated[
        int, typer.Option(min=2, help="Further people, for verification alone.")
    ] = 100,
    eval_pairs: Annotated[int, typer.Option(min=20, help="Pairs in synth.bin, a multiple of 20.")] = 1000,
    image_size: Annotated[int, typer.Option(min=16, help="Pixels a side.")] = 112,
    seed: Annotated[int, typer.Option(help="Another seed draws other people.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; by default one per core.")] = None,
    as_json: Json = False,
) -> None:
    """Draw people who do not exist: a training set, and verification pairs of people it does not have."""
    from facetrain.cli.progress import progress_bar
    from facetrain.data.synthetic import write_dataset

    with progress_bar("drawing people") as progress:
        drawn = write_dataset(
            output,
            identities=identities,
            images_per_identity=images_per_identity,
            eval_identities=eval_identities,
            eval_pairs=eval_pairs,
            image_size=image_size,
            seed=seed,
            workers=workers,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(vars(drawn) | {"folder": str(drawn.folder)}))
    else:
        typer.echo(
            f"{drawn.folder}: {drawn.images:,} pictures of {drawn.identities:,} people, and {drawn.pairs:,} pairs of others"
        )
