"""Memory of a backbone, counted in a training step on tensors that have shapes but no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_on_meta
from facetrain.optim.parameter_names import require_prefixes
from facetrain.plan.memory import line_through, remembered
from facetrain.run.parts.backbone import restrict_training
from facetrain.torch_private import FakeTensorMode, LiveBytes
from facetrain.training.precision import autocast_for


class BackboneMemory(NamedTuple):
    """Bytes of one backbone on one rank, and of a step with a batch."""

    parameters: int
    """Number of trainable parameters."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    kept: Callable[[int], int]
    """Bytes after the forward pass of a batch: activations, and weights cast to 16 bits."""
    peak: Callable[[int], int]
    """Largest number of bytes that exist at a time, by the batch."""


@remembered
def backbone_memory(
    model: ModelSettings, image_size: int, *, precision: str, batch: int, gradients_held: bool = True
) -> BackboneMemory:
    """Count a training step with `batch` images and with twice as many.

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
    net = training_network(model, image_size)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    counts = [
        _count_step(net, images, image_size, precision, gradients_held) for images in (batch, 2 * batch)
    ]
    kept, peak = (line_through(batch, one, 2 * batch, two) for one, two in zip(*counts, strict=True))
    state_bytes = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    return BackboneMemory(sum(weight.numel() for weight in weights), state_bytes, kept, peak)


@remembered
def forward_bytes(model: ModelSettings, image_size: int, *, batch: int) -> int:
    """Return the peak of bytes while a backbone embeds a batch in float32, as verification does."""
    plain = model.model_copy(update={"checkpoint_activations": False})
    net = training_network(plain, image_size).eval()
    with FakeTensorMode():
        give_fake_tensors(net)
        image_BCHW = torch.zeros(batch, 3, image_size, image_size)
        with torch.no_grad(), LiveBytes() as live:
            _forward(net, image_BCHW, "fp32")
        return live.peak


def training_network(model: ModelSettings, image_size: int) -> Backbone:
    """Return the backbone with its frozen parts and adapters, on the meta device."""
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
    return net


def _count_step(
    net: Backbone, images: int, side: int, precision: str, gradients_held: bool
) -> tuple[int, int]:
    """Return the bytes between the passes, and at the peak."""
    with FakeTensorMode():
        give_fake_tensors(net)
        if gradients_held:
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        image_BCHW = torch.zeros(images, 3, side, side)
        with LiveBytes() as live:
            embedding_BD = _forward(net, image_BCHW, precision)
            kept = live.now
            embedding_BD.backward(torch.zeros_like(embedding_BD))
        return kept, live.peak


def _forward(net: Backbone, image_BCHW: Tensor, precision: str) -> Tensor:
    with autocast_for(precision, torch.device("cpu"))():
        feature = net.trunk(image_BCHW)
    return net.neck(feature.float())


def give_fake_tensors(net: nn.Module) -> None:
    """Replace the tensors of a network on the meta device by fake tensors on the CPU."""
    # The CPU-only backward pass of PReLU has other temporaries than the one that a GPU runs.
    use_torch_backward(net)
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = torch.zeros(parameter.shape)
                module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
