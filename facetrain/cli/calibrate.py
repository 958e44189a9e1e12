"""Command `facetrain calibrate`: thresholds for chosen false match rates, stored in the model file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.option_groups import option_groups
from facetrain.cli.options import DataDir, Float32InferenceOptions, Json, local_file, local_set
from facetrain.cli.outputs import echo_line, leave_to_first_rank, require_existing, require_writable
from facetrain.files import require_utf_8
from facetrain.own_parts import allow_option
from facetrain.text import count_text, percent, shell_path

if TYPE_CHECKING:
    from facetrain.verify.calibration import Threshold


@option_groups
def calibrate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=local_file,
            help="Model to calibrate: a run folder, a .safetensors file or an .onnx file; with --output also a "
            "checkpoint or a .pt file. The thresholds of an MXNet network are only printed.",
        ),
    ],
    inference: Float32InferenceOptions,
    target: Annotated[
        str,
        typer.Option(
            "--people",
            "--target",
            metavar="DATASET|SET",
            parser=local_set,
            help="Known people: a dataset, or a .bin set with a table of subjects; a path, or the name of a set in the "
            "folder --data-dir.",
        ),
    ],
    fmr: Annotated[
        list[float] | None,
        typer.Option(
            metavar="RATE",
            min=1e-9,
            max=0.5,
            help="False match rate to find a threshold for, from 0 to 0.5. Repeat the option for several. The default "
            "is 1e-3, 1e-4, 1e-5 and 1e-6, as far as the data reaches.",
        ),
    ] = None,
    data_dir: DataDir = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the model with its thresholds: .safetensors, or .onnx for an .onnx file. The default "
            "replaces the file of MODEL, which may not be a download.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the bootstrap, and of the people drawn from a large dataset.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Store the thresholds of false match rates in a model file.

    They are measured on the photos of known people.
    """
    # What needs no torch is checked before its import, which takes seconds.
    if output is not None:
        require_utf_8(output)
    require_writable(output)
    require_existing(model)
    from facetrain.cli.progress_bar import progress_bar
    from facetrain.config.paths import eval_dir_of_run
    from facetrain.verify.calibrate_model import calibrate_model

    with progress_bar("embedding") as progress:
        path, thresholds = calibrate_model(
            model,
            target,
            data_dir or eval_dir_of_run(model),
            fmrs=tuple(fmr or ()),
            output=output,
            seed=seed,
            inference=inference,
            progress=progress,
        )
    leave_to_first_rank()
    if as_json:
        content = {"model": path and str(path), "thresholds": [asdict(threshold) for threshold in thresholds]}
        typer.echo(json.dumps(content, indent=1))
        return
    _print(path, model, thresholds)


def _print(path: Path | None, model: Path, thresholds: Sequence[Threshold]) -> None:
    from facetrain.models.read_model import names_code
    from facetrain.verify.metrics.roc import few_errors
    from facetrain.verify.output.formatting import format_few_subjects

    first = thresholds[0]
    measured = f"{first.impostors:,} impostor pairs of {count_text(first.subjects, 'person', 'people')} in {first.data}"
    place = "" if path else ", not stored: MXNet files have no place for them"
    echo_line(f"{path or model}: thresholds from {measured}{place}")
    echo_line("  for the sum of the embeddings of an image and of its mirror image")
    if warning := format_few_subjects(first.subjects):
        echo_line(f"  {warning}")
    for each in thresholds:
        low, high = each.fmr_interval
        line = (
            f"  FMR {each.fmr:g}  cosine >= {each.cosine:z.4f}  FMR of other people [{low:.2g}, {high:.2g}]"
        )
        if each.fnmr is not None and each.fnmr_interval is not None:
            line += f"  FNMR {percent(each.fnmr)} [{percent(each.fnmr_interval[0])}, {percent(each.fnmr_interval[1])}]"
        assert each.false_accepts is not None, "only a stored threshold may lack it"
        echo_line(f"{line}  {few_errors(each.false_accepts, 'false accept')}".rstrip())
    if path:
        echo_line(f"next: facetrain compare {shell_path(path)} A.jpg B.jpg{allow_option(names_code(path))}")
