"""MXNet networks: run by torch (`open_mxnet`), or read as layers (`read_mxnet_layers`).

The normalization is part of such a graph: it takes pixels from 0 to 255.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.layer_graph import Affine, LayerGraph, LayerGraphBuilder, Node
from facetrain.models.mxnet_operators import OPERATORS, Computation
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

    def __init__(self, symbol: Any, weights: dict[str, Tensor], origin: str) -> None:
        """Build the network of a decoded graph; `origin` is its path, for messages.

        Raises:
            ModelError: the graph has an unknown operator, or there are no weights for a node.
        """
        super().__init__()
        self._symbol, self._weights, self._origin = symbol, weights, origin
        nodes = symbol["nodes"]
        names = [node["name"] for node in nodes]
        self._output = embedding_node(symbol)
        self._steps: list[tuple[int, Computation, list[int]]] = []
        self._image = -1
        for number in needed_nodes(nodes, self._output):
            node = nodes[number]
            if node["op"] != "null":
                self._steps.append((number, _computation(node, origin), input_nodes(node)))
            elif names[number] in weights:
                self.register_buffer(f"_{number}", weights[names[number]].float())
            elif self._image < 0:
                self._image = number
            else:
                raise ModelError(f"{origin}: no weights for the node {names[number]}")
        self._last_use = {source: number for number, _, sources in self._steps for source in sources}

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map pixels (B, 3, H, W) to embeddings (B, D)."""
        values = {self._image: image_BCHW}
        for number, compute, sources in self._steps:
            values[number] = compute(
                *(values[s] if s in values else self.get_buffer(f"_{s}") for s in sources)
            )
            for source in sources:
                # Free each feature map after its last use; else a network of 100 layers would hold all of them.
                if self._last_use[source] == number:
                    values.pop(source, None)
        return values[self._output]

    def layers(self) -> LayerGraph:
        """Return the network as layers.

        Raises:
            ModelError: its graph has no such form.
        """
        return _layers_of(self._symbol, self._weights, self._origin)


def open_mxnet(path: Path) -> MxnetNetwork:
    """Open a network by its `NAME-symbol.json` or its `NAME-0000.params`, in evaluation mode.

    Raises:
        ModelError: one of the two files is missing or damaged, or the graph has an unknown operator.
    """
    origin, symbol, weights = read_symbol(path)
    try:
        return MxnetNetwork(symbol, weights, origin).eval()
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise not_a_graph(origin, error) from error


def read_mxnet_layers(path: Path) -> LayerGraph:
    """Return the layers of a network by its `NAME-symbol.json` or its `NAME-0000.params`.

    Raises:
        ModelError: one of the two files is missing or damaged.
    """
    origin, symbol, weights = read_symbol(path)
    return _layers_of(symbol, weights, origin)


def _layers_of(symbol: Any, weights: dict[str, Tensor], origin: str) -> LayerGraph:
    try:
        return _read_layers(symbol, weights, origin)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise not_a_graph(origin, error) from error


def _read_layers(symbol: Any, weights: dict[str, Tensor], origin: str) -> LayerGraph:
    nodes, output = symbol["nodes"], embedding_node(symbol)
    needed = needed_nodes(nodes, output)
    images = [n for n in needed if nodes[n]["op"] == "null" and nodes[n]["name"] not in weights]
    builder = LayerGraphBuilder(origin, str(images[0]), Affine())
    for number in needed:
        if nodes[number]["op"] == "null":
            continue
        node = _read_node(nodes, number, weights)
        operator, source = OPERATORS.get(node.operator), node.sources[0]
        if operator is not None and operator.is_identity:
            builder.alias(node.value, source)
        elif operator is not None and operator.arithmetic:
            builder.arithmetic(node.value, source, operator.arithmetic, float(node.attributes["scalar"]))
        else:
            builder.layer(node, operator.layer if operator is not None else None)
    return builder.build(str(output))


def _read_node(nodes: list[Any], number: int, weights: dict[str, Tensor]) -> Node:
    node = nodes[number]
    inputs = input_nodes(node)
    constants = tuple(weights[name] for n in inputs[1:] if (name := nodes[n]["name"]) in weights)
    return Node(node["op"], str(number), tuple(map(str, inputs)), constants, attributes_of(node))


def _computation(node: Any, origin: str) -> Computation:
    if node["op"] not in OPERATORS:
        raise ModelError(
            f"{origin}: the node {node['name']} has the operator {node['op']}, which facetrain cannot run; "
            "export the network to ONNX with MXNet"
        )
    return OPERATORS[node["op"]].run(attributes_of(node))
