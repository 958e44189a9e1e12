"""The memory of one rank, by part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import BackboneCost, forward_bytes, measure_backbone
from facetrain.plan.device import CONTEXT_BYTES, NCCL_BYTES, PROCESS_BYTES, TRACER_BYTES
from facetrain.plan.head_cost import HeadBytes, HeadShape, head_bytes

_MOMENTS = {"sgd": 1, "adamw": 2}
# Of a batch: the loader's two copies in uint8, and float32 before and after the change of layout.
_BYTES_PER_PIXEL = 3 * (2 + 4 + 4)
# In verification: three in uint8 (single, stacked, and those of the next batch), and float32 as they are and mirrored.
_BYTES_PER_VERIFIED_PIXEL = 3 * (3 + 2 * 4)
_DEFAULT_BATCH = 128


@dataclass(frozen=True)
class Forecast:
    """Bytes on one rank."""

    weights: int
    """Of the backbone, with its buffers."""
    gradients: int
    """Of the backbone, where DDP's buckets hold them; else they are part of `work`."""
    moments: int
    """Of the backbone."""
    centers: int
    center_moments: int
    images: int
    activations: int
    """What the forward pass keeps for the backward pass."""
    work: int
    """The most that exists beside all this: a chunk of logits with its rows, or the backward pass."""
    verification: int
    """What it needs beyond a step, whose images, activations and work are gone by then."""
    saving: int
    """The copy that is written while training goes on; beside a GPU it lies in the host's memory."""
    runtime: int
    """CUDA's and NCCL's own; on a CPU the program's."""
    elsewhere: int
    """Centers and moments in the host's memory or on its disk."""

    @property
    def total(self) -> int:
        """Bytes on the device at the worst moment of a step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, int]:
        """Return the bytes on the device, by part."""
        return {name: value for name, value in vars(self).items() if name != "elsewhere"}


def local_batch(config: Config, gpus: int) -> int:
    """Return the images per rank and micro-batch."""
    if config.train.global_batch_size:
        return max(config.train.global_batch_size // (gpus * config.optim.accumulate), 1)
    return config.train.batch_size or _DEFAULT_BATCH


def backbone_cost(config: Config, gpus: int) -> BackboneCost:
    """Count what the config's backbone costs; remembered, for the batch hardly matters."""
    return _measured(
        _options(config),
        config.train.precision,
        local_batch(config, gpus),
        config.model.checkpoint_activations,
        gpus > 1,
    )


def _options(config: Config) -> tuple[tuple[str, Any], ...]:
    options: dict[str, Any] = {
        "name": config.model.backbone,
        "embedding_size": config.model.embedding_size,
        "image_size": config.data.image_size,
        "dropout": config.model.dropout,
    }
    if config.model.layers:
        options |= {"layers": config.model.layers, "widths": config.model.widths}
    return tuple(options.items())


@lru_cache(maxsize=32)
def _embedding_bytes(options: tuple[tuple[str, Any], ...], precision: str, batch: int) -> int:
    return forward_bytes(dict(options), precision=precision, batch=batch)


@lru_cache(maxsize=32)
def _measured(
    options: tuple[tuple[str, Any], ...], precision: str, batch: int, again: bool, held: bool
) -> BackboneCost:
    return measure_backbone(
        dict(options), precision=precision, batch=batch, checkpoint_activations=again, gradients_held=held
    )


def head_shape(config: Config, num_classes: int, gpus: int, batch: int, *, cuda: bool = True) -> HeadShape:
    """Return the numbers of the head that `config` describes."""
    return HeadShape(
        num_classes=num_classes,
        embedding_size=config.model.embedding_size,
        global_batch=batch * gpus,
        world_size=gpus,
        sub_centers=config.head.sub_centers,
        sample_rate=config.head.sample_rate,
        accumulate=config.optim.accumulate,
        chunk_size=None if config.head.chunk_size == "auto" else config.head.chunk_size,
        optimizer=config.optim.name,
        weight_dtype=config.head.weight_dtype,
        momentum_dtype=config.head.momentum_dtype,
        placement=config.head.placement,
        product_bytes=2 if config.train.precision == "bf16" else 4,
        fused=config.optim.accumulate == 1 and config.train.precision != "fp16",
        cuda=cuda,
    )


def forecast(
    config: Config,
    num_classes: int,
    gpus: int,
    *,
    batch: int | None = None,
    cost: BackboneCost | None = None,
    cuda: bool = True,
) -> Forecast:
    """Work out the memory of the rank that needs most; `batch` and `cost` spare working them out again."""
    batch = batch or local_batch(config, gpus)
    cost = cost or backbone_cost(config, gpus)
    head = head_bytes(head_shape(config, num_classes, gpus, batch, cuda=cuda))
    moments = 4 * cost.parameters * _MOMENTS[config.optim.name]
    images = batch * config.data.image_size**2 * _BYTES_PER_PIXEL
    work = _work(cost, head, batch)
    saved = cost.state_bytes + moments + head.centers + head.moments
    return Forecast(
        weights=cost.state_bytes,
        gradients=4 * cost.parameters if gpus > 1 else 0,
        moments=moments,
        centers=head.centers,
        center_moments=head.moments,
        images=images,
        activations=cost.kept(batch),
        work=work,
        verification=max(_verification(config) - images - cost.kept(batch) - work, 0),
        saving=0 if cuda or not config.checkpoint.asynchronous else saved,
        runtime=_runtime(gpus, cuda=cuda),
        elsewhere=head.elsewhere,
    )


def _runtime(gpus: int, *, cuda: bool) -> int:
    alone, together = (CONTEXT_BYTES, NCCL_BYTES) if cuda else (PROCESS_BYTES, TRACER_BYTES)
    return alone + (together if gpus > 1 else 0)


def _verification(config: Config) -> int:
    if not config.eval.targets:
        return 0
    batch = config.eval.batch_size
    images = batch * config.data.image_size**2 * _BYTES_PER_VERIFIED_PIXEL
    return images + _embedding_bytes(_options(config), config.train.precision, batch)


def _work(cost: BackboneCost, head: HeadBytes, batch: int) -> int:
    kept, backward = cost.kept(batch), cost.peak(batch) - cost.kept(batch)
    # At the end of the step the activations are gone, and leave room for the update.
    return max(head.work, backward + head.collected, head.update - kept)
