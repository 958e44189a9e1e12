"""Memory of a network, counted in a step on tensors that have shapes but no memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_on_meta
from facetrain.optim.muon import hidden_weights
from facetrain.optim.parameter_names import require_prefixes
from facetrain.run.parts.backbone import restrict_training
from facetrain.torch_private import FakeTensorMode, LiveBytes
from facetrain.training.precision import autocast_for

_COUNTED = 2, 3
"""Images of the two steps that are counted. Bytes are linear in the batch, so these give the bytes of any other."""


class BackboneMemory(NamedTuple):
    """Bytes of one backbone on one rank, and of a step with a batch."""

    parameters: int
    """Number of trainable parameters."""
    hidden: int
    """Number of those that Muon would update."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    kept: int
    """Bytes after the forward pass: activations, and weights cast to 16 bits."""
    peak: int
    """Largest number of bytes that exist at a time."""


def backbone_memory(
    model: ModelSettings, image_size: int, *, precision: str, batch: int, gradients_held: bool = True
) -> BackboneMemory:
    """Return the memory of a training step, which is counted once in a process: a plan tries many batches.

    Args:
        model: section `model` of the config.
        image_size: side of the images in pixels.
        precision: fp32, bf16 or fp16.
        batch: images per rank and micro-batch.
        gradients_held: the gradients exist before the backward pass, in the buckets of DDP.

    Raises:
        ConfigError: `model` names parts that the backbone does not have.
        ModelError: the image size does not fit the backbone.
    """
    # As text, which a cache can look up: a section may have mappings.
    text = model.model_dump_json()
    first, second = (_count_step(text, image_size, precision, images, gradients_held) for images in _COUNTED)
    if len(first.live) != len(second.live):  # a network of one's own that takes other steps for other batches
        first = second = _count_step(text, image_size, precision, batch, gradients_held)
    kept, *live = _bytes_of(batch, [first.memory.kept, *first.live], [second.memory.kept, *second.live])
    return first.memory._replace(kept=kept, peak=max(live))


def _bytes_of(batch: int, first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the bytes at each moment of a step with a batch, from those of the two steps that are counted."""
    return [few + (batch - _COUNTED[0]) * (more - few) for few, more in zip(first, second, strict=True)]


class _Step(NamedTuple):
    memory: BackboneMemory
    live: list[int]
    """Bytes that exist after each new tensor."""


@lru_cache
def _count_step(model: str, image_size: int, precision: str, batch: int, gradients_held: bool) -> _Step:
    with fake_network(ModelSettings.model_validate_json(model), image_size) as net:
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        state_bytes = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
        for parameter in trained if gradients_held else ():
            parameter.grad = torch.zeros_like(parameter)
        image_BCHW = torch.zeros(batch, 3, image_size, image_size)
        with LiveBytes() as live:
            embedding_BD = _forward(net, image_BCHW, precision)
            kept = live.now
            embedding_BD.backward(torch.zeros_like(embedding_BD))
        chosen = hidden_weights(net, net.last_layers())
        hidden = sum(weight.numel() for weight in chosen if weight.requires_grad)
    parameters = sum(weight.numel() for weight in trained)
    return _Step(BackboneMemory(parameters, hidden, state_bytes, kept, live.peak), live.history)


def forward_bytes(model: ModelSettings, image_size: int, *, batch: int) -> int:
    """Return the peak of bytes while a backbone embeds a batch in float32, as verification does; counted once, too."""
    return _forward_bytes(model.model_dump_json(), image_size, batch)


@lru_cache
def _forward_bytes(model: str, image_size: int, batch: int) -> int:
    with fake_network(ModelSettings.model_validate_json(model), image_size) as net:
        image_BCHW = torch.zeros(batch, 3, image_size, image_size)
        with torch.no_grad(), LiveBytes() as live:
            _forward(net.eval(), image_BCHW, "fp32")
    return live.peak


class EmbeddingMemory(NamedTuple):
    """Bytes beside its weights of a network that embeds images without gradients."""

    first: tuple[int, ...]
    """At each moment of the first batch that is counted; none of a network that computes by other means than torch's
    operations, or by the values of its tensors."""
    second: tuple[int, ...]

    def peak(self, batch: int) -> int:
        """Return the largest number of bytes that exist at a time; 0 if none could be counted."""
        return max(_bytes_of(batch, self.first, self.second), default=0)


def embedding_memory(network: nn.Module, image_size: int, *, precision: str) -> EmbeddingMemory:
    """Return the memory of a network, which exists, while it embeds a batch without gradients."""
    autocast, histories = autocast_for(precision, torch.device("cpu")), []
    try:
        for images in _COUNTED:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), LiveBytes() as live, autocast():
                network(torch.zeros(images, 3, image_size, image_size))
            histories.append(tuple(live.history))
    except Exception:
        # Tensors without content fail in many ways, and the rest of the forecast is right without it.
        return EmbeddingMemory((), ())
    first, second = histories
    if len(first) != len(second):  # it takes other steps for other batches
        first, second = (max(first, default=0),), (max(second, default=0),)
    return EmbeddingMemory(first, second)


@contextmanager
def fake_network(model: ModelSettings, image_size: int) -> Iterator[Backbone]:
    """Yield the backbone with its frozen parts and adapters, on tensors that have shapes but no memory.

    Tensors that the block creates have none either. Errors as `backbone_memory`.
    """
    net = build_on_meta(
        model.backbone,
        **model.shape,
        embedding_size=model.embedding_size,
        image_size=image_size,
        dropout=model.dropout,
        checkpoint_activations=model.checkpoint_activations,
    )
    require_prefixes(net, tuple(model.lr_factors), "model.lr_factors")
    with torch.device("meta"):
        restrict_training(net, model)
    # The CPU-only backward pass of PReLU has other temporaries than the one that a GPU runs.
    use_torch_backward(net)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield net.to_empty(device="cpu")


def _forward(net: Backbone, image_BCHW: Tensor, precision: str) -> Tensor:
    with autocast_for(precision, torch.device("cpu"))():
        feature = net.trunk(image_BCHW)
    return net.neck(feature.float())
