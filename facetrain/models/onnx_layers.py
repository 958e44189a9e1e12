"""Reader of ONNX graphs as layers; onnxruntime runs the graph itself (`onnx_network`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.files import error_reason, parse_json
from facetrain.models.checksum import require_sound_onnx
from facetrain.models.file_layers import Affine, Node, backbone_form
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph
from facetrain.models.onnx_constants import plain_form
from facetrain.models.onnx_limits import graph_inputs, read_model_proto, require_stored_weights
from facetrain.models.preprocessing import FRACTIONS, PREPROCESSING, PREPROCESSING_KEY, RAW_PIXELS
from facetrain.text import listed

_IDENTITIES = frozenset({"Dropout", "Identity", "Flatten", "Reshape", "Unsqueeze", "Cast"})
"""Operators that change no number at inference."""
_MOVES = frozenset({
    "Clip", "Concat", "DequantizeLinear", "Gather", "Pad", "QuantizeLinear", "Resize", "ReverseSequence", "Slice",
    "SpaceToDepth", "Split", "Squeeze", "Transpose", "Upsample",
})  # fmt: skip
"""Operators that keep the range of the pixels, or the pixels that its integers stand for: the normalization can follow
them, for example an exchange of red and blue."""
_ARITHMETIC = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}
"""Operations of `Affine.then` by the operator that can apply a number."""
_OTHER_ARITHMETIC = frozenset({"Neg", "Pow", "QLinearAdd", "QLinearMul", "Sum"})
"""Operators whose numbers are not read; two are of onnxruntime, for quantized networks."""


def _add(node: Node) -> Layer | None:
    return None if node.constants else Layer("add", node.sources)


def _convolution(node: Node) -> Layer | None:
    attributes, size = node.attributes, node.constants[0].dim() - 2
    pads = tuple(attributes.get("pads", [0] * 2 * size))  # first all begins, then all ends
    if pads[:size] != pads[size:] or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None  # torch has no such padding
    return node.layer(
        "conv",
        stride=tuple(attributes.get("strides", [1] * size)),
        padding=pads[:size],
        dilation=tuple(attributes.get("dilations", [1] * size)),
        groups=attributes.get("group", 1),
    )


def _batch_norm(node: Node) -> Layer:
    return node.layer("norm", eps=node.attributes.get("epsilon", 1e-5))


def _gemm(node: Node) -> Layer | None:
    if any(node.attributes.get(name, 1.0) != 1 for name in ("alpha", "beta")):
        return None
    return node.layer("linear") if node.attributes.get("transB", 0) else _matmul(node)


def _matmul(node: Node) -> Layer:
    weight, *bias = node.constants
    return replace(node, constants=(weight.T, *bias)).layer("linear")


_LAYERS: dict[str, Callable[[Node], Layer | None]] = {
    "Conv": _convolution,
    "BatchNormalization": _batch_norm,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "PRelu": lambda node: node.layer("prelu"),
    "Add": _add,
}
"""Readers by `NodeProto.op_type` (https://onnx.ai/onnx/operators/); None for a node that is no layer of a backbone."""
_OF_SHAPE = frozenset({"Shape", "Size"})
"""Operators that take no number of the image."""
_PIXELS, _NORMALIZED, _FRACTIONS = (
    (given["mean"], given["scale"]) for given in (RAW_PIXELS, PREPROCESSING, FRACTIONS)
)
"""Mean and scale of the input (x − mean) / scale for pixels x: of a network that normalizes pixels itself, of a
backbone of facetrain, and of MagFace's networks."""
_LARGEST_MEAN = 1.5
"""Mean of a batch norm of the image up to which the image can be normalized."""


def read_onnx_layers(path: Path) -> LayerGraph:
    """Return the layers of an ONNX file.

    Raises:
        ModelError: it is not an ONNX file, or the package onnx is not installed.
    """
    try:
        proto = read_model_proto(path)
        import onnx

        require_stored_weights(path, proto)
        onnx.load_external_data_for_model(proto, str(path.parent))
        require_sound_onnx(proto, path)
        return _read_layers(plain_form(path, proto), path)
    except ModelError:
        raise
    except Exception as error:
        # protobuf and onnx have errors without a common base, and any graph can be in the file.
        raise ModelError(
            f"{path}: not an ONNX graph of layers ({type(error).__name__}: {error_reason(error)})"
        ) from error


def _read_layers(model: Any, path: Path) -> LayerGraph:
    from onnx import helper

    graph = model.graph
    constants = {weight.name: _tensor(_array(weight)) for weight in graph.initializer}
    names = {graph_inputs(graph)[0].name: IMAGE}
    layers: dict[str, Layer] = {}
    for node in graph.node:
        attributes = {stated.name: helper.get_attribute_value(stated) for stated in node.attribute}
        # Further outputs, such as the mask of a dropout, serve training.
        value, inputs = node.output[0], list(node.input)
        if node.op_type == "Constant":
            (stated,) = attributes.values()
            constants[value] = _tensor(_array(stated))
        elif all(name in constants for name in inputs) or node.op_type == "Shape":
            constants[value] = _fold(node.op_type, [constants.get(name) for name in inputs], attributes)
        else:
            layers[value] = _read_layer(node.op_type, inputs, attributes, constants, names)
    named = LayerGraph(str(path), layers, graph.output[0].name, metadata=metadata_of(model))
    mean, scale = mean_and_scale(model, path)
    return backbone_form(named, Affine(1 / scale, -mean / scale))


def _read_layer(
    op_type: Any,
    inputs: list[str],
    attributes: dict[str, Any],
    constants: dict[str, Tensor],
    names: dict[str, str],
) -> Layer:
    given = tuple(constants[name] for name in inputs if name in constants)
    sources = tuple(names.get(name, name) for name in inputs if name not in constants)
    # str: in a damaged file the operator's name can be bytes.
    node = Node(str(op_type), sources, given, attributes)
    if op_type in _IDENTITIES:
        return Layer("identity", sources[:1])
    operation = _ARITHMETIC.get(op_type, "")
    in_order = operation in ("add", "mul") or inputs[0] not in constants
    if operation and in_order and len(given) == 1 and len(given[0].unique()) == 1:
        return node.with_number(operation, float(given[0].flatten()[0]))
    read = _LAYERS.get(op_type)
    return (read(node) if read else None) or Layer(node.operator, sources[:1])


def _fold(op_type: str, inputs: list[Tensor | None], attributes: dict[str, Any]) -> Tensor:
    """Return the value of a node that depends on constants only; empty for shapes, which no layer needs.

    Torch's exporter writes such nodes for slopes and, without optimization, for other weights too.
    """
    first = inputs[0] if inputs else None
    if first is not None and op_type in _IDENTITIES:
        return first
    if first is not None and op_type == "Transpose":
        return first.permute(*attributes.get("perm", reversed(range(first.dim()))))
    return torch.empty(0)


def metadata_of(model: Any) -> dict[str, Any]:
    """Return the metadata of an ONNX model, see `parse_metadata`."""
    return parse_metadata({entry.key: entry.value for entry in model.metadata_props})


def parse_metadata(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the metadata of an ONNX file that are JSON, as `facetrain export` writes them."""
    metadata: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            metadata[name] = parse_json(text)
        except ValueError:  # metadata of another program, which is not JSON
            continue
    return metadata


def mean_and_scale(model: Any, path: Path) -> tuple[float, float]:
    """Return the mean and the scale of the input (pixels − mean) / scale that a graph takes.

    Its metadata or a uint8 input state them. Without these it takes normalized images, unless its first nodes are the
    normalization itself, (x − 127.5) / 127.5 or / 128, as in InsightFace's networks for MXNet. A change of scale by a
    few percent, as from one of these to the other, is none. Other arithmetic on the image is not interpreted.

    Args:
        model: the graph in its `plain_form`, with or without its external data.
        path: its file, for the external data and for messages.

    Raises:
        ModelError: the metadata state an input that facetrain does not give, or one that the graph normalizes a second
            time; or they state none, and the first nodes compute something else.
    """
    from onnx import TensorProto

    stated, first = _stated_input(model, path), _of_first_layers(model, path)
    normalizes = all(each.is_zero_at_mid_gray and 1 / 130 < abs(each.factor) < 1 / 125 for each in first)
    if graph_inputs(model.graph)[0].type.tensor_type.elem_type == TensorProto.UINT8:
        return _PIXELS
    if stated == _NORMALIZED and first and normalizes:
        raise ModelError(
            f"{path}: its metadata ask for normalized images, and its first nodes normalize pixels: the images would "
            "be normalized twice; state mean 0 and scale 1, or export the network without these nodes"
        )
    if stated is not None:
        return stated
    others = [each for each in first if not each.is_nearly_identity]
    if others and not normalizes:
        factor, offset = others[0].factor, others[0].offset
        unknown = " (nan: several numbers, or none of the file)" if math.isnan(factor + offset) else ""
        raise ModelError(
            f"{path}: its first nodes compute x · {factor:g} + {offset:g}{unknown} for a number x of the image, so "
            "that it may take pixels from 0 to 255 or (pixels − 127.5) / 127.5; state the input in its metadata "
            "(see docs/models.md)"
        )
    return _PIXELS if first and normalizes else _NORMALIZED


def _stated_input(model: Any, path: Path) -> tuple[float, float] | None:
    """Return the mean and the scale that the metadata of a graph state; None if they state no input.

    Raises:
        ModelError: they state an input that facetrain does not give.
    """
    stated = metadata_of(model).get(PREPROCESSING_KEY)
    # An object of another program that is about something else, such as the size, states no input.
    if not isinstance(stated, dict) or not stated.keys() & {"channels", "mean", "scale", "std"}:
        return None
    given = stated.get("mean"), stated.get("scale")
    if given not in (_PIXELS, _NORMALIZED, _FRACTIONS) or stated.get("channels", "RGB") != "RGB":
        raise ModelError(
            f"{path}: its metadata preprocessing is {listed([str(stated)])}; facetrain gives RGB images as pixels, "
            "with mean 0 and scale 1 or 255, or with mean 127.5 and scale 127.5: export the network with such an input"
        )
    return given


def _of_first_layers(model: Any, path: Path) -> list[Affine]:
    """Return for each layer that takes the image what it takes, as a function of the image.

    A batch norm of the image subtracts its mean. Numbers that differ by channel or place, or that the file does not
    state, give NaN.
    """
    from onnx import helper

    constants: dict[str, Any] = {weight.name: weight for weight in model.graph.initializer}
    images = {graph_inputs(model.graph)[0].name: Affine()}
    taken = []
    for node in model.graph.node:
        operation = _ARITHMETIC.get(node.op_type, "")
        given = [constants[name] for name in node.input if name in constants]
        source = next((name for name in node.input if name in images), None)
        if node.op_type == "Constant":
            constants[node.output[0]] = helper.get_attribute_value(node.attribute[0])
        elif node.op_type in _IDENTITIES | _MOVES:
            if source is not None:
                images |= dict.fromkeys(node.output, images[source])
            elif given:
                constants[node.output[0]] = given[0]
        elif source is not None and (operation or node.op_type in _OTHER_ARITHMETIC):
            number = _number(given[0], path.parent) if operation and given else math.nan
            # The number comes first: number − x, or number / x.
            if source != node.input[0] and operation in ("sub", "div"):
                operation = f"r{operation}"
            images[node.output[0]] = images[source].then(operation, number)
        elif source is not None and node.op_type not in _OF_SHAPE:
            function = images[source]
            if node.op_type == "BatchNormalization" and node.input[3] in constants:
                mean = float(np.abs(_array(constants[node.input[3]], path.parent)).max())
                function = function if mean <= _LARGEST_MEAN else function.then("sub", mean)
            taken.append(function)
    return taken


def _number(stated: Any, folder: Path) -> float:
    numbers = _array(stated, folder).astype(np.float64)
    return float(numbers.flat[0]) if numbers.size and np.ptp(numbers) == 0 else math.nan


def _array(stated: Any, folder: Path = Path()) -> np.ndarray:
    """Return a weight, or the value of a node Constant, which can be a tensor, numbers or texts."""
    from onnx import TensorProto, numpy_helper

    if isinstance(stated, TensorProto):
        stated = numpy_helper.to_array(stated, str(folder))
    return np.asarray(stated)


def _tensor(array: np.ndarray) -> Tensor:
    """Return numbers as a tensor; it is empty for texts, which no layer needs."""
    return torch.from_numpy(array.copy()) if array.dtype.kind in "biuf" else torch.empty(0)
