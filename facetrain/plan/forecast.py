"""Forecast of the memory of one rank, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from facetrain.config.schema import Config
from facetrain.plan.backbone_memory import backbone_memory, forward_bytes
from facetrain.plan.head_memory import HeadLoad, head_work, table_bytes
from facetrain.plan.memory import CONTEXT_BYTES, NCCL_BYTES, PROCESS_BYTES
from facetrain.plan.teacher_memory import teacher_memory
from facetrain.run.parts.head import teacher_settings
from facetrain.run.parts.step_schedule import local_batch_size, stage_configs

# Of a batch: two copies in uint8 (the loader prefetches one), and float32 before and after the change of layout.
_BYTES_PER_PIXEL = 3 * (2 + 4 + 4)
# In verification: three copies in uint8 (single images, the batch, and the next batch), and float32 of the images and
# of the mirrored images.
_BYTES_PER_VERIFIED_PIXEL = 3 * (3 + 2 * 4)


@dataclass(frozen=True)
class Forecast:
    """Bytes on one rank at the worst moment of a run."""

    parts: dict[str, int]
    """Bytes on the device, by purpose."""
    elsewhere: int
    """Centers and moments in the host's memory or on its disk: not on the device."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts.values())


class StageForecast(NamedTuple):
    """Memory of a stage."""

    needed: Forecast
    config: Config
    """Config with the values of the stage."""


def forecast_stages(
    config: Config, num_classes: int, gpus: int, *, batch: int | None = None, cuda: bool = True
) -> StageForecast:
    """Return the forecast of the stage that needs most (`train.stages`); a run without stages has one.

    Arguments and errors are those of `forecast`; `batch` holds for all stages.
    """
    forecasts = (
        StageForecast(forecast(staged, num_classes, gpus, run=config, batch=batch, cuda=cuda), staged)
        for _, staged in stage_configs(config)
    )
    # Where verification needs most, all stages need the same: the one with the largest step describes the run.
    return max(forecasts, key=lambda stage: (stage.needed.total, stage.needed.parts["activations"]))


def head_load(
    config: Config, num_classes: int, gpus: int, batch: int, *, run: Config | None = None, cuda: bool = True
) -> HeadLoad:
    """Return the head's work for `batch` images per rank and micro-batch; for `run`, see `forecast`."""
    # As `product_dtype` of run/parts/head.py, on a GPU that multiplies bfloat16.
    narrow = config.train.precision == "bf16" or (cuda and config.train.precision == "fp16")
    return HeadLoad(
        config.head,
        config.optim,
        config.model.embedding_size,
        rows=-(-num_classes // gpus),
        global_batch=batch * gpus,
        world_size=gpus,
        product_dtype=torch.bfloat16 if narrow else None,
        stages=tuple(stage.config.head for stage in stage_configs(run or config)),
        cuda=cuda,
    )


def forecast(
    config: Config,
    num_classes: int,
    gpus: int,
    *,
    run: Config | None = None,
    batch: int | None = None,
    cuda: bool = True,
) -> Forecast:
    """Return the memory of the rank that needs most, without regard to stages; see `forecast_stages`.

    Args:
        config: run description.
        num_classes: classes of the whole head.
        gpus: ranks of the whole run; processes if `cuda` is false.
        run: config of the whole run, if `config` describes a stage: the head keeps what any stage needs.
        batch: images per rank and micro-batch; the config's if None.
        cuda: forecast for GPUs, else for processes on a CPU.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
        ModelError, CheckpointError, DataError: as `teacher_memory`.
    """
    model, precision, usual = config.model, config.train.precision, local_batch_size(config, gpus)
    batch, side, on_device = batch or usual, config.data.image_size, config.head.placement == "device"
    backbone = backbone_memory(model, side, precision=precision, batch=usual, gradients_held=gpus > 1)
    head = head_load(config, num_classes, gpus, batch, run=run, cuda=cuda)
    kept, moments = backbone.kept(batch), 4 * backbone.parameters * config.optim.moments
    centers, center_moments = table_bytes(head)
    taught_centers, taught_weights, taught_work = _teacher(config, head, batch)
    of_head = head_work(head)
    backward = backbone.peak(batch) - kept + of_head.accumulated
    # At the end of the step the activations no longer exist, and leave their memory to the update.
    work = max(of_head.peak, backward, of_head.update - kept, taught_work)
    images = batch * side**2 * _BYTES_PER_PIXEL
    saved = backbone.state_bytes + moments + (centers + center_moments) * on_device
    runtime = CONTEXT_BYTES + NCCL_BYTES * (gpus > 1) if cuda else PROCESS_BYTES
    parts = {
        "weights": backbone.state_bytes,
        # In the buckets of DDP; without DDP they are a part of the work.
        "gradients": 4 * backbone.parameters * (gpus > 1),
        "moments": moments,
        "centers": (centers + taught_centers) * on_device,
        "center_moments": center_moments * on_device,
        "teacher": taught_weights,
        "images": images,
        "activations": kept,
        # A chunk of logits with its rows, or the backward pass.
        "work": work,
        # Beyond a step, whose images, activations and work no longer exist then.
        "verification": max(_verification_bytes(config) - images - kept - work, 0),
        # Copy from which a checkpoint is written in the background; beside a GPU it is in the host's memory.
        "saving": saved * (not cuda and config.checkpoint.asynchronous),
        "runtime": runtime,
    }
    return Forecast(parts, (centers + center_moments + taught_centers) * (not on_device))


def _teacher(config: Config, head: HeadLoad, batch: int) -> tuple[int, int, int]:
    """Return the bytes of a teacher's class centers and of its weights, and the peak of its work beside them."""
    if config.distill is None:
        return 0, 0, 0
    teacher = teacher_memory(config.distill, config.train.precision)
    if config.distill.loss != "fixed_centers":
        return 0, teacher.weight_bytes, teacher.peak(batch)
    settings, size = teacher_settings(head.settings), teacher.embedding_size
    taught = replace(head, settings=settings, embedding_size=size, stages=(), trained=False)
    work = max(teacher.peak(batch), head_work(taught).peak)
    return table_bytes(taught)[0], teacher.weight_bytes, work


def _verification_bytes(config: Config) -> int:
    if not config.eval.targets:
        return 0
    batch = config.eval.batch_size
    images = batch * config.data.image_size**2 * _BYTES_PER_VERIFIED_PIXEL
    # Verification runs in float32, whatever `train.precision` is.
    return images + forward_bytes(config.model, config.data.image_size, batch=batch)
