"""Forecast of the memory of one GPU, by purpose, and the batch and the number of GPUs that fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.errors import ConfigError, FacetrainError
from facetrain.files import error_reason
from facetrain.head.settings import HeadSettings
from facetrain.models.embedding_model import open_model
from facetrain.own_parts import line_of
from facetrain.plan.backbone_memory import EmbeddingMemory, backbone_memory, embedding_memory, forward_bytes
from facetrain.plan.head_memory import HeadLoad, HeadMemory, head_memory
from facetrain.remote.download import local_path
from facetrain.run.parts.head import teacher_settings
from facetrain.run.parts.step_schedule import local_batch_size, stage_configs
from facetrain.training.teacher_cache import cached_embedding_size

USABLE = 0.9
"""Share of a GPU's memory that a run may fill. The rest is for CUDA, the libraries and gaps between blocks: an
assumption."""
MOST_GPUS = 1024
"""Most GPUs of a run that `fewest_gpus` tries."""
_PREFETCHED_STEPS = 3
_LARGEST_BATCH = 1 << 16
# Of all images of a step: two copies in uint8 (the loader prefetches one).
_BYTES_PER_LOADED_PIXEL = 3 * 2
# Of those of a micro-batch: float32 before and after the change of layout.
_BYTES_PER_PIXEL = 3 * (4 + 4)
# In verification: three copies in uint8 (single images, the batch, and the next batch), and float32 of the images and
# of the mirrored images.
_BYTES_PER_VERIFIED_PIXEL = 3 * (3 + 2 * 4)


@dataclass(frozen=True)
class Forecast:
    """Bytes on one GPU at the worst moment of a run."""

    batch: int
    """Images per GPU and micro-batch."""
    parts: dict[str, int]
    """Bytes on the GPU, by purpose."""
    elsewhere: int
    """Centers and moments in the host's memory or on its disk."""
    checkpoint_copy: int
    """Host memory of rank 0, which needs most, for the copy of which a checkpoint is written in the background
    (`checkpoint.async`)."""

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return sum(self.parts.values())

    def fits(self, memory: int) -> bool:
        """Return whether a GPU with `memory` bytes has room for the run."""
        return self.total <= USABLE * memory


def forecast(config: Config, num_classes: int, gpus: int, *, batch: int | None = None) -> Forecast:
    """Return the memory of the GPU that needs most, in the stage that needs most (`train.stages`).

    Args:
        config: run description.
        num_classes: classes of the whole head.
        gpus: GPUs of the whole run.
        batch: images per GPU and micro-batch in all stages; the config's if None.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs, or a part of one's own fails without values.
        ModelError, CheckpointError, DataError: the teacher, or its cache, cannot be read.
    """
    heads = tuple(staged.head for _, staged in stage_configs(config))
    forecasts = (
        _of_stage(staged, num_classes, gpus, batch or local_batch_size(staged, gpus), heads)
        for _, staged in stage_configs(config)
    )
    with _own_code_explained():
        # Where verification needs most, all stages need the same: the one with the largest step describes the run.
        return max(forecasts, key=lambda each: (each.total, each.batch))


@contextmanager
def _own_code_explained() -> Iterator[None]:
    """Refuse code of one's own that fails on tensors without values: with real ones, it may be right.

    Raises:
        ConfigError: it fails in the block.
    """
    try:
        yield
    except FacetrainError:
        raise
    except Exception as error:
        if not (line := line_of(error)):
            raise
        raise ConfigError(
            f"{line}: fails on tensors without values, on which the memory is counted ({type(error).__name__}: "
            f"{error_reason(error)}); measure it by `facetrain plan` without --memory, and give --batch a number"
        ) from error


