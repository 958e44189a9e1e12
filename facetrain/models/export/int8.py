"""Export to an ONNX file that computes in int8, compared with the float network in onnxruntime."""

# B images   D embedding size   H, W height and width

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.synthetic.render import render_jpeg
from facetrain.errors import ModelError, RunError
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.files import new_file, temporary_file
from facetrain.models.export.checks import fits_onnx_file
from facetrain.models.export.formats import Exported, ExportOptions, Similarity
from facetrain.models.export.quantize import quantize_dynamic, quantize_static
from facetrain.models.int8.onnx_file import int8_model
from facetrain.models.int8.quantize import folded_network, quantize
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT

_DRAWN_FACES = 256
"""Faces that are drawn if no images are given."""
_COMPARED_SHARE = 5
"""One of so many images is not used for calibration: file and network are compared on it."""
_MAX_COMPARED = 64
_LEAST_COSINE = 0.5
"""A file with a smaller mean cosine to the network is not written."""
_BATCH_SIZE = 16


def export_int8(
    model: EmbeddingModel, path: Path, options: ExportOptions, write_float32: Callable[[Path], object]
) -> Exported:
    """Write an ONNX file with int8 layers.

    Args:
        model: Network in evaluation mode, on the CPU.
        path: File to write; it appears when its embeddings have been compared with those of the network.
        options: `int8` is `dynamic` or `static`.
        write_float32: Writes the network to an ONNX file in float32. It is called for networks that
            `folded_network` does not know, and for `dynamic`.

    Raises:
        ModelError: the weights are too large for one ONNX file.
        ImageError: an image cannot be decoded.
        RunError: the file cannot be written, or its embeddings have little in common with those of the network.
    """
    if not fits_onnx_file(model):
        raise ModelError(
            f"{model.description}: is too large for --int8, which quantizes ONNX files below 2 GiB; export it without"
        )
    pixels = _read_pixels(options.calibration, model.image_size)
    used, compared = _split(model.prepare(pixels))
    with new_file(path, RunError) as output:
        network = folded_network(model.network) if options.int8 == "static" else None
        if network is not None:
            _save(int8_model(quantize(network, used), model.image_size, model.embedding_size), model, output)
        else:
            with temporary_file(path) as float32:
                write_float32(float32)
                if options.int8 == "static":
                    quantize_static(float32, output, _batches(model, used))
                else:
                    quantize_dynamic(float32, output)
        similarity = _compare(output, model, compared)
        if not similarity.mean >= _LEAST_COSINE:
            raise RunError(
                f"{path}: not written: the mean cosine of its embeddings with those of the network is "
                f"{similarity.mean:.3f}; give images like those of the network's training with --calibrate"
            )
    return Exported(None, path, similarity)


def _read_pixels(images: Sequence[bytes], size: int) -> Tensor:
    """Return decoded or drawn faces, uint8 (B, H, W, 3)."""
    drawn = [] if images else [render_jpeg(0, identity, 0, size) for identity in range(_DRAWN_FACES)]
    decoded = [
        resize_square(decode_rgb(image, location=f"calibration image {number}"), size)
        for number, image in enumerate(images or drawn)
    ]
    return torch.from_numpy(np.stack(decoded))


def _split(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return images for calibration and for the comparison; both are all images if these are few."""
    if len(image_BCHW) < 2 * _COMPARED_SHARE:
        return image_BCHW, image_BCHW
    is_compared = torch.arange(len(image_BCHW)) % _COMPARED_SHARE == _COMPARED_SHARE // 2
    return image_BCHW[~is_compared], image_BCHW[is_compared][:_MAX_COMPARED]


def _save(proto: Any, model: EmbeddingModel, path: Path) -> None:
    import onnx

    layout = {"input": "float32 NCHW", "unit": False}
    metadata = model.metadata | {"preprocessing": model.preprocessing | layout}
    onnx.helper.set_model_props(proto, {name: json.dumps(value) for name, value in metadata.items()})
    onnx.save(proto, str(path))


def _batches(model: EmbeddingModel, image_BCHW: Tensor) -> Iterator[dict[str, np.ndarray]]:
    """Yield inputs of the network; landmarks are those of an aligned face."""
    for image in image_BCHW.split(_BATCH_SIZE):
        inputs = {"image": np.ascontiguousarray(image.numpy())}
        if model.takes_landmarks:
            shape = (len(image), *NORMALIZED_TEMPLATE.shape)
            inputs[LANDMARKS_INPUT] = np.array(np.broadcast_to(NORMALIZED_TEMPLATE, shape))
        yield inputs


def _compare(path: Path, model: EmbeddingModel, image_BCHW: Tensor) -> Similarity:
    """Return the cosines of the embeddings of a file with those of the network."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    cosines = []
    with torch.no_grad():
        for inputs in _batches(model, image_BCHW):
            (embedding,) = session.run(None, inputs)
            expected = model.network(*map(torch.from_numpy, inputs.values()))
            cosines.append(F.cosine_similarity(torch.from_numpy(embedding), expected))
    cosine_B = torch.cat(cosines)
    return Similarity(float(cosine_B.mean()), float(cosine_B.min()), len(cosine_B))
