"""Layer graph: the common form in which the network of a file is compared with a backbone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.errors import ModelError

IMAGE = "image"
"""Name of the input of the first layers."""


@dataclass(frozen=True)
class Layer:
    """A layer of a network. It computes one value, whose name identifies the layer in its graph."""

    kind: str
    """`conv`, `linear`, `norm`, `prelu`, `add`, or the file's name for an operator that no backbone has."""
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
    """Name of the embedding."""
    input_scale: float = 1.0
    """The first layers take `input_scale` · (p − 127.5) / 127.5 for a pixel p from 0 to 255."""

    def consumers(self) -> dict[str, list[str]]:
        """Return the names of the layers that take each value."""
        found: dict[str, list[str]] = {name: [] for name in (IMAGE, *self.layers)}
        for name, layer in self.layers.items():
            for source in dict.fromkeys(layer.sources):
                found[source].append(name)
        return found


@dataclass(frozen=True)
class Affine:
    """An affine function of a pixel p from 0 to 255: factor · p + offset."""

    factor: float = 1.0
    offset: float = 0.0

    def then(self, operation: str, number: float) -> Affine:
        """Return the function followed by `add`, `sub`, `mul` or `div` with a number."""
        scale = {"mul": number, "div": 1 / number if number else float("nan")}.get(operation, 1.0)
        shift = {"add": number, "sub": -number}.get(operation, 0.0)
        return Affine(self.factor * scale, self.offset * scale + shift)

    @property
    def is_zero_at_mid_gray(self) -> bool:
        """Whether a pixel of 127.5 gives 0, to a relative error of 0.001."""
        # The tolerance is for rounding of the constants in the file.
        mid = 127.5 * self.factor
        return self.factor != 0 and abs(self.offset + mid) <= 1e-3 * abs(mid)


