"""Networks in the form that embeds images fastest: on the CPU, with the batch norms folded into the other layers.

torch runs convolutions and batch norms one after the other, and reads the activations from memory for each. A batch
norm after a convolution or linear layer is an affine function of its output, so the layer's weights can contain it
(Jacob et al., "Quantization and training of neural networks", CVPR 2018, section 3.2).
"""

# B batch   C channels   H, W height and width   D embedding

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.keypoint_vit import KeypointVisionTransformer
from facetrain.errors import ModelError
from facetrain.models.backbone_layers import backbone_layers
from facetrain.models.layer_graph import IMAGE, Layer, LayerGraph, embed, with_weights
from facetrain.models.mxnet_network import MxnetNetwork

BLOCK = 32
"""Images that a folded network computes at a time. oneDNN and MKL choose the order of their sums by the shape of the
batch. With blocks of one size, the embedding of an image does not depend on the number of images beside it. MKL's
kernels for AVX2 also choose by the place in the block, which then changes the last bits."""
_FOLDABLE = ("conv", "linear", "norm", "prelu", "add")
"""Kinds of layers of a network that is folded."""


def inference_network(network: nn.Module, device: torch.device, *, bf16: bool = False) -> nn.Module:
    """Return a network that maps the same prepared images to the same embeddings up to rounding, and is faster.

    On the CPU, an IResNet, a MobileFaceNet or a network of MXNet gets a copy with folded batch norms; its weights are
    those of this moment. Other networks, and all networks on a GPU, are returned as they are.

    Args:
        network: network in evaluation mode.
        device: device of the network.
        bf16: compute in bfloat16: convolutions of a folded network; of others the trunk, in autocast.
    """
    if device.type == "cpu":
        try:
            return FoldedNetwork(layers_of(network), torch.bfloat16 if bf16 else torch.float32)
        except ModelError:  # a layer that cannot be folded or run here; the network itself can
            pass
    return _Autocast(network, device) if bf16 else network


_TRUNK_AND_NECK = Backbone.forward, KeypointVisionTransformer.forward
"""Methods that are the neck of the trunk."""


class _Autocast(nn.Module):
    """A network in bfloat16 autocast."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.network, self._device_type = network, device.type
        self.takes_landmarks = bool(getattr(network, "takes_landmarks", False))

    def forward(self, image: Tensor, *landmarks: Tensor) -> Tensor:
        """Map prepared images, and the landmarks if the network takes them, to embeddings (B, D)."""
        with torch.autocast(self._device_type, torch.bfloat16):
            network = self.network
            # One with a `forward` of its own may compute something else.
            if not isinstance(network, Backbone) or type(network).forward not in _TRUNK_AND_NECK:
                return network(image, *landmarks)
            feature = network.trunk(image, *landmarks)
        # As in training.
        return network.neck(feature.float())


class FoldedNetwork(nn.Module):
    """Layers of a network in evaluation mode, without the batch norms that follow a convolution or a linear layer.

    A batch norm before a convolution remains: the convolution pads its output with zeros, which no constant in the
    input corresponds to. The weights of convolutions have the layout channels_last, as the images of `normalize`.
    """

    def __init__(self, graph: LayerGraph, dtype: torch.dtype = torch.float32) -> None:
        """Fold the batch norms of a layer graph.

        Args:
            graph: layers; their weights are copied.
            dtype: type of convolutions and PReLUs. Linear layers stay in float32, because they sum over tens of
                thousands of features.

        Raises:
            ModelError: the graph has a layer of another kind.
        """
        super().__init__()
        self._dtype = dtype
        self.graph = with_weights(fold_norms(graph), self._copy)
        """The folded layers."""

    def forward(self, image_BCHW: Tensor) -> Tensor:
        """Map prepared images (B, 3, H, W) to embeddings (B, D), float32."""
        count = len(image_BCHW)
        # Not filled up: a few images would take the time of a whole block.
        if count <= BLOCK:
            return self._embed(image_BCHW)
        # The last image fills the last block; its copies are cut off afterwards.
        missing = -count % BLOCK
        if missing:
            image_BCHW = torch.cat([image_BCHW, image_BCHW[-1:].expand(missing, -1, -1, -1)])
        return torch.cat([self._embed(block) for block in image_BCHW.split(BLOCK)])[:count]

    def _embed(self, image_BCHW: Tensor) -> Tensor:
        image_BCHW = self.graph.prepare(image_BCHW).to(self._dtype, memory_format=torch.channels_last)
        return embed(self.graph, image_BCHW).float()

    def _copy(self, layer: Layer, _: str, weight: Tensor) -> Tensor:
        """Return a copy of a weight in the type and memory layout in which its layer runs."""
        kept = self._dtype if layer.kind in ("conv", "prelu") else torch.float32
        layout = (
            torch.channels_last if layer.kind == "conv" and weight.dim() == 4 else torch.contiguous_format
        )
        return weight.to(kept, copy=True, memory_format=layout)


def fold_norms(graph: LayerGraph) -> LayerGraph:
    """Return a graph with folded batch norms.

    A norm disappears if its source is a convolution or linear layer whose output nothing else takes. The weights of
    convolutions and linear layers are float64 then, so that only one rounding is added.

    Raises:
        ModelError: the graph has a layer of another kind.
    """
    consumers = graph.consumers()
    folded: dict[str, Layer] = {}
    names = {IMAGE: IMAGE}
    for value, layer in graph.layers.items():
        if layer.kind not in _FOLDABLE:
            raise ModelError(f"{graph.origin}: the layer {layer} cannot be folded")
        source = names[layer.sources[0]]
        if (
            layer.kind == "norm"
            and source in folded
            and folded[source].kind in ("conv", "linear")
            # Another layer that takes the output of the convolution needs it without the norm.
            and consumers[layer.sources[0]] == [value]
        ):
            folded[source] = _with_norm(folded[source], layer)
            names[value] = source
            continue
        names[value] = value
        folded[value] = replace(_in_float64(layer), sources=tuple(names[source] for source in layer.sources))
    return replace(graph, layers=folded, output=names[graph.output])


def _in_float64(layer: Layer) -> Layer:
    if layer.kind not in ("conv", "linear"):
        return layer
    weight = layer.weights["weight"].double()
    bias = layer.weights["bias"].double() if "bias" in layer.weights else weight.new_zeros(len(weight))
    return replace(layer, weights={"weight": weight, "bias": bias})


def _with_norm(layer: Layer, norm: Layer) -> Layer:
    """Return a convolution or linear layer, in float64, followed by a batch norm in evaluation mode."""
    weight, bias, mean, variance = (
        norm.weights[name].double() for name in ("weight", "bias", "mean", "variance")
    )
    scale_C = weight / (variance + norm.options["eps"]).sqrt()
    folded = layer.weights["weight"]
    return replace(
        layer,
        weights={
            "weight": folded * scale_C.view(-1, *[1] * (folded.dim() - 1)),
            "bias": (layer.weights["bias"] - mean) * scale_C + bias,
        },
    )


def layers_of(network: nn.Module) -> LayerGraph:
    """Return the layers of a network, with the running statistics of its batch norms.

    Raises:
        ModelError: it is not an IResNet, a MobileFaceNet or a network of MXNet, or has layers of another kind.
    """
    if isinstance(network, MxnetNetwork):
        return network.layers()
    if isinstance(network, Backbone):
        return backbone_layers(network)
    raise ModelError(f"{type(network).__name__}: is not folded")
