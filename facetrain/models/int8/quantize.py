"""Steps from a network to its int8 form: maxima, equalization, ranges, bias correction.

**Maxima.** onnxruntime computes a maximum several times as fast as a PReLU. max(x, a·x) equals PReLU(x) for slopes
a ≤ 1. For a channel with a > 1, −a · max(−x, −x / a) equals it: the layer before the PReLU gets the opposite sign in
this channel, the slope becomes 1 / a, and the inputs of the layer after it are multiplied by −a.

**Bias correction.** Rounded weights and activations shift the mean of a layer's output. The bias takes the shift away
(Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2). The
paper computes the shift from the batch norms; here it is measured on images, because the norms are folded.
"""

# B images   C channels   H, W height and width

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from facetrain.data.dataset import evenly_spread
from facetrain.errors import ModelError
from facetrain.models.inference_network import fold_norms, layers_of
from facetrain.models.int8.equalization import (
    channel_ranges,
    divide_outputs,
    equalize,
    multiply_inputs,
    pairs,
)
from facetrain.models.int8.network import MAXIMUM, Int8Network, Range
from facetrain.models.layer_graph import with_weights

_BATCH_SIZE = 16
_BIAS_IMAGES = 64
"""Images for the bias correction, which keeps the values of all of them in memory."""


def folded_network(network: nn.Module) -> Int8Network | None:
    """Return a network with folded batch norms and PReLUs as maxima, in float32 and without ranges.

    None for a network that is not an IResNet, a MobileFaceNet or a network of MXNet with their kinds of layers.
    """
    try:
        folded = fold_norms(layers_of(network))
    except ModelError:
        return None
    return replace_prelus(Int8Network(with_weights(folded, lambda _layer, _name, weight: weight.float())))


def quantize(network: Int8Network, image_BCHW: Tensor) -> Int8Network:
    """Return a network with equalized weights, ranges and corrected biases.

    Args:
        network: The network of `folded_network`.
        image_BCHW: Prepared images for calibration.
    """
    batches = image_BCHW.split(_BATCH_SIZE)
    # The ranges come after the equalization, which changes them, and the biases after the ranges that round them.
    equalized = equalize(network, channel_ranges(network, batches))
    spread = image_BCHW[evenly_spread(len(image_BCHW), _BIAS_IMAGES)]
    return correct_biases(find_ranges(equalized, batches), spread)


def find_ranges(network: Int8Network, batches: Iterable[Tensor]) -> Int8Network:
    """Return the network with ranges of its rounded values: from the smallest to the largest number on images.

    After the equalization, ranges that leave out the largest numbers gain nothing (docs/log/log.md).

    Args:
        network: Layers; its ranges are replaced.
        batches: Prepared images (B, 3, H, W).
    """
    ranges = dict.fromkeys(network.rounded_values(), Range(0.0, 0.0))
    with torch.no_grad():
        for image_BCHW in batches:
            for name, value in network.values(image_BCHW, rounds=False):
                if name in ranges:
                    low, high = map(float, value.aminmax())
                    ranges[name] = Range(min(low, ranges[name].low), max(high, ranges[name].high))
    return replace(network, ranges=ranges)


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


def correct_biases(network: Int8Network, image_BCHW: Tensor) -> Int8Network:
    """Return a network whose int8 layers have, on these images, outputs with the means of the float network."""
    int8 = network.int8_layers()
    corrected = {}
    exact_values = network.values(image_BCHW, rounds=False)
    with torch.no_grad():
        # Layer by layer in both networks: a layer is corrected for the inputs that the corrected layers before it give.
        for name, rounded in network.values(image_BCHW, rounds=True):
            exact = next(exact_values)[1]
            if name not in int8:
                continue
            shift_C = (exact - rounded).transpose(0, 1).flatten(1).mean(1)
            rounded += shift_C.view(-1, *[1] * (rounded.dim() - 2))
            layer = int8[name]
            corrected[name] = replace(
                layer, weights=layer.weights | {"bias": layer.weights["bias"] + shift_C}
            )
    return network.with_layers(corrected)
