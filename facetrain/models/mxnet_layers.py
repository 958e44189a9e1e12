"""The layers of MXNet's networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.models.layer_graph import Layer, Network, Reader
from facetrain.models.mxnet_symbol import (
    Attributes,
    attributes_of,
    embedding_node,
    needed_nodes,
    read_symbol,
)

_NOTHING = {"Dropout", "identity", "_copy", "BlockGrad", "Flatten"}
_ADD = {"elemwise_add", "_plus", "_Plus", "broadcast_add"}
_ARITHMETIC = {
    "_plus_scalar": "add", "_PlusScalar": "add", "_minus_scalar": "sub", "_MinusScalar": "sub",
    "_mul_scalar": "mul", "_MulScalar": "mul", "_div_scalar": "div", "_DivScalar": "div",
}  # fmt: skip


def read_mxnet_layers(path: Path) -> Network:
    """Return the layers of a network by its `NAME-symbol.json` or its `NAME-0000.params`.

    Raises:
        ModelError: one of the two is missing or broken.
    """
    where, symbol, weights = read_symbol(path)
    try:
        return _read(symbol, weights, where)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{where}: is no graph of MXNet's ({type(error).__name__}: {error})") from error


def _read(symbol: Any, weights: dict[str, Tensor], where: str) -> Network:
    nodes, output = symbol["nodes"], embedding_node(symbol)
    needed = needed_nodes(nodes, output)
    images = [n for n in needed if nodes[n]["op"] == "null" and nodes[n]["name"] not in weights]
    reader = Reader(where, str(images[0]))
    for number in needed:
        node, value = nodes[number], str(number)
        if node["op"] == "null":
            continue
        inputs = [entry[0] for entry in node["inputs"]]
        source, attributes = str(inputs[0]), attributes_of(node)
        given = [weights[name] for n in inputs[1:] if (name := nodes[n]["name"]) in weights]
        if node["op"] in _NOTHING:
            reader.same(value, source)
        elif node["op"] in _ARITHMETIC:
            reader.arithmetic(value, source, _ARITHMETIC[node["op"]], float(attributes["scalar"]))
        elif node["op"] in _ADD:
            reader.add(value, Layer("add", tuple(map(str, inputs))))
        else:
            reader.add(value, _layer(node["op"], source, attributes, given))
    return reader.network(str(output))


def _layer(op: str, source: str, attributes: Attributes, given: list[Tensor]) -> Layer:
    names = ("weight", "bias", "mean", "variance")
    weights = dict(zip(names, given, strict=False))
    match op:
        case "Convolution":
            pairs = {"stride": ("stride", 1), "padding": ("pad", 0), "dilation": ("dilate", 1)}
            options: dict[str, Any] = {name: attributes.pair(*key) for name, key in pairs.items()}
            groups = {"groups": int(attributes.number("num_group", 1))}
            return Layer("conv", (source,), weights, options | groups)
        case "BatchNorm":
            if attributes.flag("fix_gamma", True):
                weights["weight"] = torch.ones_like(weights["weight"])
            return Layer("norm", (source,), weights, {"eps": attributes.number("eps", 1e-3)})
        case "FullyConnected":
            return Layer("linear", (source,), weights)
        case "LeakyReLU" if attributes.get("act_type") == "prelu":
            return Layer("prelu", (source,), weights)
    return Layer(op, (source,))
