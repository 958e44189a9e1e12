"""PReLUs written as maxima, which onnxruntime computes several times as fast.

max(x, a·x) equals PReLU(x) for slopes a ≤ 1. For a channel with a > 1, −max(−x, −a·x) equals it: the layer before the
PReLU gets the opposite sign in this channel, and so do the inputs of the layer after it.
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
            sign_C = torch.where(prelu.weights["weight"] > 1, -1.0, 1.0).flatten()
            if sign_C.numel() == 1:  # one slope for all channels
                sign_C = sign_C.expand(len(layers[pair.first].weights["weight"]))
            layers[pair.first] = divide_outputs(layers[pair.first], sign_C)
            layers[pair.between] = replace(prelu, kind=MAXIMUM)
            layers[pair.second] = multiply_inputs(layers[pair.second], sign_C)
    for name, layer in layers.items():
        if layer.kind == "prelu" and bool((layer.weights["weight"] <= 1).all()):
            layers[name] = replace(layer, kind=MAXIMUM)
    return network.with_layers(layers)
