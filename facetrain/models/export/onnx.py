"""Export to ONNX, compared with the network in onnxruntime."""

# N images   H, W height and width   D embedding size

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.errors import RunError
from facetrain.files import new_file
from facetrain.models.export.checks import (
    NUM_IMAGES,
    compare_embeddings,
    example_landmarks,
    example_pixels,
    require_torch_network,
)
from facetrain.models.export.formats import Exported, ExportOptions
from facetrain.models.export.int8 import export_int8
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT


class _Deployed(nn.Module):
    """A network with the normalization of pixels before it, or of embeddings after it, as the options ask."""

    def __init__(self, model: EmbeddingModel, options: ExportOptions) -> None:
        super().__init__()
        self.network = model.network
        self._mean, self._scale = model.preprocessing["mean"], model.preprocessing["scale"]
        self._from_pixels, self._unit = options.from_pixels, options.unit

    def forward(self, image: Tensor, landmarks: Tensor | None = None) -> Tensor:
        if self._from_pixels:
            image = (image.permute(0, 3, 1, 2).float() - self._mean) / self._scale
        embedding = self.network(image) if landmarks is None else self.network(image, landmarks)
        return nn.functional.normalize(embedding) if self._unit else embedding


def export_onnx(model: EmbeddingModel, path: Path, options: ExportOptions) -> Exported:
    """Write an ONNX file with a free batch size.

    The input is `image`: float32 (N, 3, H, W) as the network takes it, or with `from_pixels` uint8
    (N, H, W, 3) RGB. A network with KP-RPE has a second input `landmarks`: float32 (N, 5, 2), x and y as fractions of
    the image's sides. The output is `embedding`: float32 (N, D), of unit length with `unit`. The metadata
    of the file describe the input and have the description of the model file.

    With `int8` the result has the cosines of the embeddings with those of the network, see `int8.export_int8`.

    Raises:
        ModelError: the model was opened from an ONNX file.
        ImageError: a calibration image cannot be decoded.
        RunError: the file cannot be written, or its embeddings differ too much.
    """
    if not options.int8:
        return Exported(_write_float32(model, path, options), path)
    require_torch_network(model)
    return export_int8(model, path, options, lambda float32: _write_float32(model, float32, options))


def _write_float32(model: EmbeddingModel, path: Path, options: ExportOptions) -> float:
    """Write the file, and return the largest difference of its embeddings."""
    import onnx
    import onnxruntime

    require_torch_network(model)
    deployed = _Deployed(model, options).eval().cpu()
    proto = _trace(deployed, _example(model, options, 2), *example_landmarks(model, 2))
    layout = {"input": "uint8 NHWC" if options.from_pixels else "float32 NCHW", "unit": options.unit}
    metadata = model.metadata | {"preprocessing": model.preprocessing | layout}
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in metadata.items()})
    inputs = {"image": _example(model, options, NUM_IMAGES)}
    for landmarks in example_landmarks(model, NUM_IMAGES):
        inputs[LANDMARKS_INPUT] = landmarks
    with new_file(path, RunError) as scratch:
        onnx.save(proto, str(scratch))
        session = onnxruntime.InferenceSession(str(scratch), providers=["CPUExecutionProvider"])
        feed = {name: tensor.contiguous().numpy() for name, tensor in inputs.items()}
        (embedding,) = session.run(None, feed)
        with torch.no_grad():
            return compare_embeddings(path, torch.from_numpy(embedding), deployed(*inputs.values()))


def _trace(deployed: nn.Module, *example: Tensor) -> Any:
    batch = {0: torch.export.Dim("batch", min=1)}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the exporter warns of its own deprecated parts, other ones in each version
        program = torch.onnx.export(
            deployed,
            example,
            dynamo=True,
            input_names=["image", LANDMARKS_INPUT][: len(example)],
            output_names=["embedding"],
            dynamic_shapes=(batch,) * len(example),
            verbose=False,
        )
    assert program is not None
    return program.model_proto


def _example(model: EmbeddingModel, options: ExportOptions, count: int) -> Tensor:
    pixels = example_pixels(model, count)
    return pixels if options.from_pixels else model.prepare(pixels)
