"""Arguments and options that several commands share, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from facetrain.cli.outputs import echo_choice
from facetrain.embeddings.inference import Inference
from facetrain.errors import UsageError
from facetrain.verify.options import EvaluationOptions

if TYPE_CHECKING:
    from facetrain.checkpoint.load import CheckpointChoice

DEVICES = ("auto", "cpu", "cuda")
_NEWEST_SOUND = "newest-sound"


def _check_device(name: str) -> str:
    if name not in DEVICES:
        raise UsageError(f"--device {name}: unknown device; choose one of {', '.join(DEVICES)}")
    if name == "cuda":
        resolve_device(name)
    return name


DEVICE_OPTION = typer.Option(
    callback=_check_device,
    help="Device that runs the network: cpu, cuda, or auto, which takes a GPU if there is one.",
)
Device = Annotated[str, DEVICE_OPTION]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
Config = Annotated[Path, typer.Option(help="Config of the run: a YAML file, or the name of a preset.")]
OptionalConfig = Annotated[
    Path | None, typer.Option(help="Config of the run: a YAML file, or the name of a preset.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the config. May be repeated."),
]
MODEL_HELP = (
    "Model to run: a run folder, a checkpoint, a .safetensors file, a .pt or .pth file of arcface_torch, an .onnx "
    "file, or a -symbol.json file of MXNet."
)
Model = Annotated[Path, typer.Argument(help=MODEL_HELP)]
DataDir = Annotated[
    Path | None,
    typer.Option(
        help="Folder of the sets that are given by name. The default is the evaluation folder of the run, or the "
        "current folder if MODEL is not a run."
    ),
]
_DEVICE_AND_BATCH = {
    "device": DEVICE_OPTION,
    "batch_size": typer.Option(min=1, help="Images per forward pass on each process."),
}
Float32InferenceOptions = Annotated[Inference, _DEVICE_AND_BATCH]
"""Options of commands whose results other runs of the model compare with, in float32."""
InferenceOptions = Annotated[
    Inference,
    {
        **_DEVICE_AND_BATCH,
        "bf16": typer.Option("--bf16", help="Run the network in bfloat16 autocast; the default is float32."),
    },
]
ProtocolOptions = Annotated[
    EvaluationOptions,
    {
        "slice_fmr": typer.Option(
            min=1e-9,
            max=1,
            help="False match rate over all impostor pairs that defines the threshold of the slices and of the "
            "error-versus-discard curves, from 0 to 1. The default is the mean threshold of the folds.",
        ),
        "bootstrap": typer.Option(
            min=0, help="Bootstrap draws of subjects for the 95 % intervals; 0 computes none."
        ),
        "seed": typer.Option(min=0, help="Seed of the bootstrap draws."),
        "flip": typer.Option(
            help="Add the embedding of the mirror image. Sets of pairs are always scored with and without it."
        ),
        "detector_score": typer.Option(help="Weight the images of an IJB template by their detector scores."),
    },
]
RunDir = Annotated[
    Path | None, typer.Argument(help="Folder of a run. Default: the newest run in the folder runs.")
]
CheckpointOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEP|newest-sound",
        help="Checkpoint of the run to use: its step, or newest-sound, the newest one whose files all have their "
        "checksums. Default: the newest.",
    ),
]


def resolve_device(name: str) -> str:
    """Return `cpu` or `cuda` for the value of `--device`; `auto` gives `cuda` if a GPU is available.

    Raises:
        UsageError: `cuda` is given, and there is no GPU.
    """
    if name == "cpu":
        return name
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if name == "cuda":
        raise UsageError("--device cuda: this machine has no GPU; use --device cpu, or a machine with a GPU")
    return "cpu"


def find_run(given: Path | None, *, err: bool = False) -> Path:
    """Return the given run, or the newest one in the folder runs, which is then named on the terminal.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        return given
    from facetrain.run.report.list_runs import is_run

    runs = [path.parent for path in Path("runs").glob("*/environment.json") if is_run(path.parent)]
    if not runs:
        raise UsageError("runs: has no run; give the folder of one")
    # The file is written when a run starts, and when it continues.
    newest = max(runs, key=lambda run: (run / "environment.json").stat().st_mtime)
    echo_choice(f"{newest}: the newest run", err=err)
    return newest


def parse_checkpoint(value: str | None) -> CheckpointChoice:
    """Return the choice that a value of `--checkpoint` makes.

    Raises:
        UsageError: it is neither a step nor newest-sound.
    """
    if value is None or value == _NEWEST_SOUND:
        return value  # type: ignore[return-value]
    if not (value.isascii() and value.isdigit()):
        raise UsageError(f"--checkpoint {value}: give the step of a checkpoint, or {_NEWEST_SOUND}")
    return int(value)
