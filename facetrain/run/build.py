"""Builds the parts of a run from its config: the network, the head, the optimizers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from facetrain.backbone.zoo import build_backbone
from facetrain.config.loading import plain_config
from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.cpu_cores import usable_cores
from facetrain.data.augment import Augment, normalize
from facetrain.data.dali import require_dali
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from facetrain.distributed.world import World
from facetrain.errors import ConfigError, DataError
from facetrain.head.margin_head import MarginHead
from facetrain.head.margins import build_margin
from facetrain.models.initial_weights import start_from, take_centers
from facetrain.models.model_file import describe_backbone
from facetrain.optim.groups import build_optimizer, freeze, parameter_groups
from facetrain.optim.scaler import LossScale
from facetrain.optim.schedule import polynomial
from facetrain.optim.stepper import Stepper
from facetrain.train.loss_spikes import SpikeDetector
from facetrain.train.precision import InPrecision, memory_format_for
from facetrain.train.state import TrainState

_DEFAULT_BATCH = 128
# torch 2.13 renamed the option.
_SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel.__init__).parameters
)
OWN_BUFFERS: dict[str, Any] = {_SYNC_BUFFERS: False}
"""For DDP: batch norm's statistics stay each rank's own until they are averaged."""


@dataclass(frozen=True)
class Plan:
    """The whole numbers that follow from the config, the dataset and the number of ranks."""

    local_batch_size: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    warmup_steps: int


def build_augment(config: Config) -> Augment:
    """Return what is done to each image on the device."""
    return Augment(key_of(config.seed, 3), **config.data.augment.model_dump())


def check_decode(config: Config, world: World) -> None:
    """Refuse to decode images on a device that cannot, or with a library that is not there.

    Raises:
        ConfigError: the device is none of CUDA.
        DataError: DALI is not installed.
    """
    if config.data.decode == "gpu" and world.device.type != "cuda":
        raise ConfigError(
            f"data.decode: gpu is for CUDA, and this run is on {world.device.type}; set it to cpu"
        )
    if config.data.decode == "dali":
        require_dali()


def count_workers(config: Config, world: World) -> int:
    """Return how many processes of this rank read and decode images."""
    if config.data.workers != "auto":
        return config.data.workers
    return min(max(usable_cores() // world.local_size, 1), 16)


def plan_steps(config: Config, num_images: int, world_size: int) -> Plan:
    """Work out batch sizes and steps.

    Raises:
        ConfigError: the global batch cannot be shared by the ranks.
        DataError: the dataset is smaller than one global batch.
    """
    parts = world_size * config.optim.accumulate
    wanted = config.train.global_batch_size
    if wanted and wanted % parts:
        raise ConfigError(
            f"train.global_batch_size: {wanted} images cannot be shared by {world_size} ranks in "
            f"{config.optim.accumulate} micro-batches; take a multiple of {parts}"
        )
    local = wanted // parts if wanted else config.train.batch_size or _DEFAULT_BATCH
    if local < 2:
        raise ConfigError(
            f"train: {local} image per rank and micro-batch is too few for batch normalization; take 2"
        )
    steps = num_images // (local * parts)
    if steps == 0:
        raise DataError(
            f"{config.data.train}: {num_images:,} images are fewer than one global batch of {local * parts:,}"
        )
    total = min(steps * config.train.epochs, config.train.max_steps or steps * config.train.epochs)
    warmup = round(config.optim.warmup_epochs * steps)
    return Plan(local, local * parts, steps, total, warmup)


def describe(config: Config) -> dict[str, Any]:
    """Return what a model file of this run says of its network, and of how it was trained."""
    described = describe_backbone(
        config.model.backbone,
        **({"layers": config.model.layers, "widths": config.model.widths} if config.model.layers else {}),
        embedding_size=config.model.embedding_size,
        image_size=config.data.image_size,
    )
    return described | {"config": plain_config(config)}


def build_state(
    config: Config, world: World, num_classes: int, plan: Plan, folder: Path, source: FaceDataset
) -> TrainState:
    """Build network, head and optimizers on this rank's device, the same on every rank."""
    torch.manual_seed(config.seed)  # the same weights on every rank
    options = describe(config)["backbone"]
    backbone = build_backbone(
        options.pop("name"),
        **options,
        dropout=config.model.dropout,
        checkpoint_activations=config.model.checkpoint_activations,
    )
    if config.model.init_from:
        faces = partial(some_faces, source, config.data.image_size)
        start_from(backbone, Path(config.model.init_from), faces)
    freeze(backbone, config.model.freeze)
    memory_format = memory_format_for(backbone, world.device, channels_last=config.train.channels_last)
    backbone = backbone.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]
    sync = config.model.batch_norm == "sync" or (
        config.model.batch_norm == "auto" and config.train.global_batch_size is not None
    )
    if sync:
        use_sync_batch_norm(backbone, world.device)
    network = InPrecision(
        backbone,
        config.train.precision,
        world.device,
        memory_format=memory_format,
        compile=config.train.compile,
    )
    scale = LossScale(world.device, enabled=config.train.precision == "fp16")
    head = _build_head(
        config,
        world,
        num_classes,
        folder,
        fused=config.optim.accumulate == 1 and not scale.enabled,
        steps_per_epoch=plan.steps_per_epoch,
    )
    if config.model.init_from and config.head.init_from != "reinit":
        take_centers(head, Path(config.model.init_from), may_grow=config.head.init_from == "extend")
    stepper = Stepper(
        backbone,
        build_optimizer(
            parameter_groups(backbone, config.model.lr_factors),
            config.optim.name,
            momentum=config.optim.momentum,
            betas=config.optim.betas,
            eps=config.optim.eps,
            weight_decay=config.optim.weight_decay,
        ),
        head,
        scale,
        schedule=lambda step: polynomial(
            step,
            base=config.optim.lr,
            warmup_steps=plan.warmup_steps,
            total_steps=plan.total_steps,
            power=config.optim.power,
        ),
        clip_grad_norm=config.optim.clip_grad_norm,
    )
    torch.manual_seed(key_of(config.seed, 4, world.rank) & (2**63 - 1))  # dropout differs from rank to rank
    tolerance = config.train.loss_spike
    spikes = None if tolerance is None else SpikeDetector(tolerance, world.device)
    return TrainState(world, network, head, stepper, spikes)


