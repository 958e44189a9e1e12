"""Layers of an IResNet or a MobileFaceNet, traced by torch.fx."""

from __future__ import annotations

import operator

import torch.fx
from torch import nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.iresnet import IResNet
from facetrain.backbone.mobilefacenet import MobileFaceNet
from facetrain.distributed.sync_batch_norm import BatchNorm
from facetrain.errors import ModelError
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph


class _LayerTracer(torch.fx.Tracer):
    """Tracer that records every module without children as one node."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A layer with a low-rank adapter has children, which compute its weight.
        return isinstance(m, nn.Conv2d | nn.Linear) or not list(m.children())

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
    for kind in map(type, backbone.modules()):
        # A layer of other code may compute anything, also one that is derived from a convolution or a norm.
        if kind.__module__.partition(".")[0] not in ("facetrain", "torch"):
            raise ModelError(f"{kind.__name__}: a layer of neither facetrain nor PyTorch")
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
        elif node.target == "flatten" or isinstance(module, nn.Dropout | nn.Flatten | nn.Sequential):
            # In evaluation mode these change no number: a Sequential without layers, of a stage without blocks.
            names[node.name] = sources[0]
        elif module is not None:
            layers[name] = _module_layer(module, sources)
        elif node.target is operator.add and len(sources) == 2:
            layers[name] = Layer("add", sources)
        else:
            raise ModelError(f"{name}: not an operation of a convolutional backbone")
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
        case nn.Conv2d(padding_mode="zeros"):
            names = ("stride", "padding", "dilation", "groups")
            return Layer("conv", sources, weights, {name: getattr(module, name) for name in names})
        case _ if isinstance(module, BatchNorm) and module.affine and module.track_running_stats:
            weights |= {"mean": module.running_mean, "variance": module.running_var}
            return Layer("norm", sources, weights, {"eps": module.eps})
        case nn.Linear():
            return Layer("linear", sources, weights)
        case nn.PReLU():
            return Layer("prelu", sources, weights)
    raise ModelError(f"{type(module).__name__}: not a layer of a convolutional backbone")
