"""MXNet networks: a graph of layers, run by torch.

The normalization is part of such a graph: it takes pixels from 0 to 255.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.file_layers import Affine, Node, backbone_form
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph, embed, run_layer
from facetrain.models.mxnet_operators import OPERATORS
from facetrain.models.mxnet_symbol import (
    attributes_of,
    embedding_node,
    input_nodes,
    needed_nodes,
    not_a_graph,
    read_symbol,
)


class MxnetNetwork(nn.Module):
    """A graph of MXNet operators with its weights. It maps pixels from 0 to 255, (B, 3, H, W) RGB, to (B, D)."""

    def __init__(self, graph: LayerGraph) -> None:
        """Take the layers of a file."""
        super().__init__()
        self._graph = graph
        for number, layer in enumerate(graph.layers.values()):
            for key, weight in layer.weights.items():
                # As buffers the weights follow the network to its device.
                self.register_buffer(f"_{number}_{key}", weight.float())

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pixels (B, 3, H, W) to embeddings (B, D)."""
        # The buffers, in place of the weights of the file, have the device and the type of the module.
        layers = {
            name: replace(layer, weights={key: self.get_buffer(f"_{number}_{key}") for key in layer.weights})
            for number, (name, layer) in enumerate(self._graph.layers.items())
        }

        def run(name: str, inputs: list[Tensor], _: bool) -> Tensor:
            return run_layer(layers[name], *inputs)

        return embed(self._graph, image_BCHW, run)

    def layers(self) -> LayerGraph:
        """Return the network as layers of a backbone, with the weights of the file.

        Raises:
            ModelError: its graph has no such form.
        """
        return replace(backbone_form(self._graph, Affine()), takes_pixels=True)


def open_mxnet(path: Path) -> MxnetNetwork:
    """Open a network by its `NAME-symbol.json` or its `NAME-0000.params`, in evaluation mode.

    Raises:
        ModelError: one of the two files is missing or damaged, or the graph has an unknown operator.
    """
    origin, symbol, weights = read_symbol(path)
    try:
        return MxnetNetwork(_read_graph(symbol, weights, origin)).eval()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise not_a_graph(origin, error) from error


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
    if node["op"] not in OPERATORS:
        raise ModelError(
            f"{origin}: the node {node['name']} has the operator {node['op']}, which facetrain cannot run; "
            "export the network to ONNX with MXNet"
        )
    inputs, attributes = input_nodes(node), attributes_of(node)
    sources = tuple(names[number] for number in inputs if number in names)
    constants = tuple(weights[nodes[number]["name"]] for number in inputs if number not in names)
    return OPERATORS[node["op"]](Node(node["op"], sources, constants, attributes), attributes)
