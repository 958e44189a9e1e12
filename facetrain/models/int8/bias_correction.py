"""Bias correction: the mean error of each channel, subtracted from the bias.

Rounded weights and activations shift the mean of a layer's output. The bias takes the shift away (Nagel et al.,
"Data-Free Quantization Through Weight Equalization and Bias Correction", ICCV 2019, section 4.2). The paper
computes the shift from the batch norms; here it is measured on images, because the norms are folded.
"""

# B images   C channels   H, W height and width

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from facetrain.models.int8.network import Int8Network


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
