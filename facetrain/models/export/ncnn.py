"""Export to ncnn's format by pnnx, opened again by ncnn on the CPU."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from facetrain.errors import ModelError, RunError
from facetrain.models.export.formats import FORMATS, ExportOptions
from facetrain.models.export.onnx import write_float_graph
from facetrain.models.export.runtime import Runtime
from facetrain.models.model_file import EmbeddingModel

_TOLERANCE = 5e-3
"""Largest difference to accept. ncnn's Winograd convolutions round more: 1e-4 to 1e-3 is usual."""
_INPUT, _OUTPUT = "in0", "out0"
"""Names that pnnx gives."""


def write(model: EmbeddingModel, path: Path, options: ExportOptions) -> Runtime:
    """Write NAME.ncnn.param (the graph) and NAME.ncnn.bin (the weights, float32), for one image per call.

    The input `in0` is float32 (3, H, W) as the network takes it, the output `out0` is float32 (D,). The format has
    no metadata; the normalization is in the model card.

    Raises:
        ModelError: the network has an operation that ncnn cannot run.
    """
    param, weights = FORMATS["ncnn"].files(path)
    write_float_graph(model, path.with_name("model.onnx"), replace(options, batch=1))
    _convert(model, path.parent, param.name, weights.name)
    return _open(model, param, weights)


def _convert(model: EmbeddingModel, folder: Path, param: str, weights: str) -> None:
    """Convert model.onnx in a folder, where pnnx also leaves other files."""
    import pnnx

    size = model.image_size
    # Fixed names, because pnnx would split the names of the user at "=".
    done = subprocess.run(
        [pnnx.EXEC_PATH, "model.onnx", f"inputshape=[1,3,{size},{size}]f32", "fp16=0",
         "ncnnparam=converted.param", "ncnnbin=converted.weights"],
        cwd=folder, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    converted = folder / "converted.param", folder / "converted.weights"
    if done.returncode != 0 or not all(path.exists() for path in converted):
        reason = " ".join(done.stderr.split())[-200:] or f"exit status {done.returncode}"
        raise ModelError(f"{model.description}: pnnx cannot convert it: {reason}; use --format onnx")
    for path, name in zip(converted, (param, weights), strict=True):
        path.replace(folder / name)


def _open(model: EmbeddingModel, param: Path, weights: Path) -> Runtime:
    import ncnn

    unknown = _unknown_layers(param)
    if unknown:
        # ncnn itself prints the first one and crashes later.
        raise ModelError(
            f"{model.description}: ncnn cannot run its operations {', '.join(unknown)}; "
            "use --format onnx or openvino"
        )
    network = ncnn.Net()
    # The network that the file is compared with runs on the CPU, too.
    network.opt.use_vulkan_compute = False
    network.opt.num_threads = torch.get_num_threads()
    if network.load_param(str(param)) != 0 or network.load_model(str(weights)) != 0:
        raise ModelError(
            f"{model.description}: ncnn cannot open what pnnx wrote; use --format onnx or openvino"
        )

    def run(image_NCHW: np.ndarray) -> np.ndarray:
        with network.create_extractor() as extractor:
            # The copy: ncnn's own layout has gaps between channels.
            extractor.input(_INPUT, ncnn.Mat(image_NCHW[0]).clone())
            status, embedding = extractor.extract(_OUTPUT)
            if status != 0:
                raise RunError(f"ncnn: the network of {model.description} does not run (status {status})")
            return np.array(embedding)[None]

    return Runtime(f"ncnn {ncnn.__version__}", run, batch=1, tolerance=_TOLERANCE)


def _unknown_layers(param: Path) -> list[str]:
    """Return the kinds of layers that pnnx left in its own form: their names have a dot, as in `Tensor.reshape`."""
    kinds = {line.split()[0] for line in param.read_text().splitlines()[2:] if line.strip()}
    return sorted(kind for kind in kinds if "." in kind or "::" in kind)
