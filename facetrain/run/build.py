"""Builds the parts of a run from its config: the network, the head, the optimizers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
from facetrain.errors import ConfigError
from facetrain.models.initialize_from import initialize_backbone, initialize_centers
from facetrain.models.model_file import describe_backbone
from facetrain.optim.groups import build_optimizer, freeze, parameter_groups
from facetrain.optim.scaler import LossScale
from facetrain.optim.schedule import polynomial
from facetrain.optim.stepper import Stepper
from facetrain.run.build_head import build_head
from facetrain.run.step_schedule import StepSchedule
from facetrain.train.loss_spikes import SpikeDetector
from facetrain.train.precision import InPrecision, memory_format_for
from facetrain.train.state import TrainState


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
    config: Config, world: World, num_classes: int, schedule: StepSchedule, folder: Path, source: FaceDataset
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
        initialize_backbone(backbone, Path(config.model.init_from), faces)
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
    head = build_head(
        config,
        world,
        num_classes,
        folder,
        update_in_backward=config.optim.accumulate == 1 and not scale.enabled,
        steps_per_epoch=schedule.steps_per_epoch,
    )
    if config.model.init_from and config.head.init_from != "reinit":
        initialize_centers(head, Path(config.model.init_from), may_grow=config.head.init_from == "extend")
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
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
            power=config.optim.power,
        ),
        clip_grad_norm=config.optim.clip_grad_norm,
    )
    torch.manual_seed(key_of(config.seed, 4, world.rank) & (2**63 - 1))  # dropout differs from rank to rank
    tolerance = config.train.loss_spike
    spikes = None if tolerance is None else SpikeDetector(tolerance, world.device)
    return TrainState(world, network, head, stepper, spikes)


_FACES = 128


def some_faces(source: FaceDataset, image_size: int) -> Tensor:
    """Return images of a dataset, evenly spread: float32 (B, 3, H, W) from −1 to 1.

    Raises:
        ImageError: one of them cannot be decoded.
    """
    step = max(source.num_images // _FACES, 1)
    images = [
        resize_square(decode_rgb(source.read(number), location=source.location(number)), image_size)
        for number in range(0, source.num_images, step)[:_FACES]
    ]
    return normalize(torch.from_numpy(np.stack(images)))
