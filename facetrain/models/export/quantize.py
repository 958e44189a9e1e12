"""Quantization of an ONNX file to 8 bits with onnxruntime, for networks of every kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.models.int8.onnx_file import without_advice

Inputs = Mapping[str, np.ndarray]
"""Inputs of a network, by their name in the ONNX file."""


def quantize_dynamic(float32: Path, output: Path) -> None:
    """Write an ONNX file whose linear layers have int8 weights.

    The ranges of their activations are measured in every call. Convolutions stay in float32.
    """
    import onnx
    from onnxruntime import quantization

    with without_advice():
        quantization.quantize_dynamic(
            _load(onnx, float32),
            output,
            op_types_to_quantize=["MatMul", "Gemm"],
            weight_type=quantization.QuantType.QInt8,
        )


def quantize_static(float32: Path, output: Path, batches: Iterable[Inputs]) -> None:
    """Write an ONNX file whose convolutions and linear layers compute in int8.

    Format QDQ: one scale per output channel for weights (int8), one scale per tensor for activations
    (uint8), from their minimum and maximum over the images. For networks that `int8.quantize` does not know; it loses
    less accuracy.

    Args:
        float32: The ONNX file to quantize.
        output: The file to write.
        batches: Inputs for calibration.
    """
    import onnx
    from onnxruntime import quantization

    proto = _load(onnx, float32)
    with without_advice():
        quantization.quantize_static(
            proto,
            output,
            _CalibrationReader(batches),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            nodes_to_exclude=_batched_products(proto),
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


def _batched_products(proto: Any) -> list[str]:
    """Return the names of products with a weight of three or more dimensions.

    onnxruntime writes one scale per channel for these too, but cannot run the file. KP-RPE has such a weight.
    """
    batched = {weight.name for weight in proto.graph.initializer if len(weight.dims) > 2}
    return [node.name for node in proto.graph.node if node.op_type == "MatMul" and batched & set(node.input)]


class _CalibrationReader:
    """onnxruntime's CalibrationDataReader over batches of inputs."""

    def __init__(self, batches: Iterable[Inputs]) -> None:
        self._batches = iter(batches)

    def __iter__(self) -> _CalibrationReader:
        return self

    def __next__(self) -> Inputs:
        return next(self._batches)

    def get_next(self) -> Inputs | None:
        """Return the next inputs, or None at the end."""
        return next(self._batches, None)
