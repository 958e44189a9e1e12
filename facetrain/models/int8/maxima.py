"""PReLUs written as maxima, which onnxruntime computes several times as fast.

max(x, a·x) equals PReLU(x) for slopes a ≤ 1. For a channel with a > 1, −a · max(−x, −x / a) equals it: the layer before
the PReLU gets the opposite sign in this channel, the slope becomes 1 / a, and the inputs of the layer after it are
multiplied by −a.
"""

# C channels

from __future__ import annotations

from dataclasses import replace

import torch

from facetrain.models.int8.equalization import divide_outputs, multiply_inputs, pairs
from facetrain.models.int8.network import MAXIMUM, Int8Network


def replace_prelus(network: Int8Network) -> Int8Network:
    """Return a network with the same embeddings whose PReLUs are layers of kind `MAXIMUM`.

    A PReLU with slopes over 1 remains one if several layers take its value.
    """
    layers = dict(network.graph.layers)
    for pair in pairs(network.graph):
        prelu = layers[pair.between]
        if prelu.kind == "prelu":
            slope = prelu.weights["weight"]
            steep = slope > 1
            below_one = {"weight": torch.where(steep, 1 / slope, slope)}
            layers[pair.between] = replace(prelu, kind=MAXIMUM, weights=below_one)
            # One slope for all channels if the PReLU has only one.
            slope_C = slope.flatten().expand(len(layers[pair.first].weights["weight"]))
            steep_C = steep.flatten().expand_as(slope_C)
            layers[pair.first] = divide_outputs(layers[pair.first], torch.where(steep_C, -1.0, 1.0))
            layers[pair.second] = multiply_inputs(layers[pair.second], torch.where(steep_C, -slope_C, 1.0))
    for name, layer in layers.items():
        if layer.kind == "prelu" and bool((layer.weights["weight"] <= 1).all()):
            layers[name] = replace(layer, kind=MAXIMUM)
    return network.with_layers(layers)
