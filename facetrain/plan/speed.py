"""How long a step takes: products, memory and network, each by its rate."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K

from __future__ import annotations

from dataclasses import dataclass

from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import BackboneCost
from facetrain.plan.device import (
    BETWEEN_MACHINES,
    GPUS_PER_MACHINE,
    HOST_LINK,
    MEMORY_REACHED,
    PRODUCTS_REACHED,
    STEP_SECONDS,
    Device,
)
from facetrain.plan.forecast import backbone_cost, head_shape, local_batch
from facetrain.plan.head_cost import HeadShape

_PRODUCTS = 4
"""Of (G × D) by (D × S): logits twice, and the gradients of embeddings and of centers."""
_BYTES_PER_LOGIT = 80
"""Read and written by the passes over a chunk."""
_BYTES_PER_SAMPLED_NUMBER = 32
"""Of centers and momentum: read three times, written once."""
_BYTES_PER_DRAWN_CLASS = 200
"""Of the hash that draws the sample: a dozen passes over int64."""
_PRODUCT_EFFICIENCY, _MEMORY_EFFICIENCY = 0.5, 0.8
_LATENCY = 50e-6
"""Seconds before a collective's first byte."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by part."""

    backbone: float
    head: float
    network: float
    images: int
    """Of the global batch."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.backbone + self.head + self.network

    @property
    def images_per_second(self) -> float:
        """Over all ranks, evaluation and saving left aside."""
        return self.images / self.seconds


def step_time(config: Config, num_classes: int, gpus: int, device: Device) -> StepTime:
    """Estimate a step on `gpus` GPUs, eight to a machine."""
    batch, parts = local_batch(config, gpus), config.optim.accumulate
    cost = backbone_cost(config, gpus)
    backbone = STEP_SECONDS + parts * batch * _backbone(cost, config, device)
    shape = head_shape(config, num_classes, gpus, batch)
    return StepTime(
        backbone=backbone,
        head=parts * _head(shape, device),
        network=_network(shape, cost, config, gpus, device, overlap=backbone / parts / 3),
        images=batch * gpus * parts,
    )


def _backbone(cost: BackboneCost, config: Config, device: Device) -> float:
    """Return seconds per image: its products, then the bytes that its operations read and write on their own."""
    rate = device.flops_32 if config.train.precision == "fp32" else device.flops_16
    again = 4 / 3 if config.model.checkpoint_activations else 1.0
    products = again * cost.flops_per_image / (rate * PRODUCTS_REACHED)
    return products + cost.moved_per_image / (device.memory_bytes * MEMORY_REACHED)


def _head(shape: HeadShape, device: Device) -> float:
    logits = shape.global_batch * shape.sampled
    rate = (device.flops_16 if shape.product_bytes == 2 else device.flops_32) * _PRODUCT_EFFICIENCY
    memory = device.memory_bytes * _MEMORY_EFFICIENCY
    numbers = shape.sampled * shape.embedding_size
    moved = logits * _BYTES_PER_LOGIT + numbers * _BYTES_PER_SAMPLED_NUMBER
    if shape.sample_rate < 1:
        moved += shape.rows * _BYTES_PER_DRAWN_CLASS
    seconds = _PRODUCTS * 2 * logits * shape.embedding_size / rate + moved / memory
    if shape.placement != "device":
        seconds += 4 * 4 * numbers / HOST_LINK
    return seconds


def _network(
    shape: HeadShape, cost: BackboneCost, config: Config, gpus: int, device: Device, *, overlap: float
) -> float:
    """Gather and scatter embeddings in each micro-batch; sum gradients while the backward pass runs."""
    if gpus == 1:
        return 0.0
    rate = device.link_bytes if gpus <= GPUS_PER_MACHINE else BETWEEN_MACHINES
    embeddings = 2 * shape.global_batch * shape.embedding_size * 4
    width = 4 if config.train.compress_gradients == "none" else 2
    gradients = 2 * cost.parameters * width / rate
    gathering = config.optim.accumulate * (embeddings / rate + 4 * _LATENCY)
    return gathering + max(gradients - overlap, 0.0) + _LATENCY
