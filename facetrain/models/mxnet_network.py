"""MXNet networks: a graph of layers, run by torch.

The normalization is part of such a graph: it takes pixels from 0 to 255. The operators and their defaults are the ones
of MXNet 1.x, as far as InsightFace's IResNets and MobileFaceNets use them
(https://mxnet.apache.org/versions/1.9.1/api/python/docs/api/symbol/).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.file_layers import Affine, Node, backbone_form
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph, embed
from facetrain.models.mxnet_symbol import (
    attributes_of,
    embedding_node,
    input_nodes,
    needed_nodes,
    not_a_graph,
    read_symbol,
)


class MxnetNetwork(nn.Module):
    """Layers of an MXNet graph with its weights. It maps pixels from 0 to 255, (B, 3, H, W) RGB, to (B, D)."""

    def __init__(self, graph: LayerGraph) -> None:
        """Take the layers of a file, in the form of a backbone."""
        super().__init__()
        self._graph = graph
        for number, layer in enumerate(graph.layers.values()):
            for key, weight in layer.weights.items():
                # As buffers the weights follow the network to its device.
                self.register_buffer(f"_{number}_{key}", weight.float())

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pixels (B, 3, H, W) to embeddings (B, D)."""
        graph = self.layers()
        return embed(graph, graph.prepare(image_BCHW))

    def layers(self) -> LayerGraph:
        """Return the network as layers of a backbone."""
        # The buffers, in place of the weights of the file, have the device and the type of the module.
        layers = {
            name: replace(layer, weights={key: self.get_buffer(f"_{number}_{key}") for key in layer.weights})
            for number, (name, layer) in enumerate(self._graph.layers.items())
        }
        return replace(self._graph, layers=layers)


def open_mxnet(path: Path) -> MxnetNetwork:
    """Open a network by its `NAME-symbol.json` or its `NAME-0000.params`, in evaluation mode.

    Raises:
        ModelError: one of the two files is missing or damaged, or the graph is not made of the layers of a backbone.
    """
    origin, symbol, weights = read_symbol(path)
    try:
        graph = backbone_form(_read_graph(symbol, weights, origin), Affine())
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise not_a_graph(origin, error) from error
    return MxnetNetwork(replace(graph, takes_pixels=True)).eval()


def _read_graph(symbol: Any, weights: dict[str, Tensor], origin: str) -> LayerGraph:
    nodes, output = symbol["nodes"], embedding_node(symbol)
    names: dict[int, str] = {}
    layers: dict[str, Layer] = {}
    for number in needed_nodes(nodes, output):
        node = nodes[number]
        if node["op"] != "null":
            names[number] = str(number)
            layers[str(number)] = _read_layer(node, names, nodes, weights, origin)
        elif node["name"] not in weights:
            # The first node without weights is the image; a second one lacks its weights.
            if IMAGE in names.values():
                raise ModelError(f"{origin}: no weights for the node {node['name']}")
            names[number] = IMAGE
    return LayerGraph(origin, layers, names[output])


def _read_layer(
    node: Any, names: dict[int, str], nodes: list[Any], weights: dict[str, Tensor], origin: str
) -> Layer:
    inputs = input_nodes(node)
    sources = tuple(names[number] for number in inputs if number in names)
    constants = tuple(weights[nodes[number]["name"]] for number in inputs if number not in names)
    read = _OPERATORS.get(node["op"])
    layer = read(Node(node["op"], sources, constants, attributes_of(node))) if read else None
    if layer is None:
        raise ModelError(
            f"{origin}: the node {node['name']} has the operator {node['op']}, which is no layer of an IResNet or a "
            "MobileFaceNet; export the network to ONNX with MXNet"
        )
    return layer


def _convolution(node: Node) -> Layer:
    given = node.attributes
    return node.layer(
        "conv",
        stride=given.get("stride", (1, 1)),
        padding=given.get("pad", (0, 0)),
        dilation=given.get("dilate", (1, 1)),
        groups=given.get("num_group", 1),
    )


def _batch_norm(node: Node) -> Layer:
    layer = node.layer("norm", eps=node.attributes.get("eps", 1e-3))
    if node.attributes.get("fix_gamma", True):
        # The file stores a gamma here too, but MXNet ignores it.
        layer.weights["weight"] = torch.ones_like(layer.weights["weight"])
    return layer


def _leaky_relu(node: Node) -> Layer | None:
    return node.layer("prelu") if node.attributes.get("act_type", "leaky") == "prelu" else None


def _fully_connected(node: Node) -> Layer | None:
    return node.layer("linear") if node.attributes.get("flatten", True) else None


def _add(node: Node) -> Layer | None:
    # A sum with a weight of the file is no shortcut.
    return None if node.constants else Layer("add", node.sources)


def _cast(node: Node) -> Layer | None:
    # An fp16 training leaves casts to float16 and back, which change no number beyond rounding.
    return Layer("identity", node.sources) if str(node.attributes["dtype"]).startswith("float") else None


def _with_number(operation: str) -> Callable[[Node], Layer]:
    return lambda node: node.with_number(operation, float(node.attributes["scalar"]))


_OPERATORS: dict[str, Callable[[Node], Layer | None]] = {
    "Convolution": _convolution,
    "BatchNorm": _batch_norm,
    "LeakyReLU": _leaky_relu,
    "FullyConnected": _fully_connected,
    **dict.fromkeys(
        ("Dropout", "Flatten", "identity", "_copy", "BlockGrad"),
        lambda node: Layer("identity", node.sources),
    ),
    # MXNet has renamed its arithmetic operators; files have every name.
    **dict.fromkeys(("Cast", "cast", "amp_cast"), _cast),
    **dict.fromkeys(("elemwise_add", "_plus", "_Plus", "broadcast_add"), _add),
    **dict.fromkeys(("_plus_scalar", "_PlusScalar"), _with_number("add")),
    **dict.fromkeys(("_minus_scalar", "_MinusScalar"), _with_number("sub")),
    **dict.fromkeys(("_mul_scalar", "_MulScalar"), _with_number("mul")),
    **dict.fromkeys(("_div_scalar", "_DivScalar"), _with_number("div")),
}
"""Readers by the field `op` of a node; None for a node that is no layer of a backbone."""
