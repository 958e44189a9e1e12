"""ONNX in eight bits, by onnxruntime's own quantization."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.errors import ModelError, RunError
from facetrain.models.export.onnx import export_onnx
from facetrain.models.model_file import EmbeddingModel

_BATCH = 16


def export_int8(model: EmbeddingModel, path: Path, *, calibration: Sequence[bytes] | None = None) -> None:
    """Write a model as ONNX with weights in int8.

    With encoded images for calibration convolutions compute in int8 too (static, QDQ, one scale per
    channel of a weight, ranges of activations by their least and largest value). Without, only the last
    layers do, whose ranges are found while they run (dynamic): the file gets smaller, convolutions stay
    in float32. Input and output are those of `export_onnx`, float32.

    Raises:
        ModelError: the model is ONNX already, or onnx is not installed.
        ImageError: an image cannot be decoded.
        RunError: the file cannot be written.
    """
    # Its advice to run yet another tool first is no news to the user.
    logging.getLogger().addFilter(_no_advice)
    try:
        with tempfile.TemporaryDirectory(prefix=".int8.", dir=path.parent) as scratch:
            whole, small = Path(scratch, "float32.onnx"), Path(scratch, "int8.onnx")
            export_onnx(model, whole)
            _quantize(whole, small, model, calibration)
            os.replace(small, path)
    except OSError as error:
        raise RunError(f"{error.filename or path}: {error.strerror or error}") from error
    finally:
        logging.getLogger().removeFilter(_no_advice)


def _quantize(whole: Path, small: Path, model: EmbeddingModel, calibration: Sequence[bytes] | None) -> None:
    try:
        import onnx
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static
    except ImportError as error:
        raise ModelError(f"int8 needs {error.name}: install facetrain[onnx]") from error
    proto = onnx.load(str(whole))
    # Shapes that torch's exporter noted are of weights before it turned them; they are inferred anew.
    del proto.graph.value_info[:]
    if calibration is None:
        quantize_dynamic(proto, small, op_types_to_quantize=["MatMul", "Gemm"], weight_type=QuantType.QInt8)
        return
    quantize_static(
        proto,
        small,
        _Images(model, calibration),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv", "Gemm", "MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        activation_type=QuantType.QUInt8,
    )


class _Images:
    """Encoded images as the network takes them, batch by batch: onnxruntime's CalibrationDataReader."""

    def __init__(self, model: EmbeddingModel, images: Sequence[bytes]) -> None:
        self._batches = _batches(model, images)

    def __iter__(self) -> _Images:
        return self

    def __next__(self) -> dict[str, Any]:
        return next(self._batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next inputs, or None."""
        return next(self._batches, None)


def _batches(model: EmbeddingModel, images: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for start in range(0, len(images), _BATCH):
        decoded = [
            resize_square(decode_rgb(images[n], location=f"calibration image {n}"), model.image_size)
            for n in range(start, min(start + _BATCH, len(images)))
        ]
        image = model.prepare(torch.from_numpy(np.stack(decoded)))
        yield {"image": np.ascontiguousarray(image.numpy())}


def _no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()
