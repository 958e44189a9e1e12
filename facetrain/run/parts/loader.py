"""Builders of what brings images to a training step: the loader of a rank, and the augmentation."""

from __future__ import annotations

from functools import partial

from facetrain.backbone.zoo import takes_landmarks
from facetrain.config.schema import Config
from facetrain.counter_rng import Stream, key_of
from facetrain.data.augmentations import build as augmentations
from facetrain.data.dataset import FaceDataset
from facetrain.data.images.augment import Augment
from facetrain.data.loading.loader import Loader, LoaderSettings
from facetrain.data.loading.sampler import SampleOrder, build_sampler
from facetrain.data.loading.staged_loader import StagedLoader
from facetrain.distributed.world import World
from facetrain.run.parts.step_schedule import Stage, StepSchedule

_MAX_AUTO_WORKERS = 16


def count_workers(config: Config, world: World) -> int:
    """Return the number of reading processes of this rank."""
    if config.data.workers != "auto":
        return config.data.workers
    return min(world.cores, _MAX_AUTO_WORKERS)


def build_augment(config: Config) -> Augment:
    """Build the augmentation of image batches on the device."""
    return augmentations.build_augment(key_of(config.seed, Stream.AUGMENTATION), config.data.augment)


def build_loader(
    config: Config,
    world: World,
    source: FaceDataset,
    schedule: StepSchedule,
    *,
    start_step: int,
) -> StagedLoader:
    """Build the loader of this rank's batches; it begins to read at once."""

    def open_stage(stage: Stage, skipped: set[str]) -> Loader:
        start = max(stage.first_step, start_step)
        return Loader(
            source,
            build_sampler(source, _order(config, stage)),
            _loader_settings(config, stage, count_workers(config, world)),
            world,
            start_step=start,
            stop_step=stage.stop_step,
            skipped=skipped,
        )

    # A run that is finished opens its last stage, which yields nothing.
    stages = [stage for stage in schedule.stages if stage.stop_step > start_step]
    return StagedLoader([partial(open_stage, stage) for stage in stages or schedule.stages[-1:]])


def _order(config: Config, stage: Stage) -> SampleOrder:
    return SampleOrder(
        config.seed,
        stage.global_batch_size,
        config.data.shuffle,
        first_step=stage.first_step,
        first_epoch=stage.first_epoch,
    )


def _loader_settings(config: Config, stage: Stage, workers: int) -> LoaderSettings:
    return LoaderSettings(
        stage.local_batch_size,
        config.data.image_size,
        accumulate=config.optim.accumulate,
        workers=workers,
        skip_bad=config.data.bad_records == "skip",
        landmarks=takes_landmarks(config.model.backbone),
    )
