"""Builder of the head, or of the heads of a mixture, and of the class centers of a teacher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError

from facetrain.config.schema import Config
from facetrain.counter_rng import Stream, key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.mixture import DatasetHead, MixtureDataset, images_per_epoch
from facetrain.device.capability import multiplies_bfloat16
from facetrain.distributed.world import World
from facetrain.errors import ConfigError
from facetrain.head.build import HeadRun, stage_of
from facetrain.head.build import build_head as build_one
from facetrain.head.head_group import Head, HeadGroup
from facetrain.head.partial_fc import PartialFC
from facetrain.head.settings import HeadSettings, MarginSettings
from facetrain.own_parts import is_place
from facetrain.run.folder.earlier import HEAD_ROWS, TEACHER_ROWS
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.text import printable

_HEAD_STREAMS = Stream.CENTERS, Stream.MARGINS
_TEACHER_STREAMS = Stream.TEACHER_CENTERS, Stream.TEACHER_MARGINS


def build_head(
    config: Config,
    world: World,
    num_classes: int,
    run_folder: Path,
    *,
    schedule: StepSchedule,
    source: FaceDataset | None = None,
) -> Head:
    """Build this rank's part of the head, or of the heads that `source` has. Row files are created in `run_folder`.

    Raises:
        ConfigError: a dataset of a mixture has an invalid margin.
    """
    run = replace(
        head_run(config, world, schedule),
        folder=run_folder / HEAD_ROWS,
        # With several micro-batches, the gradient of the centers is complete only after the last one.
        update_in_backward=config.optim.accumulate == 1,
    )
    shape = num_classes, config.model.embedding_size
    return _build_heads(config, world, run, config.head, _HEAD_STREAMS, shape, source)


def build_teacher_centers(
    config: Config,
    world: World,
    shape: tuple[int, int],
    run_folder: Path,
    *,
    schedule: StepSchedule,
    source: FaceDataset | None = None,
) -> Head:
    """Build this rank's part of the head whose class centers come from a teacher; they are random first.

    It has the margin, the sampling in all stages and the placement of the trained head, or a head for each dataset as
    that one, but float32 centers, which no gradient changes, and no expectations. `shape` is the number of classes, and
    the length of an embedding of the teacher.

    Raises:
        ConfigError: a dataset of a mixture has an invalid margin.
    """
    run = head_run(config, world, schedule)
    stages = tuple(stage._replace(expectations="off") for stage in run.stages)
    run = replace(run, folder=run_folder / TEACHER_ROWS, stages=stages, trained=False)
    return _build_heads(config, world, run, teacher_settings(config.head), _TEACHER_STREAMS, shape, source)


def teacher_settings(head: HeadSettings) -> HeadSettings:
    """Return the settings of the class centers of a teacher, beside a trained head with these settings."""
    changes = {"expectations": "off", "weight_dtype": "float32"}
    return head.model_copy(update=changes)


def _build_heads(
    config: Config,
    world: World,
    run: HeadRun,
    settings: HeadSettings,
    streams: tuple[Stream, Stream],
    shape: tuple[int, int],
    source: FaceDataset | None,
) -> Head:
    """Build a head, or one for each dataset of a mixture with separate heads.

    `shape` is the number of classes of all heads and the size of an embedding.
    """

    def build(settings: HeadSettings, num_classes: int, folder: Path | None, *number: int) -> PartialFC:
        # Each head of a mixture draws its own centers, samples and margins.
        seed, margin_seed = (key_of(config.seed, stream, *number) for stream in streams)
        head = replace(run, folder=folder, seed=seed, margin_seed=margin_seed)
        return build_one(
            settings, config.optim, head, world, embedding_size=shape[1], num_classes=num_classes
        )

    if not (isinstance(source, MixtureDataset) and source.heads is not None):
        return build(settings, shape[0], run.folder)
    heads = []
    for number, margin in enumerate(margins_of_datasets(config, source.heads)):
        folder = run.folder and run.folder / f"head_{number}"
        # Only the margin differs: sampling, placement and dtypes belong to the machine, not to a dataset.
        settings_of_dataset = settings.model_copy(update={"margin": margin})
        heads.append(build(settings_of_dataset, source.datasets[number].num_classes, folder, number))
    images = images_per_epoch(source.counts, source.weights)
    return HeadGroup(heads, [head.loss_weight for head in source.heads], (images / images.sum()).tolist())


def margins_of_datasets(config: Config, heads: Sequence[DatasetHead]) -> list[MarginSettings]:
    """Return the margin of each dataset of a mixture: the config's, with the keys that the mixture gives.

    Raises:
        ConfigError: a value is invalid, or names code; the message names the dataset.
    """
    common, margins = config.head.margin, []
    for number, head in enumerate(heads, start=1):
        where = f"{config.data.train}: margin of dataset {number}"
        try:
            # Over the margin of the config: a dataset gives only what differs. Another type has no m1 and no options.
            is_other = head.margin.get("type", common.type) != common.type
            inherited = common.model_dump(exclude={"m1", "options"} if is_other else None)
            margin = MarginSettings.model_validate(inherited | head.margin)
        except ValidationError as error:
            place = printable(".".join(map(str, error.errors()[0]["loc"])))
            raise ConfigError(
                f"{where}: {f'{place}: ' if place else ''}{error.errors()[0]['msg']}; correct it in the mixture"
            ) from error
        # Resumes compare, and `--allow-code` lets run, the code that the config names.
        if is_place(margin.type) and margin.type != common.type:
            raise ConfigError(
                f"{where}: {margin.type} is code, which only the config may name; set head.margin.type to it, and give "
                "the other datasets their margins in the mixture"
            )
        margins.append(margin)
    return margins


def head_run(config: Config, world: World, schedule: StepSchedule) -> HeadRun:
    """Return what the schedule and the section `train` give to a head: epochs are converted to steps."""
    return HeadRun(
        stages=tuple(stage_of(stage.first_step, stage.head) for stage in schedule.stages),
        product_dtype=product_dtype(config.train.precision, world.device),
    )


def product_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the dtype of the factors of the head's large matrix products; None: float32.

    Statistics, the target cosine and the update keep float32 in any case. With `train.precision` fp16 the factors are
    bfloat16 too: the slopes p/|w| of a million classes are about 1e-6, below fp16's smallest normal number (6e-5),
    and lose most of their bits or become 0 in it, whatever the loss scale. bfloat16 has the range of float32. GPUs
    before compute capability 8.0 have no fast products of bfloat16, and a CPU uses fp16 for tests only.
    """
    if precision == "bf16":
        return torch.bfloat16
    if precision == "fp16" and multiplies_bfloat16(device):
        return torch.bfloat16
    return None