def largest_batch(config: Config, num_classes: int, gpus: int, memory: int) -> int:
    """Return the most images per GPU and micro-batch that fit, to 1/64; 0 if not even two fit."""

    def fits(batch: int) -> bool:
        return forecast(config, num_classes, gpus, batch=batch).fits(memory)

    low, high = 2, 256
    if not fits(low):
        return 0
    while fits(high):
        if high >= _LARGEST_BATCH:
            return high
        low, high = high, 2 * high
    batches = range(low, high, max(1, low // 64))
    return batches[bisect_left(batches, True, lo=1, key=lambda batch: not fits(batch)) - 1]


def fewest_gpus(config: Config, num_classes: int, memory: int) -> int | None:
    """Return the smallest number of GPUs, up to `MOST_GPUS`, with which the run fits; None if it fits with none.

    Tried are those that divide the global batch, or without one the powers of two. With more GPUs each has fewer
    classes and images of a global batch, so the need falls, and bisection takes few forecasts. Only from one GPU to two
    it can grow, by gradients that exist before the backward pass. Without a global batch, more GPUs also gather more
    embeddings: the need falls and grows again.
    """

    def fits(gpus: int) -> bool:
        return forecast(config, num_classes, gpus).fits(memory)

    batch = config.train.global_batch_size
    counts = [
        gpus
        for gpus in range(1, min(MOST_GPUS, num_classes) + 1)
        if (batch or MOST_GPUS) % gpus == 0 and _is_divisible(config, gpus)
    ]
    if not batch:
        return next(filter(fits, counts), None)
    if not counts or fits(counts[0]):
        return next(iter(counts), None)
    fewest = bisect_left(counts, True, lo=1, key=fits)
    return counts[fewest] if fewest < len(counts) else None


def _is_divisible(config: Config, gpus: int) -> bool:
    """Return whether the images of each stage can be divided among the GPUs and their micro-batches."""
    with suppress(ConfigError):
        return all(local_batch_size(staged, gpus) for _, staged in stage_configs(config))
    return False


def head_load(
    config: Config, num_classes: int, gpus: int, batch: int, stages: tuple[HeadSettings, ...]
) -> HeadLoad:
    """Return the head's work for `batch` images per GPU and micro-batch; `stages` as in `HeadLoad`."""
    return HeadLoad(
        config.head,
        config.optim,
        config.model.embedding_size,
        rows=-(-num_classes // gpus),
        local_batch=batch,
        global_batch=batch * gpus,
        # As `product_dtype` of run/parts/head.py, on a GPU that multiplies bfloat16.
        product_dtype=None if config.train.precision == "fp32" else torch.bfloat16,
        stages=stages,
    )


def _of_stage(
    config: Config, num_classes: int, gpus: int, batch: int, stages: tuple[HeadSettings, ...]
) -> Forecast:
    side, on_device = config.data.image_size, config.head.placement == "device"
    # In the buckets of DDP, or from the second micro-batch on, they exist before the backward pass.
    gradients_held = gpus > 1 or config.optim.accumulate > 1
    backbone = backbone_memory(
        config.model, side, precision=_precision(config), batch=batch, gradients_held=gradients_held
    )
    load = head_load(config, num_classes, gpus, batch, stages)
    head = head_memory(load)
    taught_centers, taught_weights, taught_work = _teacher(config, load)
    backward = backbone.peak - backbone.kept + head.accumulated
    # At the end of the step the activations no longer exist, and leave their memory to the update.
    work = max(head.peak, backward, head.update - backbone.kept, taught_work)
    images = batch * side**2 * (_BYTES_PER_PIXEL + config.optim.accumulate * _BYTES_PER_LOADED_PIXEL)
    parts = {
        "weights": backbone.state_bytes,
        # Otherwise they are a part of the work.
        "gradients": 4 * backbone.parameters * gradients_held,
        "moments": 4 * config.optim.count_moments(backbone.parameters, backbone.hidden),
        "centers": (head.centers + taught_centers) * on_device + _prefetched(config, head),
        "center_moments": head.moments * on_device,
        "teacher": taught_weights,
        "images": images,
        "activations": backbone.kept,
        # A chunk of logits with its rows, or the backward pass.
        "work": work,
        # Beyond a step, whose images, activations and work no longer exist then.
        "verification": max(_verification_bytes(config) - images - backbone.kept - work, 0),
    }
    # Tables in the host's memory are not copied, nor is anything else then (`Snapshot.copy_rows`).
    is_copied = on_device and config.checkpoint.asynchronous
    return Forecast(
        batch,
        parts,
        elsewhere=(head.centers + head.moments + taught_centers) * (not on_device),
        checkpoint_copy=(head.centers + head.moments + parts["weights"] + parts["moments"]) * is_copied,
    )


def _precision(config: Config) -> str:
    # The GPU need not be here. fp16, which auto takes on older ones, needs as much memory.
    return "bf16" if config.train.precision == "auto" else config.train.precision


def _prefetched(config: Config, head: HeadMemory) -> int:
    """Return the bytes of the rows on the device that `RowPrefetcher` keeps of a table in the host's memory or on disk.

    They are those of this step, of the next one, and of the last one while they are written back.
    """
    settings = config.head
    if settings.placement == "device" or settings.sample_rate == 1 or config.optim.accumulate > 1:
        return 0
    return round(_PREFETCHED_STEPS * settings.sample_rate * (head.centers + head.moments))


def _teacher(config: Config, load: HeadLoad) -> tuple[int, int, int]:
    """Return the bytes of a teacher's class centers, of its weights, and of the work with it in a step.

    It runs after the forward pass of the network, all of whose activations exist then.
    """
    distill = config.distill
    if distill is None:
        return 0, 0, 0
    if distill.cache is None:
        weights, embedding = _count_teacher(str(local_path(distill.teacher)), _precision(config))
        return 0, weights, embedding.peak(load.local_batch)
    if distill.loss != "fixed_centers":
        return 0, 0, 0
    settings, size = teacher_settings(load.settings), cached_embedding_size(local_path(distill.cache))
    taught = head_memory(replace(load, settings=settings, embedding_size=size, stages=(), trained=False))
    return taught.centers, 0, taught.peak


@lru_cache
def _count_teacher(path: str, precision: str) -> tuple[int, EmbeddingMemory]:
    """Return the bytes of a teacher's weights, and of its work; counted once, for a plan tries many batches."""
    opened = open_model(Path(path), torch.device("cpu"))
    weights = sum(tensor.nbytes for tensor in (*opened.network.parameters(), *opened.network.buffers()))
    return weights, embedding_memory(opened.network, opened.image_size, precision=precision)


def _verification_bytes(config: Config) -> int:
    if not config.eval.targets:
        return 0
    batch = config.eval.batch_size
    images = batch * config.data.image_size**2 * _BYTES_PER_VERIFIED_PIXEL
    # Verification runs in float32, whatever `train.precision` is.
    return images + forward_bytes(config.model, config.data.image_size, batch=batch)
