"""Steps from a network to its int8 form: maxima, equalization, ranges, bias correction."""

# B images   H, W height and width

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from facetrain.errors import ModelError
from facetrain.models.inference_network import fold_norms, layers_of
from facetrain.models.int8.bias_correction import correct_biases
from facetrain.models.int8.equalization import channel_ranges, equalize
from facetrain.models.int8.maxima import replace_prelus
from facetrain.models.int8.network import Int8Network, Range
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
    return correct_biases(find_ranges(equalized, batches), _spread(image_BCHW, _BIAS_IMAGES))


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


def _spread(image_BCHW: Tensor, count: int) -> Tensor:
    """Return up to `count` of the images, evenly spaced."""
    return image_BCHW[:: -(-len(image_BCHW) // count)]
