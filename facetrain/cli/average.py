"""Command `facetrain average`: one model of several models of one network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.options import local_file
from facetrain.cli.outputs import echo_line, require_existing, require_no_input, require_writable
from facetrain.errors import UsageError
from facetrain.files import require_utf_8


def average(
    models: Annotated[
        list[Path],
        typer.Argument(
            metavar="MODEL MODEL…",
            parser=local_file,
            help="Models of one network. The first is a run, a checkpoint or a model file; the others may also be "
            "MXNet or ONNX files.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the new model, .safetensors.", show_default=False)
    ],
    weight: Annotated[
        list[float] | None,
        typer.Option(
            metavar="NUMBER",
            min=0,
            help="Weight of a model, once per model and in their order. The default weighs all equally.",
        ),
    ] = None,
) -> None:
    """Average the weights of models of one network.

    For example of a model and its fine-tuned version.
    """
    if len(models) < 2:
        raise UsageError(f"{models[0]}: an average needs at least two models")
    if output.suffix != ".safetensors":
        raise UsageError(f"{output}: a model file ends with .safetensors")
    require_utf_8(output)
    require_no_input(models, output)
    require_writable(output)
    require_existing(*models)
    from facetrain.models.average_models import average_models
    from facetrain.models.model_file import SOURCES_KEY

    description = average_models(models, weight or [1.0] * len(models), output)
    for model, source in zip(models, description[SOURCES_KEY], strict=True):
        echo_line(f"{source['weight']:.3f} × {model}")
    echo_line(f"{output}: written; evaluate it, because the average of unrelated models is useless")
