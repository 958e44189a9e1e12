"""Arguments and options that several commands share, each declared once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.outputs import echo_line
from facetrain.cli.progress_bar import progress_bar
from facetrain.data.settings import SET_SUFFIXES
from facetrain.embeddings.inference import Inference
from facetrain.remote.address import is_read_in_place, is_remote, public
from facetrain.verify.metrics.draws import LEAST_DRAWS
from facetrain.verify.protocol_options import EvaluationOptions


def local_file(text: str) -> Path:
    """Return the local path of an argument: a path, an address, or a name of the catalog, which are downloaded.

    Raises:
        FacetrainError: the address cannot be used, or the download failed.
    """
    from facetrain.remote.download import is_name

    return download(text)[0] if is_name(text) else Path(text)


def local_dataset(text: str) -> Path:
    """Return the local path of a dataset; one of an object store, but no verification set there, is read in place.

    Raises:
        FacetrainError: as `local_file`.
    """
    from facetrain.data.remote_dataset import dataset_path

    if is_read_in_place(text) and not text.lower().endswith(SET_SUFFIXES):
        return dataset_path(text)
    return local_file(text)


def download(name: str) -> tuple[Path, str]:
    """Download an address or a name of the catalog with a progress bar; return the path, and the exact address.

    Raises:
        FacetrainError: as `local_file`.
    """
    from facetrain.remote.download import fetch

    with progress_bar(f"bytes of {public(name)}") as progress:
        return fetch(name, progress, partial(echo_line, err=True))


def local_set(text: str) -> str:
    """Return the path of an evaluation set that is given by an address; a path or a name as it is.

    Raises:
        FacetrainError: as `local_file`.
    """
    return str(local_file(text)) if is_remote(text) else text


def _sets_folder(text: str) -> Path:
    from facetrain.config.paths import given_eval_dir

    return given_eval_dir(text)


def _check_device(name: str) -> str:
    if name not in ("auto", "cpu"):
        from facetrain.distributed.devices import require_device

        require_device(name, given=f"--device {name}", cpu_setting="--device cpu")
    return name


_DEVICES = "cpu, cuda, or auto, which takes a GPU if there is one."
DEVICE_OPTION = typer.Option(callback=_check_device, help=f"Device that runs the network: {_DEVICES}")
Device = Annotated[str, DEVICE_OPTION]
DeviceOfBatches = Annotated[
    str, typer.Option("--device", callback=_check_device, help=f"Device that gets the batches: {_DEVICES}")
]
MinQuality = Annotated[
    float,
    typer.Option(
        min=0,
        help="Lowest quality of an image that is used: the length of its embedding before normalization. The JSON "
        "of `facetrain eval` has error rates by quality.",
    ),
]
SkipBad = Annotated[
    bool,
    typer.Option(
        "--skip-bad",
        help="Leave out images that cannot be read, or with --detector have no face, and list them.",
    ),
]
SKIP_BAD_ADVICE = "leave out such images with --skip-bad"
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, and nothing else.")]
CONFIG_FLAGS = ("--config", "--preset")
"""Two names of one option: `--config my.yaml` and `--preset ms1mv3_r50` read well, and both take either."""
_CONFIG = typer.Option(*CONFIG_FLAGS, help="Config of the run: a YAML file, or the name of a preset.")
Config = Annotated[Path, _CONFIG]
OptionalConfig = Annotated[Path | None, _CONFIG]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the config. May be repeated."),
]
MODEL_HELP = (
    "Model to run: a run folder, a checkpoint, a model file (.safetensors, .pt, .pth, .ckpt, .onnx, -symbol.json), a "
    "folder of CVLface or timm, an address (hf://, https://, s3://, gs://), or a name of `facetrain get`."
)
Model = Annotated[Path, typer.Argument(metavar="MODEL", help=MODEL_HELP, parser=local_file)]
Detector = Annotated[
    Path | None,
    typer.Option(
        metavar="ONNX",
        parser=local_file,
        help="OpenCV's detector YuNet, for whole photos: yunet, which is downloaded, or a model file.",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        parser=_sets_folder,
        help="Folder of the sets that are given by name. The default is that of the run (eval.dir), or the current "
        "folder if MODEL is not a run.",
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
            min=0,
            help=f"Bootstrap draws of subjects for the 95 % intervals, at least {LEAST_DRAWS}; 0 computes none.",
        ),
        "seed": typer.Option(min=0, help="Seed of the bootstrap draws."),
        "flip": typer.Option(
            help="Add the embedding of the mirror image. Sets of pairs are always scored with and without it."
        ),
    },
]
RunDir = Annotated[
    Path | None,
    typer.Argument(metavar="RUN_DIR", help="Folder of a run. Default: the newest run in the folder runs."),
]


def find_run(given: Path | None, *, err: bool = False) -> Path:
    """Return the given run, or the newest one in the folder runs, which is then named on the terminal.

    Raises:
        UsageError: there is none.
    """
    if given is not None:
        return given
    from facetrain.run.folder.run_files import newest_run

    newest = newest_run()
    echo_line(f"{newest}: the newest run", err=err)
    return newest
