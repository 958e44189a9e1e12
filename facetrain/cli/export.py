"""`facetrain export`: a model in one file, for elsewhere."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.evaluate import Model, data_dir_of
from facetrain.cli.outputs import require_writable, write_text

if TYPE_CHECKING:
    from facetrain.models.model_file import EmbeddingModel


class Format(StrEnum):
    """Formats that a model can be written in."""

    safetensors = "safetensors"
    onnx = "onnx"
    torch_export = "torch_export"


class Int8(StrEnum):
    """Ways to eight bits."""

    dynamic = "dynamic"
    static = "static"


def export(
    model: Model,
    format: Annotated[Format, typer.Option(help="Of the file.")],
    output: Annotated[Path, typer.Option(help="The file to write.")],
    from_pixels: Annotated[
        bool, typer.Option(help="ONNX: take uint8 RGB images (N, H, W, 3) and normalize inside.")
    ] = False,
    unit: Annotated[bool, typer.Option(help="ONNX: give embeddings of length 1.")] = False,
    int8: Annotated[
        Int8 | None, typer.Option(help="ONNX: weights in 8 bits; static: convolutions compute in them too.")
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(metavar="INPUT", help="static: faces to find ranges by; a folder, a .rec or a .bin."),
    ] = None,
    calibrate_images: Annotated[int, typer.Option(min=1, help="How many of them, evenly spread.")] = 256,
    target: Annotated[
        list[str] | None, typer.Option(help="Sets on which model and file are scored; may be repeated.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder of the sets; by default the one of the run.")
    ] = None,
    model_card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a model card too, Markdown.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Write a model for use elsewhere; the file is compared with the network before it appears."""
    import torch

    from facetrain.models.model_file import open_model

    _refuse_contradictions(format, int8, calibrate, from_pixels=from_pixels, unit=unit)
    require_writable(output, model_card)
    opened, sets = open_model(model, torch.device("cpu")), data_dir or data_dir_of(model)
    scored = _scored(opened, target, sets)
    found: dict[str, Any] = {"output": str(output), "description": opened.description}
    written: Path | EmbeddingModel = output
    if int8:
        from facetrain.models.export.int8 import export_int8

        faces = None if calibrate is None else _spread(calibrate, calibrate_images)
        export_int8(opened, output, calibration=faces)
    elif format is Format.onnx:
        from facetrain.models.export.onnx import export_onnx

        found["difference"] = export_onnx(opened, output, from_pixels=from_pixels, unit=unit)
    elif format is Format.torch_export:
        from facetrain.models.export.torch_export import export_program

        found["difference"], written = export_program(opened, output)
    else:
        _save(opened, model, output)
    if scored and format is not Format.safetensors:
        ours, scored = scored, _scored(written, target, sets)
        found["accuracy"] = _accuracies(ours, scored)
    if model_card:
        # Of the file that was written: in eight bits its numbers are not the model's.
        _write_card(model_card, opened, output.name, scored)
    typer.echo(json.dumps(found) if as_json else "\n".join(_lines(found)))


def _refuse_contradictions(
    format: Format, int8: Int8 | None, calibrate: Path | None, *, from_pixels: bool, unit: bool
) -> None:
    from facetrain.errors import UsageError

    if (from_pixels or unit) and format is not Format.onnx:
        raise UsageError("--from-pixels and --unit go with --format onnx")
    if int8 and (format is not Format.onnx or from_pixels or unit):
        raise UsageError("--int8 goes with --format onnx, without --from-pixels and --unit")
    if (int8 is Int8.static) != (calibrate is not None):
        raise UsageError("--int8 static needs the faces of --calibrate INPUT, and nothing else does")


def _save(opened: EmbeddingModel, model: Path, output: Path) -> None:
    from facetrain.errors import ModelError
    from facetrain.models.model_file import save_model
    from facetrain.models.onnx_network import OnnxNetwork

    if "backbone" not in opened.notes or isinstance(opened.network, OnnxNetwork):
        raise ModelError(
            f"{model}: is a graph, which .safetensors cannot hold; export to onnx or torch_export"
        )
    save_model(output, opened.network.state_dict(), opened.notes)


def _spread(input: Path, count: int) -> list[bytes]:
    from facetrain.verify.image_embeddings import read_input

    images, _, _ = read_input(input)
    step = max(len(images) / count, 1)
    return [images[int(n * step)] for n in range(min(count, len(images)))]


def _scored(model: Path | EmbeddingModel, target: list[str] | None, data_dir: Path) -> dict[str, Any]:
    from facetrain.verify.evaluate import evaluate

    if not target:
        return {}
    found = evaluate(model, target, data_dir, device="cpu")
    return {name: result.as_json() for name, result in found.results.items()}


def _accuracies(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {"model": found["accuracy"], "file": after[name]["accuracy"]}
        for name, found in before.items()
        if "accuracy" in found
    }


def _write_card(path: Path, opened: EmbeddingModel, name: str, scored: dict[str, Any]) -> None:
    from facetrain.models.model_card import model_card

    write_text(path, model_card(opened, name, results=scored))


def _lines(found: dict[str, Any]) -> list[str]:
    said = ""
    if "difference" in found:
        said = f"; the file differs by at most {found['difference']:.1e} of an embedding's size"
    lines = [f"{found['output']}: {found['description']}{said}"]
    for name, accuracy in found.get("accuracy", {}).items():
        change = accuracy["file"] - accuracy["model"]
        lines.append(
            f"{name}: accuracy {accuracy['file']:.3%}, of the model {accuracy['model']:.3%} ({change:+.3%})"
        )
    return lines
