"""Network of one's own as a backbone: a module that maps images to embeddings, without a division into halves."""

# B batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from facetrain.backbone.base import Backbone, evaluation_mode
from facetrain.errors import ConfigError
from facetrain.own_parts import describe_result, line_of, name_of


class OwnNetwork(Backbone):
    """Module that maps (B, 3, H, W) to (B, D). It runs as a whole in the precision of the trunk."""

    def __init__(self, network: nn.Module, **options: Any) -> None:
        super().__init__(**options)
        if self._dropout:
            raise ConfigError("model.dropout: a network of one's own has its own; leave the key out")
        if self._recompute:
            raise ConfigError(
                "model.checkpoint_activations: the blocks of a network of one's own are not known, and to compute it "
                "again as a whole saves nothing; leave the key out, or checkpoint its blocks in its own code"
            )
        self.network = network

    def trunk(self, image_BCHW: Tensor) -> Tensor:
        """Map normalized images (B, 3, H, W) to embeddings (B, D)."""
        # A copy, which the network may change: a teacher, or the flipped images of a verification, read these, too.
        embedding_BD = self.network(image_BCHW.clone())
        # The number of images is not compared: an export keeps it free.
        if not isinstance(embedding_BD, Tensor) or embedding_BD.shape[1:] != (self.embedding_size,):
            raise ConfigError(
                f"model.backbone: {type(self.network).__name__} maps {len(image_BCHW):,} images to "
                f"{describe_result(embedding_BD)}; return one tensor of shape (B, {self.embedding_size}), with the "
                "embedding_size that it is built with"
            )
        return embedding_BD

    def neck(self, feature: Tensor) -> Tensor:
        """Return the embeddings (B, D) as they are."""
        return feature

    def adapted(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return weights with names of the module itself under those of this backbone; other weights as they are."""
        renamed = {f"network.{name}": weight for name, weight in weights.items()}
        return renamed if renamed.keys() & self.state_dict().keys() else weights

    def regions(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield the whole network."""
        yield self.network, "forward"


def build_own(part: Callable[..., Any], own: dict[str, Any], **options: Any) -> Backbone:
    """Build a backbone by a function or class of the user.

    A subclass of `Backbone` gets the options of every backbone, anything else `embedding_size` and `image_size`.

    Args:
        part: the function or class; it returns a module that maps (B, 3, H, W) to (B, D).
        own: further keyword arguments, `model.options`.
        options: options of every backbone.

    Raises:
        ConfigError: it takes other arguments, or builds no module, or one with a state that is no tensor.
    """
    is_backbone = isinstance(part, type) and issubclass(part, Backbone)
    sizes = {name: options[name] for name in options.keys() & {"embedding_size", "image_size"}}
    try:
        network = part(**own, **(options if is_backbone else sizes))
    except TypeError as error:
        if line_of(error):  # its own code has raised it
            raise
        gets = f"it also gets {', '.join(options)}: pass them to super().__init__"
        advice = f"see model.options; {gets}" if is_backbone else "see model.options"
        raise ConfigError(f"model.backbone: {name_of(part)}: {error}; {advice}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"model.backbone: {name_of(part)} builds {type(network).__name__}, no torch module")
    if isinstance(network, Backbone) and not is_backbone:
        _require_all_known(network, name_of(part), options)
    backbone = network if isinstance(network, Backbone) else OwnNetwork(network, **options)
    _initialize_lazy_layers(backbone)
    if extra := [name for name, value in backbone.state_dict().items() if not isinstance(value, Tensor)]:
        raise ConfigError(
            f"model.backbone: {name_of(part)}: {extra[0].removeprefix('network.')} in its state_dict is no tensor, and "
            "a checkpoint has tensors only; let get_extra_state return a tensor, or use a buffer"
        )
    return backbone


def _require_all_known(network: Backbone, function: str, options: dict[str, Any]) -> None:
    """Refuse what a function, which gets the sizes alone, does not give the backbone that it returns, or does not say.

    Raises:
        ConfigError: an option is set, or the backbone takes landmarks.
    """
    for key in ("dropout", "checkpoint_activations"):
        if options.get(key):
            raise ConfigError(
                f"model.{key}: {function} is a function and does not get it; name the class of the network, or give it "
                "by model.options"
            )
    if network.takes_landmarks:
        raise ConfigError(
            f"model.backbone: {function} is a function, and only a class says that its network takes landmarks; name "
            "the class"
        )


def _initialize_lazy_layers(backbone: Backbone) -> None:
    """Give layers that take their sizes from the first input, such as `nn.LazyLinear`, their weights.

    Here, and not in the first step: the weights follow from the seed, and are the same on every rank.
    """
    if not _lazy_tensors(backbone):
        return
    # In evaluation mode: batch norm needs no second image, and no statistics change.
    with evaluation_mode(backbone), torch.no_grad():
        backbone(torch.zeros(1, 3, backbone.image_size, backbone.image_size))
    if left := _lazy_tensors(backbone):
        raise ConfigError(
            f"model.backbone: {left[0].removeprefix('network.')} is a lazy layer that a forward pass does not reach; "
            "remove it, or give it its sizes"
        )


def _lazy_tensors(backbone: Backbone) -> list[str]:
    """Return the names of the parameters and buffers that have no size yet."""
    named = chain(backbone.named_parameters(), backbone.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]
