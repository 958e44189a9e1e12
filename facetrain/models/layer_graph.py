"""Layer graph: the common form of networks of a file and of backbones, and its execution in torch."""

# B batch   C channels   H, W height and width   D embedding

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from facetrain.errors import ModelError

IMAGE = "image"
"""Name of the input of the first layers."""


@dataclass(frozen=True)
class Layer:
    """A layer of a network. It computes one value, whose name identifies the layer in its graph."""

    kind: str
    """`conv`, `linear`, `norm`, `prelu`, `maximum` (max(x, weight · x)), `add`, or `identity`, which changes no number;
    otherwise the file's name for an operator that no backbone has. A change of shape counts as `identity`: the shapes
    of the weights determine what the layers take."""
    sources: tuple[str, ...]
    """Names of the values that the layer takes."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """`weight` and for some layers `bias`; for a norm also `mean` and `variance`."""
    options: dict[str, Any] = field(default_factory=dict)
    """`stride`, `padding`, `dilation` and `groups` of a convolution; `eps` of a norm."""

    def __str__(self) -> str:
        shape = f" {'×'.join(map(str, self.weights['weight'].shape))}" if self.weights else ""
        stride = f" at stride {self.options['stride'][0]}" if self.kind == "conv" else ""
        return self.kind + shape + stride


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a network, by the names of the values that they compute, in topological order."""

    origin: str
    """The file, or the class of the backbone; for messages."""
    layers: dict[str, Layer]
    output: str
    """Name of the embedding, which the last layer computes."""
    input_scale: float = 1.0
    """The first layers take `input_scale` · (p − 127.5) / 127.5 for a pixel p from 0 to 255."""
    takes_pixels: bool = False
    """Whether the network gets pixels, which `prepare` normalizes; otherwise it gets what the first layers take."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What an ONNX file states about itself, see `parse_metadata`."""

    def consumers(self) -> dict[str, list[str]]:
        """Return the names of the layers that take each value."""
        consumers: dict[str, list[str]] = {name: [] for name in (IMAGE, *self.layers)}
        for name, layer in self.layers.items():
            for source in dict.fromkeys(layer.sources):
                consumers[source].append(name)
        return consumers

    def prepare(self, image_BCHW: Tensor) -> Tensor:
        """Return the input of the first layers for images of the network."""
        return (image_BCHW - 127.5) * (self.input_scale / 127.5) if self.takes_pixels else image_BCHW


def run_layer(layer: Layer, x: Tensor, *others: Tensor, in_place: bool = False) -> Tensor:
    """Return the value of a layer; `in_place` lets a sum write into `x`."""
    weights, options = layer.weights, layer.options
    match layer.kind:
        case "conv":
            return F.conv2d(x, weights["weight"], weights.get("bias"), **options)
        case "linear":
            # A linear layer stays in float32 also after convolutions in bfloat16.
            return F.linear(x.flatten(1).to(weights["weight"].dtype), weights["weight"], weights.get("bias"))
        case "norm":
            statistics = weights["mean"], weights["variance"]
            return F.batch_norm(x, *statistics, weights["weight"], weights["bias"], eps=options["eps"])
        case "prelu":
            return F.prelu(x, weights["weight"])
        case "maximum":
            return torch.maximum(x, x * weights["weight"].view(-1, 1, 1))
        case "add":
            return x.add_(others[0]) if in_place else x + others[0]
    raise ModelError(f"{layer}: is no layer that facetrain runs")


Runner = Callable[[str, list[Tensor], bool], Tensor]
"""Returns the value of the layer of this name, from the values of its sources. The flag says that nothing else needs
the first of them."""


def run_graph(graph: LayerGraph, image_BCHW: Tensor, run: Runner) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each layer, in the order of the graph; the last value is the embedding.

    A value is freed after its last use; else a network of 100 layers would hold all of them.
    """
    last_use = {source: name for name, layer in graph.layers.items() for source in layer.sources}
    values = {IMAGE: image_BCHW}
    for name, layer in graph.layers.items():
        inputs = [values[source] for source in layer.sources]
        freed = [source for source in dict.fromkeys(layer.sources) if last_use[source] == name]
        for source in freed:
            del values[source]
        # Never the image: the caller may still need it.
        values[name] = run(name, inputs, layer.sources[0] in freed and layer.sources[0] != IMAGE)
        del inputs
        yield name, values[name]


def embed(graph: LayerGraph, image_BCHW: Tensor) -> Tensor:
    """Return the value of the last layer, from what the first layers take."""

    def run(name: str, inputs: list[Tensor], is_last_use: bool) -> Tensor:
        # An input of a sum that nothing else needs can hold the result; a backward pass may need it.
        in_place = is_last_use and not torch.is_grad_enabled()
        return run_layer(graph.layers[name], *inputs, in_place=in_place)

    return deque(run_graph(graph, image_BCHW, run), maxlen=1)[0][1]


def with_weights(graph: LayerGraph, change: Callable[[Layer, str, Tensor], Tensor]) -> LayerGraph:
    """Return a graph whose weights are the results of a function of the layer, the name and the weight."""
    layers = {
        name: replace(
            layer, weights={key: change(layer, key, weight) for key, weight in layer.weights.items()}
        )
        for name, layer in graph.layers.items()
    }
    return replace(graph, layers=layers)