@dataclass(frozen=True)
class Node:
    """A node of a file's graph, before it becomes a layer."""

    operator: str
    value: str
    """Name of the value that it computes."""
    sources: tuple[str, ...]
    """Names of the values that it takes."""
    constants: tuple[Tensor, ...]
    """The tensors of the file that it takes, in the order of its inputs."""
    attributes: Mapping[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Return the constants under the names that `Layer.weights` has."""
        return dict(zip(("weight", "bias", "mean", "variance"), self.constants, strict=False))


LayerReader = Callable[[Node], Layer | None]
"""Returns a node as a layer of our kinds, or None where no backbone has such a layer."""


class LayerGraphBuilder:
    """Builder of a layer graph from the nodes of a file, which must come after their sources.

    Nodes that change no number at inference (dropout, flatten) become aliases of their source.
    Arithmetic on the image before the first layer becomes an affine function of the pixels.
    """

    def __init__(self, origin: str, image: str, image_of_pixel: Affine) -> None:
        """Begin a graph: the file's name, its name of the image, and the image as a function of pixels."""
        self._origin = origin
        self._aliases: dict[str, str] = {}
        self._image = {image: image_of_pixel}
        self._layers: dict[str, Layer] = {}

    def is_image(self, value: str) -> bool:
        """Return whether a value is the image, or an affine function of it."""
        return value in self._image

    def alias(self, value: str, source: str) -> None:
        """Add a node whose value equals its source."""
        if source in self._image:
            self._image[value] = self._image[source]
        else:
            self._aliases[value] = self._aliases.get(source, source)

    def arithmetic(self, value: str, source: str, operation: str, number: float) -> None:
        """Add a node that applies `add`, `sub`, `mul` or `div` with a number."""
        if source in self._image:
            self._image[value] = self._image[source].then(operation, number)
        else:
            self._add(value, Layer(f"{operation} {number:g}", (source,)))

    def layer(self, node: Node, read: LayerReader | None) -> None:
        """Add a node as a layer; `read` is None for an operator that no backbone has."""
        layer = read(node) if read else None
        # str: in a damaged ONNX file the operator's name can be bytes.
        self._add(node.value, layer or Layer(str(node.operator), node.sources[:1]))

    def build(self, output: str) -> LayerGraph:
        """Return the layers that an output depends on.

        Raises:
            ModelError: a layer takes a value that no layer computes, or the first layers take pixels that are
                not centered on 127.5: the zero padding of the first convolution then has no counterpart in a
                backbone, whatever its weights.
        """
        output = self._aliases.get(output, output)
        needed = self._needed(output)
        sources = {source for layer in needed.values() for source in layer.sources}
        unknown = sources - needed.keys() - self._image.keys()
        if unknown or output not in needed:
            missing = min(map(str, unknown), default=output)
            raise ModelError(f"{self._origin}: no layer computes {missing!r}, which the embedding depends on")
        taken = {self._image[source] for source in sources & self._image.keys()}
        affine = taken.pop() if len(taken) == 1 else Affine(0.0, 0.0)
        if not affine.is_zero_at_mid_gray:
            raise ModelError(
                f"{self._origin}: takes pixels times {affine.factor:g} plus {affine.offset:g}; "
                "facetrain trains networks that take (pixels − 127.5) times a number"
            )
        layers = {
            name: replace(
                layer, sources=tuple(IMAGE if source in self._image else source for source in layer.sources)
            )
            for name, layer in needed.items()
        }
        return LayerGraph(self._origin, layers, output, 127.5 * affine.factor)

    def _add(self, value: str, layer: Layer) -> None:
        sources = tuple(self._aliases.get(source, source) for source in layer.sources)
        self._layers[value] = replace(layer, sources=sources)

    def _needed(self, output: str) -> dict[str, Layer]:
        needed, to_visit = set(), [output]
        while to_visit:
            name = to_visit.pop()
            if name in self._layers and name not in needed:
                needed.add(name)
                to_visit += self._layers[name].sources
        return {name: layer for name, layer in self._layers.items() if name in needed}


class _LayerTracer(torch.fx.Tracer):
    """Tracer that records every module without children as one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A layer with a low-rank adapter has children, which compute its weight.
        return isinstance(m, nn.Conv2d | nn.Linear) or not any(m.children())

    def to_bool(self, obj: torch.fx.Proxy) -> bool:
        # Backbones branch on "needs a gradient" only, to recompute activations. Both branches have the same layers.
        return False


def backbone_layers(backbone: Backbone) -> LayerGraph:
    """Return the layers of an IResNet or a MobileFaceNet; their names are the names of the modules.

    Raises:
        ModelError: it is another network, or has layers of another kind.
    """
    if not isinstance(backbone, IResNet | MobileFaceNet):
        raise ModelError(
            f"model.init_from: the weights of MXNet and ONNX files load into IResNets and MobileFaceNets, "
            f"not into a {type(backbone).__name__}"
        )
    if isinstance(backbone, IResNet) and backbone.subsample_shortcut:
        raise ModelError(
            "model.init_from: the weights of MXNet and ONNX files do not load into ir18 to ir101; give AdaFace's or "
            "CVLface's own file"
        )
    layers: dict[str, Layer] = {}
    names: dict[str, str] = {}
    for node in _trace(backbone).nodes:
        sources = tuple(names[source.name] for source in node.all_input_nodes)
        name = names[node.name] = str(node.target) if node.op == "call_module" else node.name
        module = backbone.get_submodule(name) if node.op == "call_module" else None
        if node.op == "placeholder":
            names[node.name] = IMAGE
        elif node.op == "output":
            return LayerGraph(type(backbone).__name__, layers, sources[0])
        elif node.target == "flatten" or isinstance(module, nn.Dropout | nn.Flatten):
            names[node.name] = sources[0]
        elif module is not None:
            layers[name] = _module_layer(module, sources)
        else:
            assert node.target is operator.add, f"{node.target}: backbones have no operation except add"
            layers[name] = Layer("add", sources)
    raise AssertionError("the traced backbone has no output")


def _trace(backbone: Backbone) -> torch.fx.Graph:
    # In training mode, backbones compare the size of the features, which a tracer does not know, with their own.
    was_training, backbone.training = backbone.training, False
    try:
        return _LayerTracer().trace(backbone)
    finally:
        backbone.training = was_training


def _module_layer(module: nn.Module, sources: tuple[str, ...]) -> Layer:
    weights = {
        name: tensor.detach()
        for name in ("weight", "bias")
        if (tensor := getattr(module, name, None)) is not None
    }
    match module:
        case nn.Conv2d():
            names = ("stride", "padding", "dilation", "groups")
            return Layer("conv", sources, weights, {name: getattr(module, name) for name in names})
        case nn.modules.batchnorm._BatchNorm():  # also the synchronized ones of a run on several ranks
            return Layer("norm", sources, weights, {"eps": module.eps})
        case nn.Linear():
            return Layer("linear", sources, weights)
        case nn.PReLU():
            return Layer("prelu", sources, weights)
    raise ModelError(f"{type(module).__name__}: not a layer of a convolutional backbone")
