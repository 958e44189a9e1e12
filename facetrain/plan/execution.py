"""Execution of a run's backbone on a device, as the forecast assumes it: fused kernels and CUDA graphs."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from facetrain.backbone.iresnet import LAYERS
from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import TrainedParts, can_count_fused, freezes_batch_norm
from facetrain.plan.device import Device
from facetrain.run.build.parts import is_batch_norm_synced
from facetrain.run.build.step_schedule import local_batch_size, stage_configs
from facetrain.training.execution import MOST_GRAPHED_IMAGES


def on_device(config: Config, device: Device) -> Config:
    """Return the config with `train.fused` off if the device cannot run the fused kernels."""
    if device.has_bf16:  # Both need compute capability 8.0.
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"fused": "off"})})


def runs_fused(config: Config, *, cuda: bool = True) -> bool:
    """Return whether the backbone runs on fused kernels on a GPU of compute capability 8.0 or higher.

    Follows `training.fused_trunk.choose_trunk`. False without Triton on this machine: then they cannot be counted.
    """
    train, model = config.train, config.model
    return (
        cuda
        and train.fused != "off"
        and (model.backbone in LAYERS or model.backbone == "iresnet")
        and train.precision in ("bf16", "fp16")
        and train.channels_last
        and train.compile != "on"
        and not model.checkpoint_activations
        and not _freezes_batch_norm(backbone_options(config), trained_parts(config))
        and can_count_fused()
    )


def replays_graphs(config: Config, gpus: int, *, batch: int | None = None) -> bool:
    """Return whether CUDA graphs may launch the backbone's kernels on GPUs.

    With `train.cuda_graphs: auto` a run uses them only where they are faster, so their time is an upper limit of its
    speed there. Follows `training.execution.possible_modes`.

    Args:
        config: run description.
        gpus: ranks of the whole run.
        batch: images per rank and micro-batch; None: the most of all stages.

    Raises:
        ConfigError: the global batch cannot be divided among the GPUs.
    """
    train, model = config.train, config.model
    excluded = model.checkpoint_activations or train.compile == "on"
    if excluded or (gpus > 1 and is_batch_norm_synced(config)):
        return False
    if train.cuda_graphs != "auto":
        return train.cuda_graphs == "on"
    batch = batch or max(local_batch_size(staged, gpus) for _, staged, _ in stage_configs(config))
    return not train.deterministic and batch <= MOST_GRAPHED_IMAGES


def trained_parts(config: Config) -> TrainedParts:
    """Return the parts of the backbone that the config trains."""
    model = config.model
    return TrainedParts(model.freeze, model.train_batch_norm, model.lora, tuple(model.lr_factors))


def backbone_options(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of `build_backbone`, hashable for the cache."""
    options: dict[str, Any] = {
        "name": config.model.backbone,
        "embedding_size": config.model.embedding_size,
        "image_size": config.data.image_size,
        "dropout": config.model.dropout,
    }
    return tuple((options | config.model.shape).items())


@lru_cache(maxsize=32)
def _freezes_batch_norm(options: tuple[tuple[str, Any], ...], trained: TrainedParts) -> bool:
    return trained != TrainedParts() and freezes_batch_norm(dict(options), trained)
