"""Forecast of the memory of one rank, by purpose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import (
    BackboneCost,
    TrainedParts,
    forward_bytes,
    measure_backbone,
)
from facetrain.plan.device import CONTEXT_BYTES, NCCL_BYTES, PROCESS_BYTES
from facetrain.plan.execution import backbone_options, runs_fused, trained_parts
from facetrain.plan.head_cost import HeadBytes, HeadShape, head_bytes
from facetrain.plan.teacher_cost import teacher_bytes, teacher_cost
from facetrain.run.build.step_schedule import local_batch_size, stage_configs
from facetrain.training.distillation import CENTER_LOSSES

_MOMENTS = {"sgd": 1, "adamw": 2}
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
    """Class centers on the device, those of a teacher too."""
    center_moments: int
    """Moments of the class centers on the device."""
    average: int
    """Moving average of the backbone (`optim.ema`)."""
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


def moments_of(config: Config) -> int:
    """Return how many moments the backbone's optimizer keeps of each number."""
    return _MOMENTS[config.optim.name]


def backbone_cost(
    config: Config, gpus: int, *, cuda: bool = True, image_size: int | None = None
) -> BackboneCost:
    """Return the cost of the config's backbone. Results are cached.

    Args:
        config: run description.
        gpus: ranks of the whole run.
        cuda: for GPUs that can run the fused kernels; see `on_device` for others.
        image_size: side of the training images in pixels; None: `data.image_size`.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
    """
    return _cached_backbone_cost(
        backbone_options(config),
        config.train.precision,
        local_batch_size(config, gpus),
        config.model.checkpoint_activations,
        trained_parts(config),
        gradients_held=gpus > 1,
        fused=runs_fused(config, cuda=cuda),
        image_size=image_size or config.data.image_size,
    )


@lru_cache(maxsize=32)
def _cached_forward_bytes(options: tuple[tuple[str, Any], ...], precision: str, batch: int) -> int:
    return forward_bytes(dict(options), precision=precision, batch=batch)


@lru_cache(maxsize=32)
def _cached_backbone_cost(
    options: tuple[tuple[str, Any], ...],
    precision: str,
    batch: int,
    checkpoint_activations: bool,
    trained: TrainedParts,
    *,
    gradients_held: bool,
    fused: bool,
    image_size: int,
) -> BackboneCost:
    return measure_backbone(
        dict(options),
        precision=precision,
        batch=batch,
        checkpoint_activations=checkpoint_activations,
        gradients_held=gradients_held,
        fused=fused,
        trained=trained,
        image_size=image_size,
    )


def head_shape(
    config: Config, num_classes: int, gpus: int, batch: int, *, run: Config | None = None, cuda: bool = True
) -> HeadShape:
    """Return the head's settings for `batch` images per rank and micro-batch; `run` is that of `forecast`."""
    # As in `product_dtype` of run/build_head.py, on a GPU that multiplies bfloat16.
    narrow = config.train.precision == "bf16" or (cuda and config.train.precision == "fp16")
    return HeadShape(
        num_classes=num_classes,
        embedding_size=config.model.embedding_size,
        global_batch=batch * gpus,
        world_size=gpus,
        optimizer=config.optim,
        sub_centers=config.head.sub_centers,
        sample_rate=config.head.sample_rate,
        accumulate=config.optim.accumulate,
        chunk_size=None if config.head.chunk_size == "auto" else config.head.chunk_size,
        weight_dtype=config.head.weight_dtype,
        momentum_dtype=config.head.momentum_dtype,
        placement=config.head.placement,
        product_bytes=2 if narrow else 4,
        expectations=config.head.expectations != "off",
        keeps_expectations=any(
            stage.config.head.expectations != "off" for stage in stage_configs(run or config)
        ),
        update_in_backward=config.optim.accumulate == 1,
        cuda=cuda,
    )


