"""A network as layers and what flows between them: the form in which a file's network is held against ours."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import torch.fx
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.errors import ModelError

IMAGE = "image"
"""The value that the first layers take."""


@dataclass(frozen=True)
class Layer:
    """One step of a network; it gives one value, and is known by that value's name."""

    kind: str
    """`conv`, `linear`, `norm`, `prelu`, `add`; or what the file calls a step that our networks have not."""
    sources: tuple[str, ...]
    """The values that it takes."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """`weight` and maybe `bias`; of a norm also `mean` and `variance`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of a convolution `stride`, `padding`, `dilation`, `groups`; of a norm `eps`."""

    def __str__(self) -> str:
        shape = f" {'×'.join(map(str, self.weights['weight'].shape))}" if self.weights else ""
        stride = f" at stride {self.options['stride'][0]}" if self.kind == "conv" else ""
        return self.kind + shape + stride


@dataclass(frozen=True)
class Network:
    """Layers by the value that they give, each behind its sources."""

    where: str
    layers: dict[str, Layer]
    output: str
    scale: float = 1.0
    """Of pixels p, the first layers take scale · (p − 127.5) / 127.5."""

    def behind(self) -> dict[str, list[str]]:
        """Return which layers take each value."""
        found: dict[str, list[str]] = {name: [] for name in (IMAGE, *self.layers)}
        for name, layer in self.layers.items():
            for source in dict.fromkeys(layer.sources):
                found[source].append(name)
        return found


def applied(line: tuple[float, float], kind: str, number: float) -> tuple[float, float]:
    """Return what becomes of factor · p + offset: a number added, subtracted (`sub`), multiplied, divided by."""
    factor, offset = line
    times = {"mul": number, "div": 1 / number if number else float("nan")}.get(kind, 1.0)
    plus = {"add": number, "sub": -number}.get(kind, 0.0)
    return factor * times, offset * times + plus


def around_middle(line: tuple[float, float]) -> bool:
    """Whether factor · p + offset is 0 for a pixel in the middle between 0 and 255."""
    factor, offset = line
    return factor != 0 and abs(offset + 127.5 * factor) <= 1e-3 * abs(127.5 * factor)


class Reader:
    """Collects the layers of a file, each behind its sources.

    Steps that change no number of a network that is not trained (dropout, flatten) fall away. Arithmetic
    on the image before the first layer is kept as what it makes of pixels p from 0 to 255: factor · p + offset.
    """

    def __init__(self, where: str, image: str, *, factor: float = 1.0, offset: float = 0.0) -> None:
        """Take the file's name for its image, and what of a pixel the image is."""
        self._where = where
        self._same: dict[str, str] = {}
        self._image = {image: (factor, offset)}
        self._layers: dict[str, Layer] = {}

    def same(self, value: str, source: str) -> None:
        """Note a value that is another one."""
        if source in self._image:
            self._image[value] = self._image[source]
        else:
            self._same[value] = self._same.get(source, source)

    def arithmetic(self, value: str, source: str, kind: str, number: float) -> None:
        """Note a value that is another one plus (`add`), minus (`sub`), times (`mul`) or by (`div`) a number."""
        if source not in self._image:
            self.add(value, Layer(f"{kind} {number:g}", (source,)))
            return
        self._image[value] = applied(self._image[source], kind, number)

    def add(self, value: str, layer: Layer) -> None:
        """Note a layer."""
        self._layers[value] = replace(
            layer, sources=tuple(self._same.get(source, source) for source in layer.sources)
        )

    def network(self, output: str) -> Network:
        """Return the layers that an output depends on.

        Raises:
            ModelError: a layer takes what none gives; or the image is not taken around 127.5, for which no weights
                could make up where the first layer pads with zeros.
        """
        output = self._same.get(output, output)
        needed = self._needed(output)
        sources = {source for layer in needed.values() for source in layer.sources}
        unknown = sources - needed.keys() - self._image.keys()
        if unknown or output not in needed:
            missing = min(map(str, unknown), default=output)
            raise ModelError(f"{self._where}: no layer gives {missing!r}, which is needed")
        taken = {self._image[source] for source in sources & self._image.keys()}
        factor, offset = line = taken.pop() if len(taken) == 1 else (0.0, 0.0)
        if not around_middle(line):
            raise ModelError(
                f"{self._where}: takes pixels times {factor:g} plus {offset:g}; facetrain trains networks that take "
                "(pixels − 127.5) times a number"
            )
        layers = {
            name: replace(
                layer, sources=tuple(IMAGE if source in self._image else source for source in layer.sources)
            )
            for name, layer in needed.items()
        }
        return Network(self._where, layers, output, 127.5 * factor)

    def _needed(self, output: str) -> dict[str, Layer]:
        needed, waiting = set(), [output]
        while waiting:
            name = waiting.pop()
            if name in self._layers and name not in needed:
                needed.add(name)
                waiting += self._layers[name].sources
        return {name: layer for name, layer in self._layers.items() if name in needed}


class _Tracer(torch.fx.Tracer):
    """Follows what flows from layer to layer, and looks into none of them."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not any(m.children())

    def to_bool(self, obj: torch.fx.Proxy) -> bool:
        # Whether a tensor needs a gradient, and activations are computed twice: that changes no layer.
        return False


def own_layers(backbone: Backbone) -> Network:
    """Return the layers of an IResNet or a MobileFaceNet, by the names of its modules.

    Raises:
        ModelError: it is another network.
    """
    if not isinstance(backbone, IResNet | MobileFaceNet):
        raise ModelError(
            f"model.init_from: of MXNet and ONNX files, IResNets and MobileFaceNets take weights, "
            f"no {type(backbone).__name__}"
        )
    layers: dict[str, Layer] = {}
    names: dict[str, str] = {}
    for node in _Tracer().trace(backbone).nodes:
        sources = tuple(names[source.name] for source in node.all_input_nodes)
        name = names[node.name] = str(node.target) if node.op == "call_module" else node.name
        module = backbone.get_submodule(name) if node.op == "call_module" else None
        if node.op == "placeholder":
            names[node.name] = IMAGE
        elif node.op == "output":
            return Network(type(backbone).__name__, layers, sources[0])
        elif node.target == "flatten" or isinstance(module, nn.Dropout | nn.Flatten):
            names[node.name] = sources[0]
        elif module is not None:
            layers[name] = _layer_of(module, sources)
        else:
            assert node.target is operator.add, f"{node.target}: our networks add and do nothing else"
            layers[name] = Layer("add", sources)
    raise AssertionError("a network has an output")


def _layer_of(module: nn.Module, sources: tuple[str, ...]) -> Layer:
    weights = {name: parameter.detach() for name, parameter in module.named_parameters()}
    match module:
        case nn.Conv2d():
            names = ("stride", "padding", "dilation", "groups")
            return Layer("conv", sources, weights, {name: getattr(module, name) for name in names})
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            return Layer("norm", sources, weights, {"eps": module.eps})
        case nn.Linear():
            return Layer("linear", sources, weights)
        case nn.PReLU():
            return Layer("prelu", sources, weights)
    raise AssertionError(f"{type(module).__name__}: no layer of our convolutional networks")
