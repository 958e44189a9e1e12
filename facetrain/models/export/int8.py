"""The ONNX graph of a network that computes in int8."""

from __future__ import annotations

from typing import Any

from facetrain.errors import ModelError
from facetrain.models.export.checks import fits_onnx_file
from facetrain.models.export.example_inputs import split_images
from facetrain.models.export.formats import ExportOptions
from facetrain.models.int8.onnx_file import int8_model
from facetrain.models.int8.quantize import folded_network, quantize
from facetrain.models.model_file import EmbeddingModel


def quantized_onnx(model: EmbeddingModel, options: ExportOptions) -> Any:
    """Return the ONNX protobuf of a network on the CPU in evaluation mode, calibrated with most of `options.images`.

    Raises:
        ModelError: the weights are too large for one ONNX file, or the network is of another kind.
    """
    network = folded_network(model.network)
    if network is None or not fits_onnx_file(model):
        raise ModelError(
            f"{model.description}: --int8 quantizes IResNets and MobileFaceNets, also of MXNet's files, below 2 GiB; "
            "export it without"
        )
    calibration, _ = split_images(options, model.image_size)
    quantized = quantize(network, model.prepare(calibration))
    return int8_model(quantized, model.image_size, model.embedding_size)
