"""Cross-layer equalization: equal ranges of the channels between two layers.

One scale rounds all channels of an activation, so a channel with small values loses most of its bits. A layer's output
channel can be divided by a positive number s if the next layer's input channel is multiplied by it: convolutions are
linear, and PReLU(x / s) = PReLU(x) / s (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
Correction", ICCV 2019, section 4.1).

The paper has one scale for each weight tensor, and takes s from the ranges of two weight tensors (eq. 11). Here weights
have one scale for each output channel, so that the first tensor rounds equally well for every s. The range of the
activation takes its place, and the weights of the second layer count as shares of the largest weight of their output
channel.
"""

# B images   C channels between the two layers   O output channels of the second layer

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from facetrain.models.int8.network import MAXIMUM, Int8Network
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph

_MAX_FACTOR = 2.0**10
"""Bound of s and 1/s, for channels that are almost always 0."""


@dataclass(frozen=True)
class Pair:
    """Two layers with a value between them that nothing else takes."""

    first: str
    """Convolution, linear layer or batch norm."""
    between: str
    """The value that the second layer takes: the output of the first one, or of a PReLU after it."""
    second: str
    """Convolution or linear layer."""


def pairs(graph: LayerGraph) -> Iterator[Pair]:
    """Yield the pairs of layers that can be equalized."""
    consumers = graph.consumers()
    for second, layer in graph.layers.items():
        if layer.kind not in ("conv", "linear"):
            continue
        between = first = layer.sources[0]
        if first != IMAGE and graph.layers[first].kind in ("prelu", MAXIMUM):
            first = graph.layers[first].sources[0]
        if first == IMAGE or graph.layers[first].kind not in ("conv", "linear", "norm"):
            continue
        if all(len(consumers[name]) == 1 for name in {first, between}):
            yield Pair(first, between, second)


def channel_ranges(network: Int8Network, batches: Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the largest absolute value of each channel (C,) of each value of the float network."""
    ranges: dict[str, Tensor] = {}
    with torch.no_grad():
        for image_BCHW in batches:
            for name, value in network.values(image_BCHW, rounds=False):
                largest_C = value.abs().transpose(0, 1).flatten(1).amax(1)
                ranges[name] = torch.maximum(ranges.get(name, largest_C), largest_C)
    return ranges


def equalize(network: Int8Network, ranges: Mapping[str, Tensor]) -> Int8Network:
    """Return a network with the same embeddings, in which the channels between two layers have similar ranges.

    Args:
        network: a network without ranges of its values, because these change.
        ranges: largest absolute value of each channel, by the name of the value; see `channel_ranges`.
    """
    layers = dict(network.graph.layers)
    for pair in pairs(network.graph):
        first, second = layers[pair.first], layers[pair.second]
        # Both values between the layers are rounded: the outputs of the first layer and of a PReLU after it.
        range_C = torch.maximum(ranges[pair.first], ranges[pair.between])
        factor_C = _factors(range_C, second)
        layers[pair.first] = divide_outputs(first, factor_C)
        layers[pair.second] = multiply_inputs(second, factor_C)
    return network.with_layers(layers)


def _factors(range_C: Tensor, second: Layer) -> Tensor:
    """Return s = √(r1 / r2) (eq. 11), with r1 of the activation and r2 of the second layer's weights."""
    if second.options.get("groups", 1) == len(range_C) == len(second.weights["weight"]):
        # Depthwise: the scale of the output channel contains the factor, so that the weights do not count.
        factor_C = range_C
    else:
        share_C = _input_shares(second, len(range_C))
        factor_C = (range_C / share_C).sqrt()
    usable_C = (range_C > 0) & torch.isfinite(factor_C) & (factor_C > 0)
    if not usable_C.any():
        return torch.ones_like(range_C)
    # Around 1: a common factor of all channels changes no rounding.
    middle = factor_C[usable_C].log().mean().exp()
    return torch.where(usable_C, factor_C / middle, 1.0).clamp(1 / _MAX_FACTOR, _MAX_FACTOR)


def _input_shares(layer: Layer, channels: int) -> Tensor:
    """Return the largest weight of each input channel (C,), as a share of the largest one of its output channel."""
    weight = layer.weights["weight"].abs()
    share = weight / weight.flatten(1).amax(1).clamp(min=1e-30).view(-1, *[1] * (weight.dim() - 1))
    groups = layer.options.get("groups", 1)
    # (groups, outputs of the group, inputs of the group, …)
    return share.view(groups, len(weight) // groups, channels // groups, -1).amax((1, 3)).flatten()


def divide_outputs(layer: Layer, factor_C: Tensor) -> Layer:
    """Return a layer whose output channels are divided by `factor_C`."""
    weight, bias, factor_C = (
        layer.weights["weight"],
        layer.weights["bias"],
        factor_C.to(layer.weights["bias"]),
    )
    divided = {"weight": weight / factor_C.view(-1, *[1] * (weight.dim() - 1)), "bias": bias / factor_C}
    return replace(layer, weights=layer.weights | divided)


def multiply_inputs(layer: Layer, factor_C: Tensor) -> Layer:
    """Return a convolution or linear layer for an input whose channels are divided by `factor_C`."""
    weight = layer.weights["weight"]
    groups, channels = layer.options.get("groups", 1), len(factor_C)
    by_channel = weight.reshape(groups, len(weight) // groups, channels // groups, -1)
    multiplied = by_channel * factor_C.to(weight).view(groups, 1, channels // groups, 1)
    return replace(layer, weights=layer.weights | {"weight": multiplied.view(weight.shape)})
