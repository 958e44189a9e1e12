"""Options of `facetrain export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.options import DataDir, Json, local_file, local_set
from facetrain.models.export.formats import FORMATS, ExportOptions


def _parse_format(name: str) -> str:
    if name not in FORMATS:
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(FORMATS)}.")
    return name


def _formats_with(option: str) -> str:
    """Return the formats that support a field of `ExportOptions`, for a help text."""
    return ", ".join(name for name, row in FORMATS.items() if option in row.options)


def _second_files() -> str:
    """Return the names of the formats that always have a second file, for a help text."""
    return "".join(
        f" {name}: {' and '.join(map(str, row.files(Path(f'FILE{row.suffix}'))))}."
        for name, row in FORMATS.items()
        if row.second_suffix
    )


Format = Annotated[
    str | None,
    typer.Option(
        parser=_parse_format,
        metavar=f"[{'|'.join(FORMATS)}]",
        help="Format of the file; by default the one of the suffix of --output.",
    ),
]
FileOptions = Annotated[
    ExportOptions,
    {
        "from_pixels": typer.Option(
            help=f"{_formats_with('from_pixels')}: take uint8 RGB images (N, H, W, 3) and normalize them inside the "
            "network; by default the input is float32 (N, 3, H, W)."
        ),
        "unit": typer.Option(
            help=f"{_formats_with('unit')}: divide the embeddings by their length; off by default."
        ),
        "batch": typer.Option(
            metavar="N",
            min=1,
            help=f"{_formats_with('batch')}: number of images that the file takes at a time, for programs that need a "
            "fixed one; by default any number.",
        ),
        "opset": typer.Option(
            metavar="N",
            min=11,
            help="onnx: version of the operators, for compilers that read no newer one; by default torch's own, 18 or "
            "newer.",
        ),
        "split_prelu": typer.Option(
            "--split-prelu",
            help="onnx: write PReLU(x) as max(x, 0) + a·min(x, 0): the same numbers; onnxruntime runs a "
            "MobileFaceNet up to 1.7 times as fast. Off by default, because compilers of other devices know PReLU.",
        ),
        "int8": typer.Option(
            "--int8",
            help="onnx: quantize weights and activations of convolutions and linear layers to 8 bits. Off by default.",
        ),
    },
]
Images = Annotated[
    Path | None,
    typer.Option(
        metavar="INPUT",
        parser=local_file,
        help="Aligned faces on which the file is compared with the model, and from which --int8 finds the ranges of "
        "activations, evenly spaced: a folder, a .rec or a .bin, of which at most 100 are used, and 256 with --int8; "
        "by default drawn faces.",
    ),
]


@dataclass(frozen=True)
class Sets:
    """Verification sets whose results the model card has."""

    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            parser=local_set,
            help="Verification set whose results the model card has; may be repeated.",
        ),
    ] = None
    data_dir: DataDir = None


@dataclass(frozen=True)
class Outputs:
    """Outputs of the command."""

    output: Annotated[Path, typer.Option(help="File to write." + _second_files())]
    model_card: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a model card, in Markdown.")
    ] = None
    push: Annotated[
        str | None,
        typer.Option(
            metavar="hf://ORG/NAME",
            help="Also upload the file with its model card to the Hugging Face Hub, into a new repository or an "
            "existing one. Needs --license.",
        ),
    ] = None
    license: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="License of the model for its card; for --push an identifier of the Hub, such as cc-by-nc-4.0, or "
            "other.",
        ),
    ] = None
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False
    as_json: Json = False
