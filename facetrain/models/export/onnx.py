"""ONNX, checked against the network that it was made of."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from facetrain.errors import ModelError, RunError
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import OnnxNetwork

_TOLERANCE = 1e-3


class _Deployed(nn.Module):
    """A network with what is asked for around it: pixels in, unit embeddings out."""

    def __init__(self, model: EmbeddingModel, *, from_pixels: bool, unit: bool) -> None:
        super().__init__()
        self.network = model.network
        self._mean, self._scale = model.preprocessing["mean"], model.preprocessing["scale"]
        self._from_pixels, self._unit = from_pixels, unit

    def forward(self, image: Tensor) -> Tensor:
        if self._from_pixels:
            image = (image.permute(0, 3, 1, 2).float() - self._mean) / self._scale
        embedding = self.network(image)
        return nn.functional.normalize(embedding) if self._unit else embedding


def export_onnx(model: EmbeddingModel, path: Path, *, from_pixels: bool = False, unit: bool = False) -> float:
    """Write a model with a free batch size; return the largest difference of embeddings that onnxruntime gives.

    The input is `image`: float32 (N, 3, H, W) as the network takes it, or with `from_pixels` uint8
    (N, H, W, 3) RGB. The output is `embedding` (N, D), of length 1 with `unit`. What the input should
    be, and what the model file says of the network, also stands in the file's metadata.

    Raises:
        ModelError: the model is ONNX already; onnx, onnxscript or onnxruntime is not installed.
        RunError: onnxruntime gives other embeddings than torch, by more than 0.001 of their size.
    """
    onnx, onnxruntime = _tools()
    if isinstance(model.network, OnnxNetwork):
        raise ModelError(f"{model.description}: is ONNX already, and no torch network to write it from")
    deployed = _Deployed(model, from_pixels=from_pixels, unit=unit).eval().cpu()
    example = _example(2, model, from_pixels=from_pixels)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter deprecates itself from version to version
        program = torch.onnx.export(
            deployed,
            (example,),
            dynamo=True,
            input_names=["image"],
            output_names=["embedding"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            verbose=False,
        )
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        assert program is not None
        proto = program.model_proto
        given = {"input": "uint8 NHWC" if from_pixels else "float32 NCHW", "unit": unit}
        notes = model.notes | {"preprocessing": model.preprocessing | given}
        onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in notes.items()})
        onnx.save(proto, str(scratch))
        difference = _difference(onnxruntime, scratch, deployed, _example(5, model, from_pixels=from_pixels))
        if not difference < _TOLERANCE:
            raise RunError(
                f"{path}: onnxruntime gives embeddings that differ by {difference:.2g} of their size"
            )
        os.replace(scratch, path)
    except OSError as error:
        raise RunError(f"{error.filename or path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return difference


def _tools() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401 - torch's exporter needs it
    except ImportError as error:
        raise ModelError(f"ONNX needs {error.name}: install facetrain[onnx]") from error
    return onnx, onnxruntime


def _example(count: int, model: EmbeddingModel, *, from_pixels: bool) -> Tensor:
    shape = (count, model.image_size, model.image_size, 3)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return pixels if from_pixels else model.prepare(pixels)


def _difference(onnxruntime: Any, path: Path, deployed: nn.Module, example: Tensor) -> float:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"image": example.contiguous().numpy()})
    with torch.no_grad():
        ours = deployed(example).numpy()
    return float(np.abs(theirs - ours).max() / np.abs(ours).max())
