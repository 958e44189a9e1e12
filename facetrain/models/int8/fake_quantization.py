"""Quantization-aware training: the network computes with the rounding of its int8 file, and the gradient ignores it.

The forward pass is that of `Int8Network`, which `facetrain export --int8 static` writes: batch norms folded with fixed
statistics (Jacob et al., "Quantization and Training of Neural Networks", CVPR 2018, section 3), weights with one scale
for each output channel, activations with one fixed range. The backward pass takes the rounding for the identity, and is
0 outside of a range (straight-through estimator, Bengio et al., arXiv 1308.3432, section 4).

torch.ao.quantization is deprecated, and torchao's modules would fold and place the rounding differently than the
exported file does. Of torch only `fake_quantize_per_tensor_affine` is used.
"""

# B images   C channels   D embedding   H, W height and width

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.errors import ModelError
from facetrain.files import error_reason
from facetrain.models.inference_network import layers_with_statistics
from facetrain.models.int8.network import MAXIMUM, Int8Network, Range
from facetrain.models.int8.quantize import fold, folded_network, quantize
from facetrain.models.layer_graph import Layer

RANGES_KEY = "int8"
"""Key of a model file's description under which the ranges are."""


class FakeQuantized(nn.Module):
    """A backbone that computes as its int8 file does, with gradients for its own parameters."""

    def __init__(self, backbone: Backbone, ranges: Mapping[str, Range]) -> None:
        """Take a backbone of `prepare`, on its device, and the ranges of its activations."""
        super().__init__()
        self.backbone = backbone
        self.ranges = dict(ranges)
        """By the name of the value, as in `Int8Network`."""
        # The parameters themselves: the tensors of the layer graph have no gradient.
        parameters = dict(backbone.named_parameters())
        graph = layers_with_statistics(backbone)
        layers = {name: _with_parameters(name, layer, parameters) for name, layer in graph.layers.items()}
        self._graph = replace(graph, layers=layers)

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D)."""
        # A PReLU of `prepare` equals the maximum in the file.
        return replace(fold(self._graph), ranges=self.ranges).embed(image_BCHW)

    def description(self) -> dict[str, Any]:
        """Return what a model file describes of the quantization; see `read_ranges`."""
        ranges = {name: [one.low, one.high] for name, one in self.ranges.items()}
        return {RANGES_KEY: {"ranges": ranges}}

    def load_description(self, description: Mapping[str, Any], origin: str) -> None:
        """Take the ranges of a checkpoint.

        Raises:
            ModelError: it has none, or those of other values.
        """
        ranges = read_ranges(description, fold(self._graph), origin)
        if ranges is None:
            raise ModelError(f"{origin}: has no ranges of activations; it was trained without model.quantize")
        self.ranges = ranges


def prepare(backbone: Backbone, image_BCHW: Tensor) -> dict[str, Range]:
    """Give a backbone the weights from which its quantization-aware training starts, and return the ranges.

    Its batch norms are folded, its channels equalized and its biases corrected, as in an export. The weights are
    written back, so that the float network has almost the embeddings that it had. Batch norms keep their statistics,
    which become 0 and 1; their biases are trained, and so are their weights. The slopes of the PReLUs are not trained:
    one that grew over 1 would change the signs of the exported layer, and the range would no longer fit.

    Args:
        backbone: The network in training mode.
        image_BCHW: Normalized images, from which the ranges are computed.

    Raises:
        ModelError: it is not an IResNet or a MobileFaceNet.
    """
    folded = folded_network(backbone)
    if folded is None:
        raise ModelError(
            "model.quantize: works with IResNets (r18 to r2060, iresnet) and MobileFaceNets; "
            "set it to null or choose such a model.backbone"
        )
    quantized = quantize(folded, image_BCHW)
    for layer in quantized.graph.layers.values():
        # A shared slope over 1 stays a PReLU in the file, with the same values.
        assert layer.kind != MAXIMUM or bool((layer.weights["weight"] <= 1).all())
    _write_weights(backbone, quantized)
    for module in backbone.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()  # fixed statistics, see `freeze`
        elif isinstance(module, nn.PReLU):
            module.requires_grad_(False)
    return dict(quantized.ranges)


def read_ranges(description: Mapping[str, Any], network: Int8Network, origin: str) -> dict[str, Range] | None:
    """Return the ranges in the description of a model file; None if it was trained without quantization.

    Args:
        description: The description, from a file that may be damaged.
        network: The network, whose rounded values need a range each.
        origin: The file, for the message.

    Raises:
        ModelError: the ranges are damaged, or those of other values.
    """
    if RANGES_KEY not in description:
        return None
    try:
        pairs = description[RANGES_KEY]["ranges"]
        ranges = {name: Range(float(low), float(high)) for name, (low, high) in pairs.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{origin}: its ranges of activations are damaged ({error_reason(error)})"
        ) from error
    for name, one in ranges.items():
        if not (math.isfinite(one.high - one.low) and one.low <= 0 <= one.high):
            raise ModelError(
                f"{origin}: the range of {name} is {one.low:g} to {one.high:g}; it must contain 0"
            )
    if ranges.keys() != set(network.rounded_values()):
        raise ModelError(f"{origin}: its ranges of activations are not those of its network")
    return ranges


def _with_parameters(name: str, layer: Layer, parameters: Mapping[str, nn.Parameter]) -> Layer:
    found = {key: parameters[f"{name}.{key}"] for key in layer.weights if f"{name}.{key}" in parameters}
    return replace(layer, weights=layer.weights | found)


@torch.no_grad()
def _write_weights(backbone: Backbone, network: Int8Network) -> None:
    """Give a backbone the weights of its folded layers; a folded batch norm adds the bias and changes nothing else."""
    graph = layers_with_statistics(backbone)
    consumers = graph.consumers()
    for name, layer in network.graph.layers.items():
        weights = graph.layers[name].weights  # those of the backbone: the same memory
        if layer.kind in ("conv", "linear"):
            (norm,) = consumers[name]
            folded = graph.layers[norm]
            weights["weight"].copy_(layer.weights["weight"])
            if "bias" in weights:
                weights["bias"].zero_()
            folded.weights["weight"].fill_(1)
            folded.weights["bias"].copy_(layer.weights["bias"])
            folded.weights["mean"].zero_()
            folded.weights["variance"].fill_(1 - folded.options["eps"])
        elif layer.kind == "norm":
            weights["weight"].copy_(layer.weights["weight"])
            weights["bias"].copy_(layer.weights["bias"])
        elif layer.weights:
            weights["weight"].copy_(layer.weights["weight"])
