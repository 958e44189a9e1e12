"""`facetrain export`: write a network to a file for another program."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from facetrain.cli.evaluation_options import Model
from facetrain.cli.outputs import echo_line, require_writable, write_text
from facetrain.models.export.formats import FORMATS, ExportOptions

if TYPE_CHECKING:
    from facetrain.models.model_file import EmbeddingModel

_USUAL_COSINE = 0.98
_USUAL_LOSS = 0.003
"""Loss of accuracy (3 in 1,000 pairs) that is not worth advice."""
_ADVICE = (
    "give some hundred images like those that the network will get with --calibrate, "
    "or keep float32 without --int8"
)


class Int8(StrEnum):
    """Kinds of quantization to 8 bits."""

    dynamic = "dynamic"
    static = "static"


def _parse_format(name: str) -> str:
    if name not in FORMATS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(FORMATS)}.")
    return name


def export(
    model: Model,
    format: Annotated[
        str,
        typer.Option(parser=_parse_format, metavar=f"[{'|'.join(FORMATS)}]", help="Format of the file."),
    ],
    output: Annotated[Path, typer.Option(help="File to write.")],
    from_pixels: Annotated[
        bool,
        typer.Option(
            help="onnx: take uint8 RGB images (N, H, W, 3) and normalize them inside the network; "
            "by default the input is float32 (N, 3, H, W)."
        ),
    ] = False,
    unit: Annotated[
        bool, typer.Option(help="onnx: divide the embeddings by their length; off by default.")
    ] = False,
    int8: Annotated[
        Int8 | None,
        typer.Option(
            help="onnx: quantize to 8 bits. static: convolutions and linear layers, weights and activations; dynamic: "
            "linear layers only. Off by default."
        ),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="INPUT",
            help="Images from which --int8 finds the ranges of activations, and on which it compares the file with the "
            "model: a folder, a .rec or a .bin; by default 256 drawn faces.",
        ),
    ] = None,
    calibrate_images: Annotated[
        int, typer.Option(min=1, help="Number of images to take from --calibrate, evenly spaced.")
    ] = 256,
    average: Annotated[
        bool,
        typer.Option(
            "--ema",
            help="Take the moving average of the weights (optim.ema) of a run folder or a checkpoint.",
        ),
    ] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="Verification set on which both the model and the file are evaluated; may be repeated.",
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of the verification sets; by default the one in the config of the run."),
    ] = None,
    model_card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a model card, in Markdown.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")
    ] = False,
) -> None:
    """Write a model to a file for another program; a file that gives other embeddings is not written."""
    import torch

    from facetrain.config.loading import eval_dir_of_run
    from facetrain.models.model_file import open_model

    _check_options(format, int8, calibrate, from_pixels=from_pixels, unit=unit)
    require_writable(output, model_card)
    exporter = FORMATS[format].load()
    opened = open_model(model, torch.device("cpu"), average=average)
    sets = data_dir or eval_dir_of_run(model)
    results = _evaluate(opened, target, sets)
    images = [] if calibrate is None else _read_evenly(calibrate, calibrate_images)
    options = ExportOptions(from_pixels=from_pixels, unit=unit, int8=int8, calibration=images)
    exported = exporter(opened, output, options)
    report: dict[str, Any] = {"output": str(output), "description": opened.description}
    if exported.difference is not None:
        report["difference"] = exported.difference
    if exported.similarity is not None:
        report["cosine"] = asdict(exported.similarity)
    if results and exported.model is not None:
        model_results, results = results, _evaluate(exported.model, target, sets)
        report["accuracy"] = _compare_accuracy(model_results, results)
    if model_card:
        # With the results of the file: quantization changes them.
        _write_card(model_card, opened, output.name, results)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for line in _format_report(report):
        echo_line(line)


def _check_options(
    format: str, int8: Int8 | None, calibrate: Path | None, *, from_pixels: bool, unit: bool
) -> None:
    """Refuse options that the format does not support, and options that exclude each other.

    Raises:
        UsageError: there are such options.
    """
    from facetrain.errors import UsageError

    given = {"from_pixels": from_pixels, "unit": unit, "int8": int8, "calibration": calibrate}
    flags = {"from_pixels": "--from-pixels", "unit": "--unit", "int8": "--int8", "calibration": "--calibrate"}
    for option, value in given.items():
        if value and option not in FORMATS[format].options:
            supported = " or ".join(name for name, row in FORMATS.items() if option in row.options)
            raise UsageError(
                f"--format {format} has no option {flags[option]}; use --format {supported} with it"
            )
    if int8 and (from_pixels or unit):
        raise UsageError("--int8 cannot be combined with --from-pixels and --unit; remove one of them")
    if int8 is None and calibrate is not None:
        raise UsageError("--calibrate is used by --int8 only; add it or remove --calibrate")


def _read_evenly(input: Path, count: int) -> list[bytes]:
    """Return up to `count` encoded images of an input, evenly spaced."""
    from facetrain.verify.image_embeddings import read_input

    images, _, _ = read_input(input)
    step = max(len(images) / count, 1)
    return [images[int(n * step)] for n in range(min(count, len(images)))]


def _evaluate(model: Path | EmbeddingModel, target: list[str] | None, data_dir: Path) -> dict[str, Any]:
    from facetrain.verify.evaluate import evaluate

    if not target:
        return {}
    evaluation = evaluate(model, target, data_dir, device="cpu")
    return {name: result.as_json() for name, result in evaluation.results.items()}


def _compare_accuracy(model: dict[str, Any], file: dict[str, Any]) -> dict[str, dict[str, float]]:
    return {
        name: {"model": result["accuracy"], "file": file[name]["accuracy"]}
        for name, result in model.items()
        if "accuracy" in result
    }


def _write_card(path: Path, opened: EmbeddingModel, name: str, results: dict[str, Any]) -> None:
    from facetrain.models.model_card import model_card

    write_text(path, model_card(opened, name, results=results))


def _format_report(report: dict[str, Any]) -> list[str]:
    difference = ""
    if "difference" in report:
        difference = f"; the file differs by at most {report['difference']:.1e} of an embedding's size"
    lines = [f"{report['output']}: {report['description']}{difference}"]
    if "cosine" in report:
        cosine = report["cosine"]
        lines.append(
            f"cosine with the embeddings of the model: {cosine['mean']:.4f} on average, "
            f"{cosine['lowest']:.4f} at least, on {cosine['images']} images"
        )
    for name, accuracy in report.get("accuracy", {}).items():
        change = accuracy["file"] - accuracy["model"]
        lines.append(
            f"{name}: accuracy of the file {accuracy['file']:.3%}, of the model {accuracy['model']:.3%} ({change:+.3%})"
        )
    if _lost_much(report):
        lines.append(f"The file loses more than usual; {_ADVICE}.")
    return lines


def _lost_much(report: dict[str, Any]) -> bool:
    """Return whether a quantized file is worse than those of facetrain's backbones usually are."""
    if "cosine" not in report:
        return False
    losses = [accuracy["model"] - accuracy["file"] for accuracy in report.get("accuracy", {}).values()]
    return report["cosine"]["mean"] < _USUAL_COSINE or any(loss > _USUAL_LOSS for loss in losses)
