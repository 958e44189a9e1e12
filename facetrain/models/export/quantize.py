"""Quantization of an ONNX file to 8 bits with onnxruntime."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.face_landmarks import NORMALIZED_TEMPLATE
from facetrain.models.model_file import EmbeddingModel
from facetrain.models.onnx_network import LANDMARKS_INPUT

_BATCH_SIZE = 16


def quantize_dynamic(float32: Path, output: Path) -> None:
    """Write an ONNX file whose linear layers have int8 weights.

    The ranges of their activations are measured in every call. Convolutions stay in float32.
    """
    import onnx
    from onnxruntime import quantization

    with _without_preprocessing_advice():
        quantization.quantize_dynamic(
            _load(onnx, float32),
            output,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=quantization.QuantType.QInt8,
        )


def quantize_static(float32: Path, output: Path, model: EmbeddingModel, images: Sequence[bytes]) -> None:
    """Write an ONNX file whose convolutions and linear layers compute in int8.

    Format QDQ: one scale per output channel for weights (int8), one scale per tensor for activations
    (uint8), from their minimum and maximum over the images.

    Args:
        float32: The ONNX file to quantize.
        output: The file to write.
        model: The network from which `float32` was written.
        images: Encoded images for calibration.

    Raises:
        ImageError: an image cannot be decoded.
    """
    import onnx
    from onnxruntime import quantization

    with _without_preprocessing_advice():
        quantization.quantize_static(
            _load(onnx, float32),
            output,
            _CalibrationReader(model, images),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
            activation_type=quantization.QuantType.QUInt8,
        )


def _load(onnx: Any, path: Path) -> Any:
    proto = onnx.load(str(path))
    # torch's exporter stores the shapes of some weights before it transposes them, and the quantizer would
    # fail on these. It infers the shapes again.
    del proto.graph.value_info[:]
    return proto


class _CalibrationReader:
    """onnxruntime's CalibrationDataReader over encoded images."""

    def __init__(self, model: EmbeddingModel, images: Sequence[bytes]) -> None:
        self._batches = _batches(model, images)

    def __iter__(self) -> _CalibrationReader:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next inputs, or None at the end."""
        return next(self._batches, None)


def _batches(model: EmbeddingModel, images: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(images), _BATCH_SIZE):
        decoded = [
            resize_square(decode_rgb(images[n], location=f"calibration image {n}"), model.image_size)
            for n in range(start, min(start + _BATCH_SIZE, len(images)))
        ]
        image = model.prepare(torch.from_numpy(np.stack(decoded)))
        inputs = {"image": np.ascontiguousarray(image.numpy())}
        if model.takes_landmarks:
            shape = (len(decoded), *NORMALIZED_TEMPLATE.shape)
            inputs[LANDMARKS_INPUT] = np.array(np.broadcast_to(NORMALIZED_TEMPLATE, shape))
        yield inputs


@contextmanager
def _without_preprocessing_advice() -> Iterator[None]:
    """Suppress onnxruntime's warning that recommends another tool, which the user cannot run here."""

    def is_other(record: logging.LogRecord) -> bool:
        return "pre-processing before quantization" not in record.getMessage()

    logging.getLogger().addFilter(is_other)
    try:
        yield
    finally:
        logging.getLogger().removeFilter(is_other)
