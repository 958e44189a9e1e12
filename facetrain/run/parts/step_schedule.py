"""Batch sizes and step counts of a run, in all its stages."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.head.settings import HeadSettings
from facetrain.text import count_text

DEFAULT_BATCH_SIZE = 128
"""Images per rank and micro-batch if the config gives no batch size."""

_STAGE_KEYS = {"train": ("batch_size", "global_batch_size"), "head": ("sample_rate", "expectations")}
"""Sections of the config, with those of their keys that a stage may have too."""


@dataclass(frozen=True)
class Stage:
    """Consecutive epochs with the same settings."""

    first_step: int
    stop_step: int
    """First step that is not in the stage."""
    first_epoch: int
    """Epoch of the first step, from 0."""
    local_batch_size: int
    """Images per rank and micro-batch."""
    global_batch_size: int
    """Images per step, over all ranks and micro-batches."""
    steps_per_epoch: int
    """Whole global batches in the dataset. The images that remain are dropped."""
    lr_factor: float
    """Factor on the scheduled learning rate, by `optim.batch_scaling`."""
    head: HeadSettings
    """Settings of the head, with the sample rate and the expectations of the stage."""

    def describe(self) -> str:
        """Return the settings of the stage in words."""
        anchor, rate = self.head.expectations, self.head.sample_rate
        anchors = "" if anchor == "off" else f", {anchor} expectations"
        classes = "all classes" if rate else "the classes of the batch"
        if 0 < rate < 1:
            classes = f"{rate:.3g} of the classes"
        return f"{self.global_batch_size:,} images per step, {classes}{anchors}"


@dataclass(frozen=True)
class StepSchedule:
    """Batch sizes and step counts, computed from the config, the size of the dataset and the number of ranks.

    Without `train.stages`, a run has one stage. With them, the batch sizes and the steps per epoch below are the
    config's without its stages.
    """

    local_batch_size: int
    """Images per rank and micro-batch."""
    global_batch_size: int
    """Images per step, over all ranks and micro-batches."""
    steps_per_epoch: int
    """Whole global batches in the dataset. The images that remain are dropped."""
    total_steps: int
    """The run ends after this step."""
    warmup_steps: int
    """Steps with a linearly growing learning rate."""
    stages: tuple[Stage, ...]
    """Stages of the run, in their order; none is empty."""
    steps_of_all_epochs: int
    """Steps of the run if `train.max_steps` does not end it earlier."""

    def stage_at(self, step: int) -> Stage:
        """Return the stage of a step; the last one for steps after the end of the run."""
        return self.stages[max(bisect_right(self.stages, step, key=lambda stage: stage.first_step) - 1, 0)]

    def progress(self, step: int) -> float:
        """Return the epochs before a step, times `steps_per_epoch`: the step itself, if the batch is always the same.

        The learning rate schedule counts in this unit. Every epoch has the same part of it, whatever its batch size.
        """
        if all(stage.steps_per_epoch == self.steps_per_epoch for stage in self.stages):
            return step
        stage = self.stage_at(step)
        return self.steps_per_epoch * (stage.first_epoch + (step - stage.first_step) / stage.steps_per_epoch)

    def epochs(self, step: int) -> float:
        """Return the epochs before a step."""
        return self.progress(step) / self.steps_per_epoch

    def images_after(self, step: int) -> int:
        """Return the images of the steps that follow the first `step` ones."""
        return sum(
            max(stage.stop_step - max(stage.first_step, step), 0) * stage.global_batch_size
            for stage in self.stages
        )


def stage_configs(config: Config) -> Iterator[tuple[int, Config]]:
    """Yield the last epoch of each stage, and the config with its values; also of the epochs after the last one."""
    for stage in config.train.stages:
        sections = {}
        for section, keys in _STAGE_KEYS.items():
            values = {key: getattr(stage, key) for key in keys if getattr(stage, key) is not None}
            sections[section] = getattr(config, section).model_copy(update=values)
        yield stage.until_epoch, config.model_copy(update=sections)
    if not config.train.stages or config.train.stages[-1].until_epoch < config.train.epochs:
        yield config.train.epochs, config


def local_batch_size(config: Config, world_size: int) -> int:
    """Return the images per rank and micro-batch, without regard to stages.

    Raises:
        ConfigError: the global batch cannot be divided among the ranks.
    """
    # A global batch consists of `local` images for each rank and micro-batch.
    micro_batches = world_size * config.optim.accumulate
    requested = config.train.global_batch_size
    if requested and requested % micro_batches:
        raise ConfigError(
            f"train.global_batch_size: {requested} images cannot be divided among {count_text(world_size, 'rank')} in "
            f"{count_text(config.optim.accumulate, 'micro-batch', 'micro-batches')} each; use a multiple of "
            f"{micro_batches}"
        )
    local = requested // micro_batches if requested else config.train.batch_size or DEFAULT_BATCH_SIZE
    if local < 2:
        # Batch norm has no variance over one image.
        raise ConfigError(
            f"train: {local} image per rank and micro-batch is too few for batch normalization; use at least 2"
        )
    return local


def global_batch_size(config: Config, world_size: int) -> int:
    """Return the images per step of all ranks, over all micro-batches.

    Raises:
        ConfigError: as `local_batch_size`.
    """
    return local_batch_size(config, world_size) * world_size * config.optim.accumulate


def schedule_steps(config: Config, num_images: int, world_size: int) -> StepSchedule:
    """Compute the batch sizes and step counts of a run.

    Raises:
        ConfigError: the global batch cannot be divided among the ranks, or is larger than the dataset.
    """
    local = local_batch_size(config, world_size)
    global_batch = local * world_size * config.optim.accumulate
    steps = _steps_per_epoch(config, num_images, global_batch)
    stages, first_step, first_epoch = [], 0, 0
    for number, (until_epoch, staged) in enumerate(stage_configs(config), start=1):
        try:
            stage_local = local_batch_size(staged, world_size)
            stage_batch = stage_local * world_size * config.optim.accumulate
            stage_steps = _steps_per_epoch(staged, num_images, stage_batch)
        except ConfigError as error:
            raise ConfigError(f"stage {number} of train.stages: {error}") from error
        # Whole epochs, each with the number of steps that follows from the batch size of the stage.
        stop_step = first_step + (until_epoch - first_epoch) * stage_steps
        stages.append(
            Stage(
                first_step=first_step,
                stop_step=min(stop_step, config.train.max_steps or stop_step),
                first_epoch=first_epoch,
                local_batch_size=stage_local,
                global_batch_size=stage_batch,
                steps_per_epoch=stage_steps,
                lr_factor=lr_factor(config, stage_batch / global_batch),
                head=staged.head,
            )
        )
        first_step, first_epoch = stop_step, until_epoch
    return StepSchedule(
        local,
        global_batch,
        steps,
        # The schedule of the learning rate is fitted to this step, so that a short run ends at its final rate, too.
        total_steps=min(first_step, config.train.max_steps or first_step),
        warmup_steps=round(config.optim.warmup_epochs * steps),
        # `max_steps` can end the run before a stage begins.
        stages=tuple(stage for stage in stages if stage.first_step < stage.stop_step),
        steps_of_all_epochs=first_step,
    )


def _steps_per_epoch(config: Config, num_images: int, global_batch: int) -> int:
    if num_images < global_batch:
        key = "train.batch_size" if config.train.global_batch_size is None else "train.global_batch_size"
        raise ConfigError(
            f"{config.data.train}: the dataset has {count_text(num_images, 'image')}, fewer than one global batch of "
            f"{global_batch:,}; give a smaller {key}"
        )
    return num_images // global_batch


def lr_factor(config: Config, ratio: float) -> float:
    """Return the factor on the learning rate for a global batch that is `ratio` times the config's.

    Linear: Goyal et al., "Accurate, Large Minibatch SGD" (arXiv 1706.02677), section 2.1. Square root, for Adam:
    Malladi et al., "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms" (NeurIPS 2022).
    """
    rule = config.optim.batch_scaling
    if rule == "auto":
        rule = "linear" if config.optim.name == "sgd" else "sqrt"
    return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[rule]
