"""Export to an ONNX file that computes in int8, compared with the float network in onnxruntime."""

# B images   D embedding size   H, W height and width

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from facetrain.errors import ModelError
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.models.export.checks import fits_onnx_file
from facetrain.models.export.example_inputs import drawn_faces
from facetrain.models.export.formats import ExportOptions, Similarity
from facetrain.models.export.quantize import quantize_dynamic, quantize_static
from facetrain.models.export.save_onnx import save_onnx
from facetrain.models.int8.onnx_file import int8_model
from facetrain.models.int8.quantize import folded_network, quantize
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT

_DRAWN_FACES = 256
"""Faces that are drawn if no images are given."""
_COMPARED_SHARE = 5
"""One of so many images is not used for calibration: file and network are compared on it."""
_MAX_COMPARED = 64
_BATCH_SIZE = 16


def write_int8(
    model: EmbeddingModel, path: Path, options: ExportOptions, write_float32: Callable[[Path], object]
) -> Similarity:
    """Write an ONNX file with int8 layers, and return the cosines of its embeddings with those of the network.

    Args:
        model: Network in evaluation mode, on the CPU.
        path: File to write, in a folder of its own.
        options: `int8` is `dynamic` or `static`.
        write_float32: Writes the network to an ONNX file in float32. It is called for networks that
            `folded_network` does not know, and for `dynamic`.

    Raises:
        ModelError: the weights are too large for one ONNX file.
        ImageError: an image cannot be decoded.
    """
    import onnx

    if not fits_onnx_file(model):
        raise ModelError(
            f"{model.description}: is too large for --int8, which quantizes ONNX files below 2 GiB; export it without"
        )
    pixels = drawn_faces(model.image_size, _DRAWN_FACES) if options.images is None else options.images
    used, compared = _split(model.prepare(pixels))
    network = folded_network(model.network) if options.int8 == "static" else None
    if network is not None:
        proto = int8_model(quantize(network, used), model.image_size, model.embedding_size)
        save_onnx(proto, path, model, options)
    else:
        float32 = path.with_name("float32.onnx")
        write_float32(float32)
        if options.int8 == "static":
            quantize_static(float32, path, _batches(model, used))
        else:
            quantize_dynamic(float32, path)
        save_onnx(onnx.load(str(path)), path, model, options)
    return _compare(path, model, compared)


def _split(image_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return images for calibration and for the comparison; both are all images if these are few."""
    if len(image_BCHW) < 2 * _COMPARED_SHARE:
        return image_BCHW, image_BCHW
    is_compared = torch.arange(len(image_BCHW)) % _COMPARED_SHARE == _COMPARED_SHARE // 2
    return image_BCHW[~is_compared], image_BCHW[is_compared][:_MAX_COMPARED]


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
