"""Simulation of an int8 network in torch: float32 numbers, rounded where onnxruntime rounds them to 8 bits.

Convolutions and linear layers take activations of 8 bits without sign, with one scale for the whole value, and weights
of 8 bits with sign, with one scale for each output channel. A convolution rounds its output to 8 bits too: onnxruntime
computes it in integers only between two rounded values. Other layers compute in float32.

onnxruntime also rounds a bias, to a multiple of the product of both scales. The simulation leaves this out: it is a
hundred times finer than the rounding of the layer's output.
"""

# B images   C channels   H, W height and width   D embedding

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph, run_graph, run_layer

ACTIVATION_LEVELS = 255
"""Largest rounded activation (uint8)."""
WEIGHT_LEVELS = 127
"""Largest rounded weight; −128 is not used, so that the zero point is 0."""
MAXIMUM = "maximum"
"""Kind of layer that replaces PReLUs, see `replace_prelus`."""


@dataclass(frozen=True)
class Range:
    """Interval of an activation that 8 bits represent; it contains 0."""

    low: float
    high: float

    @property
    def scale(self) -> float:
        """Distance of two neighboring levels."""
        # onnxruntime computes it in float64, and stores float32.
        scale = (self.high - self.low) / ACTIVATION_LEVELS
        return float(torch.tensor(scale, dtype=torch.float32)) if scale > 0 else 1.0

    @property
    def zero_point(self) -> int:
        """Level of 0."""
        step = (self.high - self.low) / ACTIVATION_LEVELS
        return round(-self.low / step) if step > 0 else 0

    def round(self, x: Tensor) -> Tensor:
        """Return the nearest representable values."""
        # Multiplied by the float32 number 1 / scale, as torch does. torch's own `fake_quantize_per_tensor_affine`
        # gives the same numbers in seven times the time (CPU, torch 2.13).
        levels = x.mul(float(1 / torch.tensor(self.scale, dtype=torch.float32)))
        levels.round_().clamp_(-self.zero_point, ACTIVATION_LEVELS - self.zero_point)
        return levels.mul_(self.scale)


@dataclass(frozen=True)
class Int8Network:
    """Layers of a network with folded batch norms, and the ranges of the activations that are rounded."""

    graph: LayerGraph
    """Layers as `fold_norms` gives them; weights in the type in which they compute."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """By the name of the value."""

    def int8_layers(self) -> dict[str, Layer]:
        """Return the convolutions and linear layers that compute in int8."""
        return {name: layer for name, layer in self.graph.layers.items() if layer.kind in ("conv", "linear")}

    def rounded_values(self) -> list[str]:
        """Return the names of the values that are rounded to 8 bits."""
        names: dict[str, None] = {}
        for name, layer in self.int8_layers().items():
            # A dict, as an ordered set: two layers may take one value.
            names[layer.sources[0]] = None
            if layer.kind == "conv":
                names[name] = None
        return list(names)

    def with_layers(self, layers: Mapping[str, Layer]) -> Int8Network:
        """Return the network with other weights in some of its layers."""
        return replace(self, graph=replace(self.graph, layers=dict(self.graph.layers) | dict(layers)))

    def embed(self, image_BCHW: Tensor, *, rounds: bool = True) -> Tensor:
        """Map prepared images (B, 3, H, W) to embeddings (B, D); without `rounds`, as the float network does."""
        return deque(self.values(image_BCHW, rounds=rounds), maxlen=1)[0][1]

    def values(self, image_BCHW: Tensor, *, rounds: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the value of the image and of each layer, before it is rounded where it is taken.

        The last value is the embedding.
        """
        int8 = self.int8_layers() if rounds else {}

        def run(name: str, inputs: list[Tensor], _: bool) -> Tensor:
            sources = self.graph.layers[name].sources
            taken = [
                self.ranges[source].round(x) if source in int8 and int8[source].kind == "conv" else x
                for source, x in zip(sources, inputs, strict=True)
            ]
            return self.value(name, taken, rounds=name in int8)

        image = self.graph.prepare(image_BCHW)
        yield IMAGE, image
        yield from run_graph(self.graph, image, run)

    def value(self, name: str, inputs: Sequence[Tensor], *, rounds: bool) -> Tensor:
        """Return the value of a layer, before its rounding, from the values of its sources.

        With `rounds`, which convolutions and linear layers take, the input and the weights are rounded.
        """
        layer, (x, *others) = self.graph.layers[name], inputs
        if rounds:
            x = self.ranges[layer.sources[0]].round(x)
            weight = round_weight(layer.weights["weight"])
            layer = replace(layer, weights=layer.weights | {"weight": weight})
        return run_layer(layer, x, *others)


def weight_scales(weight: Tensor) -> Tensor:
    """Return the scale of each output channel (C,): its largest weight is the last level."""
    scale_C = weight.flatten(1).abs().amax(1) / WEIGHT_LEVELS
    return torch.where(scale_C > torch.finfo(torch.float32).tiny, scale_C, 1.0).float()


def round_weight(weight: Tensor) -> Tensor:
    """Return the nearest weights that 8 bits represent."""
    scale_C = weight_scales(weight).to(weight).view(-1, *[1] * (weight.dim() - 1))
    # Divided as onnxruntime's quantizer does; torch's fake quantization multiplies by 1 / scale, and rounds some
    # weights to the other neighbor.
    return (weight / scale_C).round().clamp(-WEIGHT_LEVELS, WEIGHT_LEVELS) * scale_C