def _build_head(
    config: Config, world: World, num_classes: int, folder: Path, *, fused: bool, steps_per_epoch: int
) -> MarginHead:
    drop_epoch, placement, block = (
        config.head.drop_sub_centers_epoch,
        config.head.placement,
        config.head.sample_block,
    )
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
    return MarginHead(
        embedding_size=config.model.embedding_size,
        num_classes=num_classes,
        margin=build_margin(**config.head.margin.model_dump(), seed=key_of(config.seed, 6)),
        rank=world.rank,
        world_size=world.size,
        loss=config.head.loss,
        negative_weight=config.head.negative_weight,
        sub_centers=config.head.sub_centers,
        drop_from_step=None if drop_epoch is None else round(drop_epoch * steps_per_epoch),
        drop_angle=config.head.drop_angle,
        sample_rate=config.head.sample_rate,
        sample_block=(8 if placement == "disk" else 1) if block == "auto" else block,
        seed=key_of(config.seed, 5),
        optimizer=config.optim.name,
        momentum=config.optim.momentum,
        betas=config.optim.betas,
        eps=config.optim.eps,
        weight_decay=config.optim.weight_decay,
        weight_dtype=dtypes[config.head.weight_dtype],
        momentum_dtype=dtypes[config.head.momentum_dtype],
        placement=placement,
        folder=folder / "centers" if placement == "disk" else None,
        fused=fused,
        chunk_size=None if config.head.chunk_size == "auto" else config.head.chunk_size,
        # The products of the sweep in 16 bits, its statistics and the own class's cosine never.
        product_dtype=torch.bfloat16 if config.train.precision == "bf16" else None,
        device=world.device,
    )


def distribute(network: nn.Module, world: World, compress: str, *, accumulate: int = 1) -> nn.Module:
    """Put DDP around a network, where there is more than one rank."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if world.size == 1:
        return network
    wrapped = DistributedDataParallel(
        network,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        # Every step takes the same way; micro-batches do not, which exchange nothing but for the last.
        static_graph=accumulate == 1,
        **OWN_BUFFERS,
    )
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    if compress in hooks:
        wrapped.register_comm_hook(None, hooks[compress])
    return wrapped


_FACES = 128


def some_faces(source: FaceDataset, image_size: int) -> Tensor:
    """Return images of a dataset, evenly spread: float32 (B, 3, H, W) from −1 to 1.

    Raises:
        ImageError: one of them cannot be decoded.
    """
    step = max(source.num_images // _FACES, 1)
    images = [
        resize_square(decode_rgb(source.read(number), where=source.where(number)), image_size)
        for number in range(0, source.num_images, step)[:_FACES]
    ]
    return normalize(torch.from_numpy(np.stack(images)))
