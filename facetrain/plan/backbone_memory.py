"""Memory and operations of a backbone, counted in a training step on tensors that have shapes but no memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from facetrain.backbone.base import Backbone
from facetrain.backbone.prelu import use_torch_backward
from facetrain.backbone.settings import ModelSettings
from facetrain.backbone.zoo import build_on_meta
from facetrain.config.schema import Config
from facetrain.optim.parameter_names import require_prefixes
from facetrain.plan.memory_traffic import MemoryTraffic
from facetrain.plan.pass_cost import PassCost, count_twice, remembered
from facetrain.run.parts.backbone import restrict_training
from facetrain.run.parts.step_schedule import local_batch_size
from facetrain.torch_private import FakeTensorMode, LiveBytes
from facetrain.training.precision import autocast_for


@dataclass(frozen=True)
class BackboneCost:
    """Bytes of one backbone on one rank, and the cost of a step."""

    parameters: int
    """Number of trainable parameters."""
    state_bytes: int
    """Bytes of parameters and buffers."""
    step: PassCost
    """Forward and backward pass for one micro-batch."""


def backbone_cost(config: Config, gpus: int) -> BackboneCost:
    """Return the cost of the config's backbone. Results are remembered.

    Args:
        config: run description.
        gpus: ranks of the whole run.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs, or a prefix of `model` names no part.
        ModelError: the image size does not fit the backbone.
    """
    return measure_backbone(
        config.model,
        config.data.image_size,
        precision=config.train.precision,
        batch=local_batch_size(config, gpus),
        # DDP's buckets hold the gradients before the backward pass, and after it.
        gradients_held=gpus > 1,
    )


@remembered
def measure_backbone(
    model: ModelSettings,
    image_size: int,
    *,
    precision: str,
    batch: int,
    gradients_held: bool = True,
) -> BackboneCost:
    """Count a training step with `batch` images and with twice as many.

    Args:
        model: section `model` of the config.
        image_size: side of the images in pixels.
        precision: fp32, bf16 or fp16.
        batch: images per rank and micro-batch.
        gradients_held: the gradients exist before the backward pass.

    Raises:
        ConfigError: `model` names parts that the backbone does not have.
        ModelError: the image size does not fit the backbone.
    """
    net = _training_network(model, image_size)
    weights = [weight for weight in net.parameters() if weight.requires_grad]
    return BackboneCost(
        parameters=sum(weight.numel() for weight in weights),
        state_bytes=sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers())),
        step=count_twice(
            lambda images: _count_step(net, images, image_size, precision, gradients_held),
            batch,
            _count_flops(model, image_size),
        ),
    )


@remembered
def forward_bytes(model: ModelSettings, image_size: int, *, batch: int) -> int:
    """Return the peak of bytes while a backbone embeds a batch in float32, as verification does."""
    plain = model.model_copy(update={"checkpoint_activations": False})
    net = _training_network(plain, image_size).eval()
    with FakeTensorMode():
        _give_fake_tensors(net)
        image_BCHW = torch.zeros(batch, 3, image_size, image_size)
        with torch.no_grad(), LiveBytes() as live:
            _forward(net, image_BCHW, "fp32")
        return live.peak


def _training_network(model: ModelSettings, image_size: int) -> Backbone:
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
) -> tuple[int, int, int, int]:
    """Return launches, and bytes moved, kept and at the peak."""
    with FakeTensorMode():
        _give_fake_tensors(net)
        if gradients_held:
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        image_BCHW = torch.zeros(images, 3, side, side)
        with LiveBytes() as live, MemoryTraffic() as traffic:
            kept = _forward_and_backward(net, image_BCHW, precision, live)
        return traffic.launches, traffic.bytes, kept, live.peak


def _forward_and_backward(net: Backbone, image_BCHW: Tensor, precision: str, live: LiveBytes) -> int:
    """Run both passes; return the bytes that exist between them."""
    embedding_BD = _forward(net, image_BCHW, precision)
    kept = live.now
    embedding_BD.backward(torch.zeros_like(embedding_BD))
    return kept


@remembered
def _count_flops(model: ModelSettings, image_size: int) -> int:
    # Not together with the bytes: the counter's hooks would keep recomputed activations alive.
    net = _training_network(model.model_copy(update={"checkpoint_activations": False}), image_size)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        _give_fake_tensors(net)
        _forward(net, torch.zeros(2, 3, image_size, image_size), "fp32").sum().backward()
    return counter.get_total_flops() // 2


def _forward(net: Backbone, image_BCHW: Tensor, precision: str) -> Tensor:
    with autocast_for(precision, torch.device("cpu"))():
        feature = net.trunk(image_BCHW)
    return net.neck(feature.float())


def _give_fake_tensors(net: nn.Module) -> None:
    """Replace the tensors of a network on the meta device by fake tensors on the CPU."""
    # The CPU-only backward pass of PReLU has other temporaries than the one that a GPU runs.
    use_torch_backward(net)
    for module in net.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = nn.Parameter(torch.zeros(parameter.shape), parameter.requires_grad)
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
