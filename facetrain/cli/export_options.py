"""Options of `facetrain export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from facetrain.models.export.formats import FORMATS


class Int8(StrEnum):
    """Kinds of quantization to 8 bits."""

    dynamic = "dynamic"
    static = "static"


def _parse_format(name: str) -> str:
    if name not in FORMATS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(FORMATS)}.")
    return name


def _formats_with(option: str) -> str:
    """Return the formats that support a field of `ExportOptions`, for a help text."""
    return ", ".join(name for name, row in FORMATS.items() if option in row.options)


Format = Annotated[
    str, typer.Option(parser=_parse_format, metavar=f"[{'|'.join(FORMATS)}]", help="Format of the file.")
]
Output = Annotated[
    Path,
    typer.Option(
        help="File to write."
        + "".join(
            f" {name}: {' and '.join(map(str, row.files(Path(f'FILE{row.suffix}'))))}."
            for name, row in FORMATS.items()
            if row.second_suffix
        )
    ),
]
FromPixels = Annotated[
    bool,
    typer.Option(
        help=f"{_formats_with('from_pixels')}: take uint8 RGB images (N, H, W, 3) and normalize them inside the "
        "network; by default the input is float32 (N, 3, H, W)."
    ),
]
Unit = Annotated[
    bool,
    typer.Option(help=f"{_formats_with('unit')}: divide the embeddings by their length; off by default."),
]
Opset = Annotated[
    int | None,
    typer.Option(min=18, help="onnx: version of ONNX's operators; by default the one that torch prefers."),
]
Batch = Annotated[
    int | None,
    typer.Option(
        min=1,
        help=f"{_formats_with('batch')}: fixed number of images per call; by default any number, in tflite and "
        "executorch 1.",
    ),
]
Quantization = Annotated[
    Int8 | None,
    typer.Option(
        help="onnx: quantize to 8 bits. static: convolutions and linear layers, weights and activations; dynamic: "
        "linear layers only. Off by default."
    ),
]
Calibrate = Annotated[
    Path | None,
    typer.Option(
        metavar="INPUT",
        help="Images from which --int8 finds the ranges of activations, and on which it compares the file with the "
        "model: a folder, a .rec or a .bin; by default 256 drawn faces.",
    ),
]
CalibrateImages = Annotated[
    int, typer.Option(min=1, help="Number of images to take from --calibrate, evenly spaced.")
]
Compare = Annotated[
    Path | None,
    typer.Option(
        metavar="INPUT",
        help="Up to 100 aligned faces on which the file is compared with the network, evenly spaced: a folder, a "
        ".rec or a .bin; by default 20 drawn faces.",
    ),
]
Average = Annotated[
    bool,
    typer.Option(
        "--ema", help="Take the moving average of the weights (optim.ema) of a run folder or a checkpoint."
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SET",
        help="Verification set on which both the model and the file are evaluated; may be repeated.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(help="Folder of the verification sets; by default the one in the config of the run."),
]
ModelCard = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a model card, in Markdown.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
