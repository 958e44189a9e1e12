"""`facetrain config …`: list, show, describe and convert configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.options import Set
from facetrain.errors import UsageError
from facetrain.text import shell_path, table_text

app = typer.Typer(
    rich_markup_mode=None,
    help="List, show, describe and convert configs.",
    no_args_is_help=True,
)


@app.command("list")
def list_() -> None:
    """List the configs that come with facetrain."""
    from facetrain.config.loading import load_config
    from facetrain.config.presets import presets
    from facetrain.data.published_datasets import published_entry
    from facetrain.remote.catalog import nearest_available
    from facetrain.run.parts.step_schedule import global_batch_size

    rows = [("name", "dataset", "backbone", "GPUs", "images per step", "published")]
    withdrawn = {}
    for preset in presets():
        config = load_config(preset.path)
        entry = published_entry(config.data.num_classes, config.data.num_images)
        # A preset for any number of GPUs is shown with the batch of one.
        gpus = preset.gpus or 1
        images = global_batch_size(config, gpus)
        # Its folder below data/: a dataset in a folder of its own has a name such as `record`.
        dataset = Path(config.data.train).parts[1]
        if entry and entry.is_withdrawn:
            withdrawn[dataset] = entry
            dataset += "*"
        network, processes = config.model.backbone, str(preset.gpus or "any")
        rows.append((preset.name, dataset, network, processes, f"{images:,}", preset.published))
    typer.echo(table_text(rows))
    typer.echo("\n* withdrawn or out of reach, with the nearest dataset that can be had:")
    for dataset, entry in withdrawn.items():
        nearest = nearest_available(entry)
        advice = f"; facetrain get {nearest.name}" if nearest else ""
        typer.echo(f"  {dataset}: {entry.state}{advice}")
    typer.echo("\nTo train one of them: facetrain train --preset NAME --data FOLDER")


@app.command()
def show(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="Config: a YAML file, or the name of a preset.")
    ],
    set_: Set = None,
) -> None:
    """Print all keys with their values."""
    from facetrain.config.loading import dump_config, load_config

    typer.echo(dump_config(load_config(config, set_ or ())), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of a config file."""
    from facetrain.config.schema import file_schema

    typer.echo(json.dumps(file_schema(), indent=1, ensure_ascii=False))


@app.command()
def convert(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG", help="Config of arcface_torch, a Python file. It is parsed, not executed."
        ),
    ],
) -> None:
    """Convert a config of arcface_torch, and print the result as YAML."""
    from facetrain.config.arcface_torch import convert as converted

    if config.suffix in (".yaml", ".yml"):
        raise UsageError(
            f"{config}: is YAML, and only Python files of arcface_torch are converted; if it is a config of facetrain, "
            f"use it as it is: facetrain train --config {shell_path(config)}"
        )
    typer.echo(converted(config), nl=False)
