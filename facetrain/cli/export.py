"""`facetrain export`: write a network to a file for another program."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from facetrain.cli.export_options import FileOptions, Format, Images, Outputs, Sets
from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import Model
from facetrain.cli.outputs import echo_line, require_existing, require_no_input, require_writable, write_text
from facetrain.errors import UsageError
from facetrain.files import require_utf_8
from facetrain.models.export.formats import FORMATS, ExportFormat, ExportOptions
from facetrain.remote.publish import push, require_accepted
from facetrain.text import shell_path

if TYPE_CHECKING:
    from torch import Tensor

    from facetrain.models.embedding_model import EmbeddingModel
    from facetrain.models.export.formats import Exported

_USUAL_COSINE = 0.98
_NUM_COMPARED, _NUM_QUANTIZED = 100, 256
"""Largest number of images to take for a comparison, and for a quantization."""


@option_groups
def export(
    model: Model,
    outputs: Outputs,
    file: FileOptions,
    sets: Sets,
    format: Format = None,
    images: Images = None,
) -> None:
    """Write a model to a file that another program runs.

    A file that gives other embeddings than the model is not written.
    """
    if sets.target and outputs.model_card is None and outputs.push is None:
        raise UsageError(
            "--target: the results go into the model card; give --model-card FILE or --push NAME"
        )
    if sets.data_dir is not None and not sets.target:
        raise UsageError(
            f"--data-dir {sets.data_dir}: has the sets of --target; give it, or remove --data-dir"
        )
    if outputs.license is not None and outputs.model_card is None and outputs.push is None:
        raise UsageError("--license: the terms go into the model card; give --model-card FILE or --push NAME")
    if outputs.private and outputs.push is None:
        raise UsageError("--private is for the repository of --push NAME; give it, or remove --private")
    output = outputs.output
    format = _format_of(format, output)
    row = FORMATS[format]
    _check_options(format, row, file, images)
    require_utf_8(output)
    require_writable(*row.files(output), outputs.model_card)
    require_no_input((model, images), *row.files(output), outputs.model_card)
    require_existing(model, images)
    _require_no_foreign_file(*row.files(output))
    if outputs.push is not None:
        if outputs.license is None:
            raise UsageError(f"--push {outputs.push}: give the terms of the model with --license NAME")
        require_accepted(outputs.push, outputs.license)
    import torch

    from facetrain.cli.progress_bar import progress_bar
    from facetrain.config.paths import eval_dir_of_run
    from facetrain.models.embedding_model import open_model
    from facetrain.models.export.export import export as export_model
    from facetrain.models.export.export import require_exportable
    from facetrain.models.model_file import THRESHOLDS_KEY
    from facetrain.verify.sets.open_sets import open_sets

    row.load()  # a missing package is reported before the network is opened
    opened = open_model(model, torch.device("cpu"))
    require_exportable(opened, format)  # before the evaluation, which can take minutes
    data_dir = sets.data_dir or eval_dir_of_run(model)
    # Before the export: a set that cannot be read then leaves no file.
    if file.int8:  # the results are those of the file
        open_sets(sets.target or (), data_dir)
    results = {} if file.int8 else _evaluate(opened, sets.target, data_dir)
    if not row.stores_weights:
        file = replace(file, images=_read_images(images, file, opened.image_size))
    echo_line(f"writing {output}", err=True)  # which takes a minute for a large network
    with progress_bar("comparing") as progress:
        exported = export_model(opened, format, output, file, progress=progress)
    report = _report(opened, exported, file)
    if file.int8:
        results = _evaluate(output, sets.target, data_dir)
        if THRESHOLDS_KEY in opened.metadata:
            report["left_out"] = [THRESHOLDS_KEY]
    card = partial(_card, opened, output.name, results, file, report, outputs.license)
    if outputs.model_card:
        write_text(outputs.model_card, card())
    if outputs.push and outputs.license:
        report["pushed"] = push(
            outputs.push, exported.files, card(), license=outputs.license, private=outputs.private
        )
    if outputs.as_json:
        typer.echo(json.dumps(report))
        return
    for line in _format_report(report, is_int8=file.int8):
        echo_line(line)


def _format_of(format: str | None, output: Path) -> str:
    """Return the format of a file, which its suffix says.

    Raises:
        UsageError: the suffix is of no format, or of another one than the given.
    """
    found = next((name for name, row in FORMATS.items() if row.suffix == output.suffix), None)
    if found is None or format not in (None, found):
        suffixes = ", ".join(
            f"{row.suffix} for {name}" for name, row in FORMATS.items() if format in (None, name)
        )
        raise UsageError(f"--output {output}: give a name that ends with {suffixes}")
    return found


def _require_no_foreign_file(output: Path, *others: Path) -> None:
    """Check that the other files of an export, which the user has not named, replace only those of an earlier export.

    Raises:
        UsageError: there is such a file without the first one.
    """
    for other in others:
        if other.exists() and not output.exists():
            raise UsageError(
                f"--output {output}: would also replace {other}, which is no part of an earlier export; choose another "
                "name, or remove that file"
            )


def _check_options(format: str, row: ExportFormat, file: ExportOptions, images: Path | None) -> None:
    """Refuse options that the format does not support, and options that exclude each other.

    Raises:
        UsageError: there are such options.
    """
    given = {
        field.name: f"--{field.name.replace('_', '-')}" for field in fields(file) if getattr(file, field.name)
    }
    for option in sorted(given.keys() - row.options):
        supported = " or ".join(name for name, other in FORMATS.items() if option in other.options)
        raise UsageError(f"--format {format} has no option {given[option]}; use --format {supported} with it")
    if images is not None and row.stores_weights:
        raise UsageError(f"--format {format} has no option --images; the file has the weights themselves")
    if file.int8 and given.keys() != {"int8"}:
        others = ", ".join(sorted(set(given.values()) - {"--int8"}))
        raise UsageError(f"--int8 cannot be combined with {others}; remove one of them")


def _read_images(images: Path | None, file: ExportOptions, size: int) -> Tensor | None:
    """Return evenly spaced faces of an input, uint8 (N, size, size, 3); drawn ones, or None with `int8`, without it.

    Raises:
        UsageError: the input has no images.
    """
    from facetrain.data.dataset import evenly_spread
    from facetrain.embeddings.image_inputs import image_location, read_input
    from facetrain.models.export.example_inputs import decode_faces, drawn_faces

    if images is None:
        return None if file.int8 else drawn_faces(size)
    encoded = read_input(images).images
    if not len(encoded):
        raise UsageError(f"--images {images}: has no images; give another input or leave it out")
    numbers = evenly_spread(len(encoded), _NUM_QUANTIZED if file.int8 else _NUM_COMPARED)
    return decode_faces([(image_location(encoded, n, str(images)), encoded[n]) for n in numbers], size)


def _evaluate(model: Path | EmbeddingModel, target: list[str] | None, data_dir: Path) -> dict[str, Any]:
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.embeddings.inference import Inference
    from facetrain.verify.evaluate import evaluate

    if not target:
        return {}
    with progress_bar("embedding") as progress:
        evaluation = evaluate(model, target, data_dir, inference=Inference("cpu"), progress=progress)
    return {name: result.as_json() for name, result in evaluation.results.items()}


def _report(opened: EmbeddingModel, exported: Exported, options: ExportOptions) -> dict[str, Any]:
    first, *second = map(str, exported.files)
    return {
        "output": first,
        **({"weights": second[0]} if second else {}),
        "description": opened.description,
        "input": _input_of(opened, options),
        "bytes": sum(file.stat().st_size for file in exported.files),
        **({} if exported.comparison is None else asdict(exported.comparison)),
    }


def _input_of(opened: EmbeddingModel, options: ExportOptions) -> str:
    """Return what the exported file takes, as text."""
    size, batch = opened.image_size, options.batch or "N"
    pixels = "pixels from 0 to 255; it normalizes them itself"
    if options.from_pixels:
        image = f"uint8 ({batch}, {size}, {size}, 3), RGB, {pixels}"
    else:
        mean, scale = (opened.preprocessing[key] for key in ("mean", "scale"))
        normalized = f"(pixels − {mean}) / {scale}" if mean else f"pixels / {scale}"
        given = pixels if scale == 1 else normalized
        image = f"float32 ({batch}, 3, {size}, {size}), RGB, {given}"
    return image + (
        f"; landmarks, float32 ({batch}, 5, 2), as fractions of the sides" if opened.takes_landmarks else ""
    )


def _card(
    opened: EmbeddingModel,
    name: str,
    results: dict[str, Any],
    options: ExportOptions,
    report: dict[str, Any],
    license: str | None,
) -> str:
    from facetrain.models.model_card import model_card

    file = {
        "input of the file": report["input"],
        "embeddings": "of length 1" if options.unit else "of any length; the cosine similarity divides by it",
        "size": _size(report),
    }
    if "difference" in report:
        file["difference from the network"] = _difference(report)
    return model_card(opened, name, results=results, file=file, license=license)


def _format_report(report: dict[str, Any], *, is_int8: bool) -> list[str]:
    is_compared = "difference" in report
    difference = f"; the file differs by {_difference(report)}" if is_compared and not is_int8 else ""
    lines = [
        f"{report['output']}: {report['description']}{difference}",
        f"input: {report['input']}",
        _size(report),
    ]
    if "weights" in report:
        lines.append(f"{report['weights']} has the weights; keep it in the folder of {report['output']}.")
    if is_int8:
        cosine = report["cosine"]
        lines.append(
            f"cosine with the embeddings of the model: {cosine['mean']:.4f} on average, "
            f"{cosine['lowest']:.4f} at least, on {cosine['images']} images"
        )
    if "pushed" in report:
        lines.append(f"pushed with its model card: {report['pushed']}")
    if "left_out" in report:
        lines.append(
            "The file has no thresholds: those of the model were measured in float32, and the file gives other "
            f"cosines; measure its own with facetrain calibrate {shell_path(report['output'])} --people DATASET."
        )
    if is_int8 and cosine["mean"] < _USUAL_COSINE:
        lines.append(
            "The file loses more than usual; give some hundred images like those that the network will get with "
            "--images, or keep float32 without --int8."
        )
    return lines


def _difference(report: dict[str, Any]) -> str:
    return (
        f"at most {report['difference']:.1e} of an embedding's size (smallest cosine {report['cosine']['lowest']:.6f}, "
        f"{report['cosine']['images']} images)"
    )


def _size(report: dict[str, Any]) -> str:
    return f"{report['bytes'] / 1e6:.2f} MB"
