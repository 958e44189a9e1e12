"""Execution of a run's backbone on a device, as the forecast assumes it: with fused kernels or without."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from facetrain.backbone.iresnet import LAYERS
from facetrain.config.schema import Config
from facetrain.plan.backbone_cost import TrainedParts, can_count_fused, freezes_batch_norm
from facetrain.plan.device import Device


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
        and train.fused == "on"
        and (model.backbone in LAYERS or model.backbone == "iresnet")
        and train.precision in ("bf16", "fp16")
        and train.channels_last
        and train.compile == "off"
        and not model.checkpoint_activations
        and not _freezes_batch_norm(backbone_options(config), trained_parts(config))
        and can_count_fused()
    )


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
