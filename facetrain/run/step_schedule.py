"""Batch sizes and step counts of a run."""

from __future__ import annotations

from dataclasses import dataclass

from facetrain.config.schema import Config
from facetrain.errors import ConfigError, DataError

DEFAULT_BATCH_SIZE = 128
"""Images per rank and micro-batch if the config gives no batch size."""


@dataclass(frozen=True)
class StepSchedule:
    """Batch sizes and step counts, computed from the config, the size of the dataset and the number of ranks."""

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


def local_batch_size(config: Config, world_size: int) -> int:
    """Return the images per rank and micro-batch.

    Raises:
        ConfigError: the global batch cannot be divided among the ranks.
    """
    micro_batches = world_size * config.optim.accumulate
    requested = config.train.global_batch_size
    if requested and requested % micro_batches:
        raise ConfigError(
            f"train.global_batch_size: {requested} images cannot be divided among {world_size} ranks in "
            f"{config.optim.accumulate} micro-batches each; use a multiple of {micro_batches}"
        )
    local = requested // micro_batches if requested else config.train.batch_size or DEFAULT_BATCH_SIZE
    if local < 2:
        # Batch norm has no variance over one image.
        raise ConfigError(
            f"train: {local} image per rank and micro-batch is too few for batch normalization; use at least 2"
        )
    return local


def schedule_steps(config: Config, num_images: int, world_size: int) -> StepSchedule:
    """Compute the batch sizes and step counts of a run.

    Raises:
        ConfigError: the global batch cannot be divided among the ranks, or the warm-up is too long for the schedule.
        DataError: the dataset is smaller than one global batch.
    """
    local = local_batch_size(config, world_size)
    micro_batches = world_size * config.optim.accumulate
    steps = num_images // (local * micro_batches)
    if steps == 0:
        raise DataError(
            f"{config.data.train}: the dataset has {num_images:,} images, fewer than one global batch of "
            f"{local * micro_batches:,}; reduce the batch size"
        )
    total = min(steps * config.train.epochs, config.train.max_steps or steps * config.train.epochs)
    warmup = round(config.optim.warmup_epochs * steps)
    if config.optim.schedule == "one_cycle" and 2 * warmup > total:
        raise ConfigError(
            f"optim.warmup_epochs: {config.optim.warmup_epochs:g} epochs ({warmup:,} steps) are more than half of the "
            f"run ({total:,} steps), and one_cycle descends as long as it grows; use at most {total / 2 / steps:g}"
        )
    return StepSchedule(local, local * micro_batches, steps, total, warmup)
