"""The layers of networks that came as ONNX."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.models.layer_graph import Layer, Network, Reader, applied, around_middle

_NOTHING = {"Dropout", "Identity", "Flatten", "Reshape", "Transpose", "Cast"}
"""Of the image or the features: what the layers behind take, their weights' shapes tell."""
_ARITHMETIC = {"Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div"}


def read_onnx_layers(path: Path) -> Network:
    """Return the layers of an ONNX file.

    Raises:
        ModelError: it is none, or onnx is not installed.
    """
    try:
        import onnx
    except ImportError as error:
        raise ModelError(f"{path}: needs onnx: install facetrain[onnx]") from error
    try:
        return _read(onnx, onnx.load(str(path)), str(path))
    except ModelError:
        raise
    except Exception as error:  # protobuf's own, onnx's own, and whatever a graph that is none leads to
        said = " ".join(str(error).split())[:200]
        raise ModelError(f"{path}: is no ONNX graph of layers ({type(error).__name__}: {said})") from error


def _read(onnx: Any, model: Any, where: str) -> Network:
    graph = model.graph
    constants = {found.name: _tensor(onnx, found) for found in graph.initializer}
    image = next(found for found in graph.input if found.name not in constants)
    factor, offset = _normalization(onnx, model, image)
    reader = Reader(where, image.name, factor=factor, offset=offset)
    for node in graph.node:
        attributes = {found.name: onnx.helper.get_attribute_value(found) for found in node.attribute}
        value, inputs = node.output[0], list(node.input)
        if node.op_type == "Constant":
            constants[value] = _tensor(onnx, attributes["value"])
        elif all(name in constants for name in inputs) or node.op_type == "Shape":
            constants[value] = _folded(node.op_type, [constants.get(name) for name in inputs], attributes)
        elif node.op_type in _NOTHING:
            reader.same(value, inputs[0])
        else:
            _take(reader, node.op_type, value, inputs, attributes, constants)
    return reader.network(graph.output[0].name)


def _folded(op: str, given: list[Tensor | None], attributes: dict[str, Any]) -> Tensor:
    """Return what a step makes of constants; of shapes nothing, which is no layer's weight."""
    found = given[0] if given else None
    if found is not None and op == "Identity":
        return found
    if found is not None and op == "Transpose":
        return found.permute(*attributes["perm"])
    return torch.empty(0)


def _take(
    reader: Reader,
    op: str,
    value: str,
    inputs: list[str],
    attributes: dict[str, Any],
    constants: dict[str, Tensor],
) -> None:
    given = [constants[name] for name in inputs if name in constants]
    (source, *others) = [name for name in inputs if name not in constants]
    if op in _ARITHMETIC and len(given) == 1 and given[0].numel() == 1 and source == inputs[0]:
        reader.arithmetic(value, source, _ARITHMETIC[op], float(given[0]))
    elif op == "Add" and not given:
        reader.add(value, Layer("add", (source, *others)))
    else:
        reader.add(value, _layer(op, source, attributes, given))


def _layer(op: str, source: str, attributes: dict[str, Any], given: list[Tensor]) -> Layer:
    weights = dict(zip(("weight", "bias", "mean", "variance"), given, strict=False))
    match op:
        case "Conv" if (options := _convolution(attributes, weights["weight"])) is not None:
            return Layer("conv", (source,), weights, options)
        case "BatchNormalization":
            return Layer("norm", (source,), weights, {"eps": attributes.get("epsilon", 1e-5)})
        case "Gemm" if all(attributes.get(name, 1.0) == 1 for name in ("alpha", "beta")):
            weights["weight"] = weights["weight"] if attributes.get("transB", 0) else weights["weight"].T
            return Layer("linear", (source,), weights)
        case "MatMul":
            return Layer("linear", (source,), {"weight": weights["weight"].T})
        case "PRelu":
            return Layer("prelu", (source,), weights)
    return Layer(str(op), (source,))  # in a damaged file the name may be bytes


def _convolution(attributes: dict[str, Any], weight: Tensor) -> dict[str, Any] | None:
    """Return a convolution's options as torch has them, or None where torch has none such."""
    size = weight.dim() - 2
    pads = tuple(attributes.get("pads", [0] * 2 * size))
    if pads[:size] != pads[size:] or attributes.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    return {
        "stride": tuple(attributes.get("strides", [1] * size)),
        "padding": pads[:size],
        "dilation": tuple(attributes.get("dilations", [1] * size)),
        "groups": attributes.get("group", 1),
    }


def _normalization(onnx: Any, model: Any, image: Any) -> tuple[float, float]:
    """Return by what a pixel is multiplied, and what is added, to make what the file takes."""
    if image.type.tensor_type.elem_type == onnx.TensorProto.UINT8:
        return 1.0, 0.0
    notes = {found.key: found.value for found in model.metadata_props}
    if "preprocessing" not in notes:
        return (1.0, 0.0) if takes_pixels(model) else (1 / 127.5, -1.0)
    said = json.loads(notes["preprocessing"])
    return 1 / said["scale"], -said["mean"] / said["scale"]


def takes_pixels(model: Any) -> bool:
    """Whether a graph of floats takes pixels from 0 to 255, which it brings around 0 itself, as MXNet's do.

    Where it takes (pixels − 127.5) / 127.5, whatever it adds or subtracts first leaves the middle at 0.
    """
    from onnx import numpy_helper

    numbers = {
        found.name: numpy_helper.to_array(found) for found in model.graph.initializer if _is_number(found)
    }
    lines = {found.name: (1.0, 0.0) for found in model.graph.input}
    for node in model.graph.node:
        for found in node.attribute:
            if node.op_type == "Constant" and found.name == "value" and _is_number(found.t):
                numbers[node.output[0]] = numpy_helper.to_array(found.t)
        if not node.input or node.input[0] not in lines:
            continue
        line, given = lines[node.input[0]], [numbers[name] for name in node.input[1:] if name in numbers]
        if node.op_type in _ARITHMETIC and given:
            lines[node.output[0]] = applied(line, _ARITHMETIC[node.op_type], float(given[0].item()))
        elif node.op_type in _NOTHING:
            lines[node.output[0]] = line
        elif line[1] and around_middle(line):
            return True
    return False


def _is_number(found: Any) -> bool:
    return math.prod(found.dims) == 1


def _tensor(onnx: Any, found: Any) -> Tensor:
    return torch.from_numpy(onnx.numpy_helper.to_array(found).copy())
