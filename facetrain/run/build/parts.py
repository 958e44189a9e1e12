"""Construction of a run's parts from its config: network, head, optimizer, loader."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.cpu_cores import usable_cores
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.device.capability import multiplies_bfloat16
from facetrain.distributed.sync_batch_norm import use_sync_batch_norm
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.head.head_group import HeadPart, head_parts
from facetrain.models.initialize_from import initialize_centers
from facetrain.optim.loss_scale import LossScale
from facetrain.remote.download import local_path
from facetrain.run.build.backbone import build_initial_backbone
from facetrain.run.build.distillation import build_distillation
from facetrain.run.build.head import build_head
from facetrain.run.build.step_schedule import Stage, StepSchedule
from facetrain.run.build.stepper import build_stepper
from facetrain.training.learning_check import LearningCheck, RunConditions
from facetrain.training.precision import InPrecision, memory_format_for
from facetrain.training.state import TrainState

_MAX_AUTO_WORKERS = 16
_LEAST_TRAINED = 0.01
"""A backbone counts as frozen if a smaller fraction of its weights is trained."""
# Numbers that derive independent random keys from config.seed (counter_rng.key_of); head.py uses 5, 6, 8 and 9,
# distillation.py uses 7.
_AUGMENT_STREAM = 3


def count_workers(config: Config, world: World) -> int:
    """Return the number of reading processes of this rank."""
    if config.data.workers != "auto":
        return config.data.workers
    return min(max(usable_cores() // world.local_size, 1), _MAX_AUTO_WORKERS)


def check_precision(config: Config, world: World) -> None:
    """Check that the GPU computes in the number format of the config without emulating it.

    Raises:
        ConfigError: it has no bfloat16, in which PyTorch would compute many times slower, without a word.
    """
    if config.train.precision != "bf16" or world.device.type != "cuda":
        return
    if not multiplies_bfloat16(world.device):
        version = ".".join(map(str, torch.cuda.get_device_capability(world.device)))
        raise ConfigError(
            f"train.precision: bf16 needs a GPU of compute capability 8.0 or higher, and this one has {version}; set "
            "it to fp16"
        )


def build_augment(config: Config) -> Augment:
    """Build the augmentation of image batches on the device."""
    return Augment(key_of(config.seed, _AUGMENT_STREAM), config.data.augment)


def build_loader(
    config: Config,
    world: World,
    source: FaceDataset,
    schedule: StepSchedule,
    *,
    workers: int,
    start_step: int,
) -> StagedLoader:
    """Build the loader of this rank's batches; it begins to read at once."""
    open_stage = partial(_build_stage_loader, config, world, source, workers=workers)
    # A run that is finished opens its last stage, which yields nothing.
    stages = [stage for stage in schedule.stages if stage.stop_step > start_step]
    return StagedLoader(
        [
            partial(open_stage, stage, start_step=max(stage.first_step, start_step))
            for stage in stages or schedule.stages[-1:]
        ]
    )


def _build_stage_loader(
    config: Config,
    world: World,
    source: FaceDataset,
    stage: Stage,
    skipped: list[str],
    *,
    workers: int,
    start_step: int,
) -> Loader:
    order = SampleOrder(
        config.seed,
        stage.global_batch_size,
        config.data.shuffle,
        first_step=stage.first_step,
        first_epoch=stage.first_epoch,
    )
    settings = LoaderSettings(
        config.data,
        stage.local_batch_size,
        accumulate=config.optim.accumulate,
        workers=workers,
        landmarks=takes_landmarks(config.model.backbone),
    )
    sampler = build_sampler(source, order)
    return Loader(
        source, sampler, settings, world, start_step=start_step, stop_step=stage.stop_step, skipped=skipped
    )


def build_state(
    config: Config, world: World, num_classes: int, schedule: StepSchedule, folder: Path, source: FaceDataset
) -> TrainState:
    """Build network, head and optimizers on this rank's device.

    The weights of the backbone are the same on every rank, and a class center is the same whichever rank holds it.
    """
    # On the CPU, and from one seed: its weights do not depend on the device or on the number of ranks.
    backbone = build_initial_backbone(config, source)
    memory_format = memory_format_for(backbone, world.device, channels_last=config.train.channels_last)
    # Before the optimizers are built: their moments take the layout of the weights.
    backbone = backbone.to(world.device, memory_format=memory_format)  # type: ignore[call-overload]
    if is_batch_norm_synced(config):
        # Before the compiler and the fused kernels look at the modules.
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
        # With several micro-batches, the gradient of the centers is complete only after the last one.
        update_in_backward=config.optim.accumulate == 1,
        schedule=schedule,
        source=source,
    )
    if config.model.init_from and config.head.init_from != "reinit":
        initialize_centers(
            head, local_path(config.model.init_from), may_grow=config.head.init_from == "extend"
        )
    distillation = build_distillation(
        config, world, num_classes, folder, schedule, source, build_augment(config)
    )
    # After the head and the teacher: it takes the projection, and sets the rate of the head in each step.
    stepper = build_stepper(config, backbone, head, scale, schedule, distillation)
    return TrainState(world, network, head, stepper, distillation)


def build_learning_check(config: Config, state: TrainState, schedule: StepSchedule) -> LearningCheck | None:
    """Build the check of the first steps; None for a margin that hides the nearest class, or that is not learned."""
    head, first = state.head, schedule.stages[0]
    counts_nearest = all(part.head.counts_nearest for part in head_parts(head))
    if not counts_nearest or (config.distill is not None and config.distill.margin_weight == 0):
        return None
    weights = list(state.backbone.parameters())
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    frozen = trained < _LEAST_TRAINED * sum(weight.numel() for weight in weights)
    ranks = state.world.size if is_batch_norm_synced(config) else 1
    weight_norm = None
    plain_sgd = config.optim.name == "sgd" and config.optim.muon is None
    if state.step == 0 and not config.model.init_from and plain_sgd:
        # In float64: the squares of millions of weights are added up.
        weight_norm = math.sqrt(sum(float(weight.detach().double().square().sum()) for weight in weights))
    batch = first.local_batch_size * state.world.size
    return LearningCheck(
        # Of a single head with the same chance to guess the class of an image.
        1 / sum(part.share / _classes_in_step(part, batch) for part in head_parts(head)),
        start_step=state.step,
        steps_per_epoch=first.steps_per_epoch,
        total_steps=first.stop_step,
        # A frozen backbone of another run has learned already.
        where=RunConditions(
            config.optim.model_copy(update={"lr": config.optim.lr * first.lr_factor}),
            first.local_batch_size * ranks,
            is_frozen=frozen and not config.model.init_from,
            weight_norm=weight_norm,
        ),
    )


def _classes_in_step(part: HeadPart, batch: int) -> float:
    """Return the expected number of classes in a step: the sampled ones, or the classes of the images."""
    count, images = part.head.num_classes, batch * part.share
    classes_of_images = count * (1 - (1 - 1 / count) ** images)  # of images that are drawn from all classes
    return max(part.head.classes_per_step, classes_of_images, 1)


def is_batch_norm_synced(config: Config) -> bool:
    """Return whether batch norm uses the statistics of all ranks, if there are several."""
    if config.model.batch_norm == "auto":
        # A global batch size promises a result that does not depend on the number of ranks.
        return config.train.global_batch_size is not None
    return config.model.batch_norm == "sync"
