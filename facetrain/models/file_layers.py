"""Layers of a file's graph, in the form of a backbone: without identities and without the normalization of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from facetrain.errors import ModelError
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph


@dataclass(frozen=True)
class Affine:
    """An affine function of a pixel p from 0 to 255: factor · p + offset."""

    factor: float = 1.0
    offset: float = 0.0

    def then(self, operation: str, number: float) -> Affine:
        """Return the function followed by `add`, `sub`, `mul`, `div`, or `rsub`: number − x. Others give NaN."""
        scale = {"add": 1, "sub": 1, "rsub": -1, "mul": number, "div": 1 / number if number else math.nan}
        shift = {"add": number, "sub": -number, "rsub": number}.get(operation, 0.0)
        factor = scale.get(operation, math.nan)
        return Affine(self.factor * factor, self.offset * factor + shift)

    @property
    def is_zero_at_mid_gray(self) -> bool:
        """Whether a pixel of 127.5 gives 0, to a relative error of 0.001."""
        # The tolerance is for rounding of the constants in the file.
        mid = 127.5 * self.factor
        return self.factor != 0 and abs(self.offset + mid) <= 1e-3 * abs(mid)

    @property
    def is_nearly_identity(self) -> bool:
        """Whether an input keeps its range, to 5 %."""
        return abs(self.factor - 1) < 0.05 and abs(self.offset) < 0.05


@dataclass(frozen=True)
class Node:
    """A node of a file's graph, before it becomes a layer."""

    operator: str
    sources: tuple[str, ...]
    """Names of the values that it takes."""
    constants: tuple[Tensor, ...]
    """The tensors of the file that it takes, in the order of its inputs."""
    attributes: Mapping[str, Any]

    def layer(self, kind: str, **options: Any) -> Layer:
        """Return a layer of one source, with the constants as its weights."""
        weights = dict(zip(("weight", "bias", "mean", "variance"), self.constants, strict=False))
        return Layer(kind, self.sources[:1], weights, options)

    def with_number(self, operation: str, number: float) -> Layer:
        """Return a layer that applies an operation of `Affine.then` with a number."""
        options = {"operation": operation, "number": number}
        return Layer(f"{operation} {number:g}", self.sources[:1], {}, options)


def backbone_form(graph: LayerGraph, image_of_pixel: Affine) -> LayerGraph:
    """Return the layers that the embedding depends on, as a backbone has them.

    Layers that change no number at inference disappear. Arithmetic on the image before the first layer becomes an
    affine function of the pixels, and a transpose of the image nothing.

    Args:
        graph: the layers of a file.
        image_of_pixel: the input of the graph, as a function of pixels.

    Raises:
        ModelError: a layer takes a value that no layer computes, or the first layers take pixels that are not centered
            on 127.5: the zero padding of the first convolution then has no counterpart in a backbone, whatever its
            weights.
    """
    images = {IMAGE: image_of_pixel}
    names: dict[str, str] = {}
    layers: dict[str, Layer] = {}
    for name, layer in graph.layers.items():
        first = layer.sources[0] if layer.sources else None
        if first in images and "number" in layer.options:
            images[name] = images[first].then(layer.options["operation"], layer.options["number"])
        elif first in images and layer.kind in ("identity", "Transpose"):
            # A transpose of the image only moves the channels: exporters write it for inputs (N, H, W, 3).
            images[name] = images[first]
        elif first is not None and layer.kind == "identity":
            names[name] = names.get(first, first)
        else:
            layers[name] = replace(
                layer, sources=tuple(names.get(source, source) for source in layer.sources)
            )
    output = names.get(graph.output, graph.output)
    needed = _needed(layers, output)
    sources = {source for layer in needed.values() for source in layer.sources}
    unknown = sources - needed.keys() - images.keys()
    if unknown or output not in needed:
        missing = min(map(str, unknown), default=output)
        raise ModelError(f"{graph.origin}: no layer computes {missing!r}, which the embedding depends on")
    taken = {images[source] for source in sources & images.keys()}
    # Layers that take different functions of the image are refused as well.
    affine = taken.pop() if len(taken) == 1 else Affine(0.0, 0.0)
    if not affine.is_zero_at_mid_gray:
        # Also an operator that no backbone has, such as an exchange of colors before the arithmetic.
        taker = next((layer for layer in needed.values() if images.keys() & set(layer.sources)), "none")
        raise ModelError(
            f"{graph.origin}: its first layer, {taker}, takes pixels times {affine.factor:g} plus {affine.offset:g}; "
            "facetrain trains networks that take (pixels − 127.5) times a number; give this one as distill.teacher"
        )
    for name, layer in needed.items():
        needed[name] = replace(
            layer, sources=tuple(IMAGE if source in images else source for source in layer.sources)
        )
    return replace(graph, layers=needed, output=output, input_scale=127.5 * affine.factor)


def _needed(layers: dict[str, Layer], output: str) -> dict[str, Layer]:
    """Return the layers on which an output depends."""
    needed, to_visit = set(), [output]
    while to_visit:
        name = to_visit.pop()
        if name in layers and name not in needed:
            needed.add(name)
            to_visit += layers[name].sources
    return {name: layer for name, layer in layers.items() if name in needed}
