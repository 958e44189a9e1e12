"""Builder of the head: turns the config's sections into the settings that the head takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError

from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.mixture import DatasetHead, MixtureDataset, images_per_epoch
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.head.head_group import Head, HeadGroup
from facetrain.head.head_settings import HeadSettings, HeadStage
from facetrain.head.margin_head import MarginHead
from facetrain.head.margins import Margin, MarginSettings, build_margin
from facetrain.head.row_optimizer import RowOptimizerSettings
from facetrain.head.settings import HeadConfig, MarginConfig
from facetrain.optim.settings import OptimSettings
from facetrain.run.build.step_schedule import StepSchedule

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
_BLOCK_ON_DISK = 8
"""Classes that `sample_block: auto` draws together on disk, where neighbors are read at once."""


def build_head(
    config: Config,
    world: World,
    num_classes: int,
    run_folder: Path,
    *,
    update_in_backward: bool,
    schedule: StepSchedule,
    source: FaceDataset | None = None,
) -> Head:
    """Build this rank's part of the head, or of the heads that `source` has. Row files are created in `run_folder`.

    Raises:
        ConfigError: a dataset of a mixture has an invalid margin.
    """
    settings = head_settings(
        config.head,
        folder=run_folder / "centers",
        update_in_backward=update_in_backward,
        schedule=schedule,
        product_dtype=product_dtype(config.train.precision, world.device),
    )
    streams = _Streams(centers=5, margin=6)
    return _build_heads(config, world, num_classes, settings, config.model.embedding_size, streams, source)


def build_teacher_centers(
    config: Config,
    world: World,
    num_classes: int,
    run_folder: Path,
    *,
    embedding_size: int,
    schedule: StepSchedule,
    source: FaceDataset | None = None,
) -> Head:
    """Build this rank's part of the head whose class centers come from a teacher, with random centers.

    It has the margin, the sampling in all stages and the placement of the trained head, or a head for each dataset as
    that one, but one float32 center per class, which no gradient changes, and no expectations.

    Raises:
        ConfigError: a dataset of a mixture has an invalid margin.
    """
    settings = head_settings(
        config.head,
        folder=run_folder / "teacher_centers",
        update_in_backward=False,
        schedule=schedule,
        product_dtype=product_dtype(config.train.precision, world.device),
    )
    settings = replace(
        settings,
        loss="softmax",
        sub_centers=1,
        drop_from_step=None,
        stages=tuple(replace(stage, expectations="off") for stage in settings.stages),
        expectations="off",
        weight_dtype=torch.float32,
        trained=False,
    )
    streams = _Streams(centers=8, margin=9)
    return _build_heads(config, world, num_classes, settings, embedding_size, streams, source)


class _Streams(NamedTuple):
    """Numbers that derive the keys of a head from config.seed; build.py lists the others."""

    centers: int
    margin: int


def _build_heads(
    config: Config,
    world: World,
    num_classes: int,
    settings: HeadSettings,
    embedding_size: int,
    streams: _Streams,
    source: FaceDataset | None,
) -> Head:
    """Build a head with these settings, or one for each dataset of a mixture with separate heads."""

    def build(num_classes: int, margin: MarginConfig, folder: Path | None, *number: int) -> MarginHead:
        # A head of a mixture draws centers, samples and margins of its own.
        return MarginHead(
            replace(settings, folder=folder),
            optimizer_settings(config.optim),
            margin_from_config(margin, seed=key_of(config.seed, streams.margin, *number)),
            embedding_size=embedding_size,
            num_classes=num_classes,
            rank=world.rank,
            world_size=world.size,
            seed=key_of(config.seed, streams.centers, *number),
            device=world.device,
        )

    if not (isinstance(source, MixtureDataset) and source.heads is not None):
        return build(num_classes, config.head.margin, settings.folder)
    margins = _margins_of_datasets(config, source.heads)
    images = images_per_epoch(source.counts, source.weights)
    return HeadGroup(
        [
            build(
                dataset.num_classes,
                margin,
                settings.folder and settings.folder / f"head_{number}",
                number,
            )
            for number, (dataset, margin) in enumerate(zip(source.datasets, margins, strict=True))
        ],
        [head.loss_weight for head in source.heads],
        (images / images.sum()).tolist(),
    )


def _margins_of_datasets(config: Config, heads: Sequence[DatasetHead]) -> list[MarginConfig]:
    margins = []
    for number, head in enumerate(heads, start=1):
        try:
            margins.append(MarginConfig.model_validate(config.head.margin.model_dump() | head.margin))
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise ConfigError(
                f"{config.data.train}: margin of dataset {number}: {f'{place}: ' if place else ''}"
                f"{error.errors()[0]['msg']}; correct it in the mixture"
            ) from error
    return margins


def product_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the factors of the head's large matrix products; None: float32.

    Statistics, the target cosine and the update keep float32 in any case. With `train.precision` fp16 the factors are
    bfloat16 too: the slopes p/|w| of a million classes are about 1e-6, below fp16's smallest normal number (6e-5),
    and lose most of their bits or become 0 in it, whatever the loss scale. bfloat16 has the range of float32. GPUs
    before compute capability 8.0 have no fast products of bfloat16, and a CPU uses fp16 for tests only.
    """
    if precision == "bf16":
        return torch.bfloat16
    if precision == "fp16" and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return None


def head_settings(
    head: HeadConfig,
    *,
    folder: Path | None = None,
    update_in_backward: bool = True,
    schedule: StepSchedule | None = None,
    product_dtype: torch.dtype | None = None,
) -> HeadSettings:
    """Return the head's settings: every `auto` is resolved, and epochs are converted to steps.

    Without a schedule, a run has one stage, and one step per epoch.
    """
    drop_epoch, block = head.drop_sub_centers_epoch, head.sample_block
    step_of_epoch = schedule.step_of_epoch if schedule else round
    stages = schedule.stages if schedule else ()
    on_disk = head.placement == "disk"
    return HeadSettings(
        loss=head.loss,
        negative_weight=head.negative_weight,
        sub_centers=head.sub_centers,
        drop_from_step=None if drop_epoch is None else step_of_epoch(drop_epoch),
        drop_angle=head.drop_angle,
        sample_rate=head.sample_rate,
        stages=tuple(HeadStage(stage.first_step, stage.sample_rate, stage.expectations) for stage in stages),
        expectations=head.expectations,
        expectation_margin=head.expectation_margin,
        sample_block=(_BLOCK_ON_DISK if on_disk else 1) if block == "auto" else block,
        weight_dtype=_DTYPES[head.weight_dtype],
        momentum_dtype=_DTYPES[head.momentum_dtype],
        placement=head.placement,
        folder=folder if on_disk else None,
        chunk_size=None if head.chunk_size == "auto" else head.chunk_size,
        product_dtype=product_dtype,
        update_in_backward=update_in_backward,
    )


def margin_from_config(margin: MarginConfig, *, seed: int = 0) -> Margin:
    """Build the margin of a config; `seed` is for margins that draw random numbers."""
    return build_margin(MarginSettings(**margin.model_dump()), seed=seed)


def optimizer_settings(optim: OptimSettings) -> RowOptimizerSettings:
    """Return the settings of the centers' optimizer, which follows the backbone's."""
    return RowOptimizerSettings(
        name=optim.name,
        momentum=optim.momentum,
        betas=optim.betas,
        eps=optim.eps,
        weight_decay=optim.weight_decay,
    )
