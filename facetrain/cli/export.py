"""`facetrain export`: a model in one file, for elsewhere."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.evaluate import Model


class Format(StrEnum):
    """Formats that a model can be written in."""

    safetensors = "safetensors"
    onnx = "onnx"
    torch_export = "torch_export"


def export(
    model: Model,
    format: Annotated[Format, typer.Option(help="Of the file.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    from_pixels: Annotated[
        bool, typer.Option(help="ONNX: take uint8 RGB pictures (N, H, W, 3) and normalise inside.")
    ] = False,
    unit: Annotated[bool, typer.Option(help="ONNX: give embeddings of length 1.")] = False,
) -> None:
    """Write a model for use elsewhere; ONNX is compared with the network before the file appears."""
    import torch

    from facetrain.checkpoint.model_file import open_model, save_model
    from facetrain.checkpoint.onnx_file import OnnxNetwork
    from facetrain.errors import ModelError

    opened = open_model(model, torch.device("cpu"))
    if format is Format.onnx:
        from facetrain.export.onnx import export_onnx

        difference = export_onnx(opened, output, from_pixels=from_pixels, unit=unit)
        typer.echo(
            f"{output}: {opened.description}; onnxruntime differs by at most {difference:.1e} of an embedding's size"
        )
    elif format is Format.torch_export:
        from facetrain.export.torch_export import export_program

        export_program(opened, output)
        typer.echo(f"{output}: {opened.description}")
    elif "backbone" not in opened.notes or isinstance(opened.network, OnnxNetwork):
        raise ModelError(
            f"{model}: is a graph, which .safetensors cannot hold; export to onnx or torch_export"
        )
    else:
        save_model(output, opened.network.state_dict(), opened.notes)
        typer.echo(f"{output}: {opened.description}")
