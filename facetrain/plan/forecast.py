"""Forecast of the memory of one rank, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from facetrain.config.schema import Config
from facetrain.plan.backbone_memory import backbone_memory, forward_bytes
from facetrain.plan.head_memory import HeadLoad, head_work, table_bytes
from facetrain.plan.memory import CONTEXT_BYTES, NCCL_BYTES, PROCESS_BYTES
from facetrain.plan.teacher_memory import teacher_bytes, teacher_memory
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

    weights: int
    """Parameters and buffers of the backbone."""
    gradients: int
    """Gradients of the backbone if DDP's buckets hold them; without DDP they are part of `work`."""
    moments: int
    """Moments of the backbone."""
    centers: int
    """Class centers on the device, including the centers of a teacher."""
    center_moments: int
    """Moments of the class centers on the device."""
    teacher: int
    """Weights of the teacher, and the projection to the length of its embeddings with its gradient and moments."""
    images: int
    """Batches of images, in uint8 and in float32."""
    activations: int
    """Bytes that the forward pass keeps for the backward pass."""
    work: int
    """Peak beside all this: a chunk of logits with its rows, or the backward pass."""
    verification: int
    """Bytes that verification needs beyond a step, whose images, activations and work no longer exist then."""
    saving: int
    """Copy from which a checkpoint is written in the background; beside a GPU it is in the host's memory."""
    runtime: int
    """CUDA and NCCL; on a CPU Python, torch and its kernels."""
    elsewhere: int
    """Centers and moments in the host's memory or on its disk: not on the device."""

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes on the device, by purpose."""
        return {name: value for name, value in vars(self).items() if name != "elsewhere"}


class StageForecast(NamedTuple):
    """Memory of a stage."""

    needed: Forecast
    config: Config
    """Config with the values of the stage."""


def forecast_stages(
    config: Config, num_classes: int, gpus: int, *, batch: int | None = None, cuda: bool = True
) -> StageForecast:
    """Return the forecast of the stage that needs most (`train.stages`); a run without stages has one.

    Args:
        config: run description.
        num_classes: classes of the whole head.
        gpus: ranks of the whole run; processes if `cuda` is false.
        batch: images per rank and micro-batch in all stages; None: as in the config and its stages.
        cuda: forecast for GPUs, else for processes on a CPU.

    Raises:
        ConfigError, ModelError, CheckpointError, DataError: as `forecast`.
    """
    forecasts = (
        StageForecast(forecast(staged, num_classes, gpus, run=config, batch=batch, cuda=cuda), staged)
        for _, staged in stage_configs(config)
    )
    # Where verification needs most, all stages need the same: the one with the largest step describes the run.
    return max(forecasts, key=lambda stage: (stage.needed.total, stage.needed.activations))


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


def teacher_load(config: Config, head: HeadLoad) -> HeadLoad | None:
    """Return the work of the head with the teacher's class centers, beside the trained head; None if there is none.

    Raises:
        ModelError, CheckpointError, DataError: as `teacher_memory`.
    """
    if config.distill is None or config.distill.loss != "fixed_centers":
        return None
    return replace(
        head,
        settings=teacher_settings(head.settings),
        embedding_size=teacher_memory(config.distill, config.train.precision).embedding_size,
        stages=(),
        trained=False,
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
    batch = batch or local_batch_size(config, gpus)
    backbone = backbone_memory(
        config.model,
        config.data.image_size,
        precision=config.train.precision,
        batch=local_batch_size(config, gpus),
        gradients_held=gpus > 1,
    )
    kept = backbone.kept(batch)
    backward = backbone.peak(batch) - kept
    head = head_load(config, num_classes, gpus, batch, run=run, cuda=cuda)
    taught = teacher_load(config, head)
    centers, center_moments = table_bytes(head)
    taught_centers, taught_work = (table_bytes(taught)[0], head_work(taught).peak) if taught else (0, 0)
    moments = 4 * backbone.parameters * config.optim.moments
    images = batch * config.data.image_size**2 * _BYTES_PER_PIXEL
    teacher, teacher_work = teacher_bytes(config, batch, config.optim.moments)
    of_head = head_work(head)
    # At the end of the step the activations no longer exist, and leave their memory to the update.
    work = max(of_head.peak, backward + of_head.accumulated, of_head.update - kept, teacher_work, taught_work)
    on_device = config.head.placement == "device"
    saved = backbone.state_bytes + moments + (centers + center_moments if on_device else 0)
    return Forecast(
        weights=backbone.state_bytes,
        gradients=4 * backbone.parameters if gpus > 1 else 0,
        moments=moments,
        centers=centers + taught_centers if on_device else 0,
        center_moments=center_moments if on_device else 0,
        teacher=teacher,
        images=images,
        activations=kept,
        work=work,
        verification=max(_verification_bytes(config) - images - kept - work, 0),
        saving=0 if cuda or not config.checkpoint.asynchronous else saved,
        runtime=CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0) if cuda else PROCESS_BYTES,
        elsewhere=0 if on_device else centers + center_moments + taught_centers,
    )


def _verification_bytes(config: Config) -> int:
    if not config.eval.targets:
        return 0
    batch = config.eval.batch_size
    images = batch * config.data.image_size**2 * _BYTES_PER_VERIFIED_PIXEL
    # Verification runs in float32, whatever `train.precision` is.
    return images + forward_bytes(config.model, config.data.image_size, batch=batch)
