"""Arguments and options of the commands that run a model on images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from facetrain.cli.devices import DEVICE_OPTION
from facetrain.embeddings.inference import Inference
from facetrain.verify.options import EvaluationOptions

MODEL_HELP = (
    "Model to run: a run folder, a checkpoint, a .safetensors file, a .pt or .pth file of arcface_torch, an .onnx "
    "file, or a -symbol.json file of MXNet."
)
Model = Annotated[Path, typer.Argument(help=MODEL_HELP)]
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