def teacher_head_shape(
    config: Config, num_classes: int, gpus: int, batch: int, *, cuda: bool = True
) -> HeadShape | None:
    """Return the settings of the head with the teacher's class centers; None if there is none.

    Raises:
        ModelError, CheckpointError, DataError: as `teacher_cost`.
    """
    if config.distill is None or config.distill.loss not in CENTER_LOSSES:
        return None
    # As run/build_head.py builds it.
    return replace(
        head_shape(config, num_classes, gpus, batch, cuda=cuda),
        embedding_size=teacher_cost(config.distill, config.train.precision).embedding_size,
        sub_centers=1,
        weight_dtype="float32",
        momentum_dtype="float32",
        expectations=False,
        keeps_expectations=False,
        update_in_backward=False,
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
    image_size: int | None = None,
) -> Forecast:
    """Return the memory of the rank that needs most, without regard to stages; see `forecast_stages`.

    Args:
        config: run description.
        num_classes: classes of the whole head.
        gpus: ranks of the whole run; processes if `cuda` is false.
        run: config of the whole run, if `config` is that of a stage: the head keeps what any stage needs.
        batch: images per rank and micro-batch; the config's if None.
        cuda: forecast for GPUs, else for processes on a CPU.
        image_size: side of the training images in pixels; None: `data.image_size`.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
        ModelError, CheckpointError, DataError: as `teacher_cost`.
    """
    image_size = image_size or config.data.image_size
    batch = batch or local_batch_size(config, gpus)
    cost = backbone_cost(config, gpus, cuda=cuda, image_size=image_size)
    head = head_bytes(head_shape(config, num_classes, gpus, batch, run=run, cuda=cuda))
    moments = 4 * cost.parameters * moments_of(config)
    images = batch * image_size**2 * _BYTES_PER_PIXEL
    average = cost.averaged_bytes if config.optim.ema is not None else 0
    teacher, teacher_work = teacher_bytes(config, batch, moments_of(config))
    shape = teacher_head_shape(config, num_classes, gpus, batch, cuda=cuda)
    taught = HeadBytes(0, 0, 0, 0, 0, 0) if shape is None else head_bytes(shape)
    work = max(_work_bytes(cost, head, batch), teacher_work, taught.work)
    verification = max(_verification_bytes(config) - images - cost.kept(batch) - work, 0)
    saved = cost.state_bytes + moments + head.centers + head.moments + average
    if config.distill is not None and config.distill.loss == "adaptive_centers":
        saved += taught.centers
    return Forecast(
        weights=cost.state_bytes,
        gradients=4 * cost.parameters if gpus > 1 else 0,
        moments=moments,
        centers=head.centers + taught.centers,
        center_moments=head.moments,
        average=average,
        teacher=teacher,
        images=images,
        activations=cost.kept(batch),
        work=work,
        verification=verification,
        saving=0 if cuda or not config.checkpoint.asynchronous else saved,
        runtime=_runtime_bytes(gpus, cuda=cuda),
        elsewhere=head.elsewhere + taught.elsewhere,
    )


def _runtime_bytes(gpus: int, *, cuda: bool) -> int:
    if not cuda:
        return PROCESS_BYTES
    return CONTEXT_BYTES + (NCCL_BYTES if gpus > 1 else 0)


_VERIFICATION_PRECISION = "fp32"
"""Verification runs in float32, whatever `train.precision` is."""


def _verification_bytes(config: Config) -> int:
    if not config.eval.targets:
        return 0
    batch = config.eval.batch_size
    images = batch * config.data.image_size**2 * _BYTES_PER_VERIFIED_PIXEL
    return images + _cached_forward_bytes(backbone_options(config), _VERIFICATION_PRECISION, batch)


def _work_bytes(cost: BackboneCost, head: HeadBytes, batch: int) -> int:
    kept, backward = cost.kept(batch), cost.peak(batch) - cost.kept(batch)
    # At the end of the step the activations no longer exist, and leave their memory to the update.
    return max(head.work, backward + head.accumulated, head.update - kept)
