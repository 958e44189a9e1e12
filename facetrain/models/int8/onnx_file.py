"""ONNX graphs of folded layers, in float32 and with the rounding nodes of onnxruntime's quantizer."""

# C channels   D embedding size   H, W height and width   N images

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from facetrain.models.int8.network import Int8Network
from facetrain.models.layer_graph import IMAGE, Layer

_OPSET = 18
"""Version of ONNX's operators in the file; onnxruntime 1.20, the oldest one that facetrain supports, runs up to 22."""
_IR_VERSION = 10
"""Version of the file format; onnxruntime 1.20 reads up to 10, and onnx writes a newer one by default."""
INPUT, OUTPUT = "image", "embedding"
"""Names of the input and the output of every ONNX file that facetrain writes."""


class _GraphBuilder:
    """Nodes and constants of an ONNX graph; a value has the name of its layer."""

    def __init__(self, network: Int8Network) -> None:
        self._network, self._int8 = network, network.int8_layers()
        self._consumers = network.graph.consumers()
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.aliases: dict[str, str] = {}
        """Layer whose value a tensor has, for tensors that int8 layers take under another name."""
        self._names = {network.graph.output: OUTPUT}

    def name(self, value: str) -> str:
        """Return the name of a layer's value in the graph."""
        return self._names.get(value, value)

    def node(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node, and return the name of its output."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def constant(self, name: str, value: Tensor | float) -> str:
        """Add a float32 constant, and return its name."""
        from onnx import numpy_helper

        array = np.ascontiguousarray(value, dtype=np.float32)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def normalization(self, scale: float) -> None:
        """Add the map from pixels to the input of the first layers."""
        centered = self.node("Sub", [INPUT, self.constant("middle_gray", 127.5)], "centered")
        self._names[IMAGE] = self.node(
            "Mul", [centered, self.constant("input_scale", scale / 127.5)], "normalized"
        )
        self.aliases["normalized"] = IMAGE

    def layer(self, value: str, layer: Layer) -> None:
        """Add the nodes of a layer."""
        output, sources = self.name(value), [self.name(source) for source in layer.sources]
        match layer.kind:
            case "conv":
                sizes = {
                    "strides": layer.options["stride"],
                    # First all begins, then all ends: torch pads both sides alike.
                    "pads": [*layer.options["padding"], *layer.options["padding"]],
                    "dilations": layer.options["dilation"],
                    "kernel_shape": layer.weights["weight"].shape[2:],
                }
                attributes = {key: list(size) for key, size in sizes.items()}
                inputs = [self._rounded_source(value, layer), *self._weights(output, layer)]
                self.node("Conv", inputs, output, group=layer.options["groups"], **attributes)
            case "linear":
                # Gemm takes matrices only.
                flat = self.node("Flatten", [self._rounded_source(value, layer)], f"{output}_input")
                self.aliases[flat] = layer.sources[0]
                self.node("Gemm", [flat, *self._weights(output, layer)], output, transB=1)
            case "norm":
                inputs = [sources[0], *self._weights(output, layer)]
                self.node("BatchNormalization", inputs, output, epsilon=layer.options["eps"])
            case "prelu":
                self.node("PRelu", [sources[0], self._slope(output, layer)], output)
            case "maximum":
                scaled = self.node("Mul", [sources[0], self._slope(output, layer)], f"{output}_scaled")
                self.node("Max", [sources[0], scaled], output)
            case "add":
                self.node("Add", sources, output)

    def _weights(self, output: str, layer: Layer) -> list[str]:
        return [self.constant(f"{output}.{name}", tensor.detach()) for name, tensor in layer.weights.items()]

    def _slope(self, output: str, layer: Layer) -> str:
        return self.constant(f"{output}.slope", layer.weights["weight"].detach().reshape(-1, 1, 1))

    def _rounded_source(self, value: str, layer: Layer) -> str:
        """Return the tensor that a convolution or linear layer takes.

        onnxruntime's quantizer gives the rounded tensor to all layers that take it. An alias keeps the sums of the
        shortcuts in float32: else each block would round them again.
        """
        (source,) = layer.sources
        others = [name for name in self._consumers[source] if name not in self._int8]
        produced_by_conv = source in self._int8 and self._int8[source].kind == "conv"
        if produced_by_conv or not others:
            return self.name(source)
        alias = self.node("Identity", [self.name(source)], f"{self.name(value)}_rounded")
        self.aliases[alias] = source
        return alias


def float_model(network: Int8Network, image_size: int, embedding_size: int) -> tuple[Any, dict[str, str]]:
    """Return a float32 ONNX model, and the layer whose value a tensor has, by the tensor's name.

    The input is `image`, float32 (N, 3, H, W) as the network takes it. The output is `embedding`, float32 (N, D).
    """
    from onnx import TensorProto, helper

    builder = _GraphBuilder(network)
    if network.graph.takes_pixels:
        builder.normalization(network.graph.input_scale)
    for value, layer in network.graph.layers.items():
        builder.layer(value, layer)
    image, embedding = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (
            (INPUT, ["batch", 3, image_size, image_size]),
            (OUTPUT, ["batch", embedding_size]),
        )
    )
    graph = helper.make_graph(builder.nodes, "embedding", [image], [embedding], builder.constants)
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="facetrain")
    tensors = {builder.name(value): value for value in (IMAGE, *network.graph.layers)} | builder.aliases
    return model, tensors


def int8_model(network: Int8Network, image_size: int, embedding_size: int) -> Any:
    """Return an ONNX model that rounds as `network` does, with nodes QuantizeLinear and DequantizeLinear.

    It has the input and output of `float_model`.
    """
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.calibrate import TensorData, TensorsData

    model, tensors = float_model(network, image_size, embedding_size)
    ranges = {
        name: TensorData(lowest=np.float32(found.low), highest=np.float32(found.high))
        for name, value in tensors.items()
        if (found := network.ranges.get(value)) is not None
    }
    quantizer = quantization.QDQQuantizer(
        onnx.shape_inference.infer_shapes(model),
        per_channel=True,
        # All 8 bits: on processors without VNNI the sums may overflow, see docs/models.md.
        reduce_range=False,
        weight_qType=quantization.QuantType.QInt8,
        activation_qType=quantization.QuantType.QUInt8,
        tensors_range=TensorsData(quantization.CalibrationMethod.MinMax, ranges),
        # Empty: all nodes of the operators below.
        nodes_to_quantize=[],
        nodes_to_exclude=[],
        op_types_to_quantize=["Conv", "Gemm"],
        # The embedding stays in float32.
        extra_options={"OpTypesToExcludeOutputQuantization": ["Gemm"]},
    )
    quantizer.quantize_model()
    quantizer.model.topological_sort()  # the new nodes are at the end
    return quantizer.model.model
