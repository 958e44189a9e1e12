"""Networks of timm as backbones: `timm/NAME`, with the extra `[timm]`."""

# B batch   D embedding   F features

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.errors import ModelError, missing_package
from facetrain.files import error_reason

PREFIX = "network."
"""Prefix that the names of timm's parameters have in this backbone."""
_SHAPE_OPTIONS = frozenset({"patch_size", "class_token", "global_pool"})
"""Arguments of timm's constructors that a model file may state: others could read files."""


class ChannelStatistics(NamedTuple):
    """Mean and standard deviation of the channels of RGB images, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


HALF = ChannelStatistics((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Statistics with which the normalized pixels are (pixels − 127.5) / 127.5, the input of all backbones."""


class TimmNetwork(Backbone):
    """A network of timm, whose classifier is the linear layer of the embedding.

    The network gets the pixels in the normalization of timm's weights for it, so these compute what they compute in
    timm. Dropout and stochastic depth of timm are off, because timm draws them by the batch.

    Args:
        name: name in timm, such as convnext_nano, with or without the tag of its weights.
        own: arguments of timm's constructor: patch_size, class_token, global_pool.
        options: options of every backbone.

    Raises:
        ModelError: timm is not installed, has no such network, or the network does not have an option.
    """

    def __init__(self, name: str, *, own: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.network = _create(name, own or {}, self.embedding_size, self.image_size)
        _switch_off_draws(self.network)
        config: dict[str, Any] = self.network.pretrained_cfg
        self.statistics = ChannelStatistics(tuple(config["mean"]), tuple(config["std"]))
        """Normalization of the pixels in timm."""
        if not isinstance(config["classifier"], str):
            raise ModelError(
                f"model.backbone: timm/{name} has no single layer of the embedding; choose another network"
            )
        self.classifier = config["classifier"]
        """Name of the layer of the embedding in the network."""
        # Published weights are those of other classes, or of none: `model.lora` trains it whole.
        self.new_layers = (f"{PREFIX}{self.classifier}.",)
        if self._recompute:
            if any(isinstance(module, nn.BatchNorm2d) for module in self.network.modules()):
                raise ModelError(
                    f"model.checkpoint_activations: timm/{name} has batch norms, whose statistics a second forward "
                    "pass would change; set it to false"
                )
            try:
                self.network.set_grad_checkpointing(True)
            except AssertionError as error:  # timm's answer of a network that has none
                raise ModelError(
                    f"model.checkpoint_activations: timm/{name}: {error}; set it to false"
                ) from error

    def trunk(self, image_BCHW: Tensor, *, key_B: Tensor | None = None) -> Tensor:
        """Map normalized images (B, 3, H, W) to features (B, F)."""
        feature = self.network.forward_features(self._in_timms_pixels(image_BCHW))
        return self.drop(self.network.forward_head(feature, pre_logits=True), key_B)

    def neck(self, feature: Tensor) -> Tensor:
        """Map features to embeddings (B, D)."""
        embedding: Tensor = self.network.get_submodule(self.classifier)(feature)
        return embedding

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the network without the layer of the embedding, as a whole."""
        yield self.network, "forward_features"

    def last_layers(self) -> tuple[str, ...]:
        """Return the name of the child that is or has the classifier."""
        return (f"{PREFIX}{self.classifier.partition('.')[0]}.",)

    def adapted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return published weights of the same network for this image size, under the names of this backbone.

        Positions are interpolated as timm does. The layer of the embedding keeps its weights if those of the file have
        another shape, or none.

        Raises:
            ModelError: the weights are those of another network.
        """
        convert = getattr(sys.modules[type(self.network).__module__], "checkpoint_filter_fn", None)
        try:
            found = convert(dict(weights), self.network) if convert else dict(weights)
        except (KeyError, RuntimeError, IndexError, ValueError, AttributeError) as error:
            raise ModelError(f"its weights are not those of this network of timm ({error})") from error
        own = self.network.state_dict()
        for name in (f"{self.classifier}.weight", f"{self.classifier}.bias"):
            if name in own and (name not in found or found[name].shape != own[name].shape):
                found[name] = own[name]
        return {f"{PREFIX}{name}": value for name, value in found.items()}

    def _in_timms_pixels(self, image_BCHW: Tensor) -> Tensor:
        """Return images normalized as (u − mean) / std, with the pixels u from 0 to 1, from 2 u − 1."""
        if self.statistics == HALF:
            return image_BCHW
        # By numbers and not by tensors: these would have to come to the device.
        channels = [
            channel_BHW * (0.5 / std) + (0.5 - mean) / std
            for channel_BHW, mean, std in zip(image_BCHW.unbind(1), *self.statistics, strict=True)
        ]
        return torch.stack(channels, 1).contiguous(memory_format=torch.channels_last)


def _create(name: str, own: dict[str, Any], embedding_size: int, image_size: int) -> Any:
    try:
        timm = import_module("timm")
    except ImportError as error:
        raise ModelError(f"model.backbone: timm/{name} {missing_package(error, 'timm')}") from error
    # Not by timm's own check: it downloads networks whose names begin with hf-hub.
    names = timm.list_models()
    if (plain := name.partition(".")[0]) not in names:
        close = difflib.get_close_matches(plain, names, n=3)
        raise ModelError(
            f"model.backbone: timm {timm.__version__} has no network {plain}"
            + (f"; did you mean {' or '.join(f'timm/{each}' for each in close)}?" if close else "")
        )
    if unknown := own.keys() - _SHAPE_OPTIONS:
        raise ModelError(
            f"model.options: {min(unknown)} is no option of timm/NAME; use {', '.join(sorted(_SHAPE_OPTIONS))}"
        )
    options = {"pretrained": False, "num_classes": embedding_size, **own}
    try:
        try:
            # Networks with positions are built for one size.
            return timm.create_model(name, **options, img_size=image_size)
        except TypeError:
            return timm.create_model(name, **options)
    except Exception as error:  # of an option or an unknown tag of weights: they have no common type
        advice = "; see model.options" if own else ""
        raise ModelError(f"model.backbone: timm/{name}: {error_reason(error)}{advice}") from error


def _switch_off_draws(network: nn.Module) -> None:
    """Set the rates of dropout and stochastic depth to 0: some of timm's constructors have others by default."""
    for module in network.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        for rate in {"drop_prob", "drop_rate"} & vars(module).keys():
            setattr(module, rate, 0.0)
