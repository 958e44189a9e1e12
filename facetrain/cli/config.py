"""`facetrain config …`: see, describe and convert run descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="See what a config says, which keys there are, and convert arcface_torch's.", no_args_is_help=True
)


@app.command()
def show(
    config: Annotated[Path, typer.Argument(help="Run description, YAML.")],
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value.")
    ] = None,
) -> None:
    """Print every key with its value, after the recipe, `extends` and --set."""
    from facetrain.config.loading import dump_config, load_config

    typer.echo(dump_config(load_config(config, set_ or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of run descriptions, with what each key means."""
    from facetrain.config.schema import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=1, ensure_ascii=False))


@app.command()
def convert(
    config: Annotated[Path, typer.Argument(help="A config of arcface_torch, Python; it is read, never run.")],
) -> None:
    """Print one of arcface_torch's configs as a run description."""
    from facetrain.config.arcface_torch import convert as converted

    typer.echo(converted(config), nl=False)
