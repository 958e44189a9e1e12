"""Forecast of the time of a step: products, memory and network, each by its rate."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K

from __future__ import annotations

from dataclasses import dataclass, replace

from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import BackboneCost, backbone_cost
from facetrain.plan.device import (
    BETWEEN_MACHINES,
    GPUS_PER_MACHINE,
    HOST_LINK,
    LAUNCH_SECONDS,
    PRODUCTS_REACHED,
    Device,
)
from facetrain.plan.forecast import head_load
from facetrain.plan.head_cost import HeadLoad, moved_per_number
from facetrain.plan.memory_traffic import weight_bytes
from facetrain.plan.pass_cost import PassCost
from facetrain.run.parts.step_schedule import local_batch_size

# Estimates, counted from the operations of facetrain/head (class_chunk.py, sampling.py); not measured on a GPU.
_PRODUCTS = 4
"""Products of (G × D) and (D × S) per step: the logits twice, and the gradients of embeddings and of centers."""
_EXPECTATION_PRODUCTS = 3
"""The same without the gradient of the centers, for the expectations of the classes."""
_BYTES_PER_LOGIT, _BYTES_PER_FUSED_LOGIT = 80, 6
"""Bytes that a chunk's operations read and write per logit: elementwise operations in float32; or fused kernels, which
write the slope once in 16 bits, and the two products that read it."""
_PRODUCT_EFFICIENCY, _MEMORY_EFFICIENCY = 0.5, 0.8
"""Shares of the vendor's product rate and memory bandwidth that the head reaches: assumptions."""
_LATENCY = 50e-6
"""Seconds before the first byte of a collective: an assumption."""
_FLOAT32 = 4


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by part; without a teacher and its class centers."""

    device: float
    """Kernels of the backbone and of its optimizer."""
    host: float
    """Launches of these kernels. The host launches them while the device runs earlier ones."""
    head: float
    network: float
    images: int
    """Images of the global batch."""

    @property
    def backbone(self) -> float:
        """Seconds of the backbone: of the device, or of the host if it launches more slowly than they run."""
        return max(self.device, self.host)

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.backbone + self.head + self.network

    @property
    def images_per_second(self) -> float:
        """Images per second over all ranks, without verification and checkpoints."""
        return self.images / self.seconds


def step_time(config: Config, num_classes: int, gpus: int, device: Device) -> StepTime:
    """Return the estimated time of a step on `gpus` GPUs, eight per machine.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
    """
    batch, micro_batches = local_batch_size(config, gpus), config.optim.accumulate
    cost = backbone_cost(config, gpus)
    seconds = micro_batches * _pass_seconds(cost.step, batch, config, device)
    seconds += weight_bytes(cost.parameters, config.optim.moments) / (
        device.memory_bytes * device.memory_reached
    )
    head = head_load(config, num_classes, gpus, batch)
    if config.train.precision == "fp16" and not device.has_bf16:
        head = replace(head, product_bytes=4)
    # DDP exchanges gradients while the rest of the backward pass of the last micro-batch runs. How much of it
    # they can hide behind is an assumption: a third of that micro-batch.
    overlap = seconds / micro_batches / 3
    replayed = config.train.compile == "reduce-overhead"
    return StepTime(
        device=seconds,
        # Replayed code is launched as a whole.
        host=0.0 if replayed else micro_batches * cost.step.launches * LAUNCH_SECONDS,
        head=micro_batches * head_seconds(head, device),
        network=_network_seconds(head, cost, config, gpus, device, overlap=overlap),
        images=batch * gpus * micro_batches,
    )


def _pass_seconds(cost: PassCost, batch: int, config: Config, device: Device) -> float:
    """Return the time of the products, and then of the bytes that the kernels read and write."""
    rate = device.flops_32 if config.train.precision == "fp32" else device.flops_16
    # Checkpointing repeats the forward pass, which is a third of forward and backward. Its bytes are counted.
    repeated = 4 / 3 if config.model.checkpoint_activations else 1.0
    products = batch * repeated * cost.flops_per_image / (rate * PRODUCTS_REACHED)
    return products + cost.moved(batch) / (device.memory_bytes * device.memory_reached)


def head_seconds(load: HeadLoad, device: Device) -> float:
    """Return the estimated time of the head for one micro-batch: forward and backward pass, and the update."""
    logits = load.global_batch * load.sampled
    rate = (device.flops_16 if load.product_bytes == 2 else device.flops_32) * _PRODUCT_EFFICIENCY
    memory = device.memory_bytes * _MEMORY_EFFICIENCY
    numbers = load.sampled * load.embedding_size
    # `head.class_chunk.fused_chunks_available` also requires a margin for which there are kernels.
    fused = load.product_bytes == 2 and device.has_bf16
    moved = logits * (_BYTES_PER_FUSED_LOGIT if fused else _BYTES_PER_LOGIT)
    one_pass = device.has_bf16 and load.optim.name == "sgd"
    moved += numbers * moved_per_number(load, one_pass=one_pass)
    products = _PRODUCTS
    if load.settings.expectations != "off":
        products += _EXPECTATION_PRODUCTS
        moved += logits * (_BYTES_PER_FUSED_LOGIT if fused else _BYTES_PER_LOGIT)
        # Read in the forward pass and again in the backward pass.
        moved += 2 * numbers * load.product_bytes
    seconds = products * 2 * logits * load.embedding_size / rate + moved / memory
    if load.settings.placement != "device":
        # Centers and momentum, there and back.
        seconds += 4 * _FLOAT32 * numbers / HOST_LINK
    return seconds


def _network_seconds(
    load: HeadLoad, cost: BackboneCost, config: Config, gpus: int, device: Device, *, overlap: float
) -> float:
    """Return the time to gather and scatter embeddings, and of the part of the all-reduce that nothing hides."""
    if gpus == 1:
        return 0.0
    rate = device.link_bytes if gpus <= GPUS_PER_MACHINE else BETWEEN_MACHINES
    embeddings = 2 * load.global_batch * load.embedding_size * _FLOAT32
    gradient_bytes = _FLOAT32 if config.train.compress_gradients == "none" else 2
    # A ring's all-reduce sends nearly two times the message from each rank.
    gradients = 2 * cost.parameters * gradient_bytes / rate
    # Four collectives per micro-batch: labels, embeddings, statistics, and the embeddings' gradient.
    gathering = config.optim.accumulate * (embeddings / rate + 4 * _LATENCY)
    return gathering + max(gradients - overlap, 0.0) + _LATENCY
