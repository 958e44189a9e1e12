"""Compatibility check of a config with a checkpoint, made before anything is built."""

from __future__ import annotations

from functools import reduce
from typing import Any

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import plain_config
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.run.step_schedule import StepSchedule

_SHAPING_KEYS = (
    "data.image_size",
    "model.backbone",
    "model.layers",
    "model.widths",
    "model.embedding_size",
    "head.sub_centers",
    "head.momentum_dtype",
    "optim.name",
)
"""Config keys that decide names, shapes and dtypes of the tensors in a checkpoint."""


def check_compatibility(checkpoint: Checkpoint, config: Config, schedule: StepSchedule) -> None:
    """Check that a run with this config can continue from a checkpoint.

    Args:
        checkpoint: the checkpoint, of which only the metadata is read.
        config: the config of the run that continues.
        schedule: batch sizes and steps that follow from it.

    Raises:
        ConfigError: the tensors of the checkpoint do not fit, or its step is past the end of the run. The message
            names the key.
    """
    model = checkpoint.meta.get("model")
    saved = model.get("config") if isinstance(model, dict) else None
    current = plain_config(config)
    for key in _SHAPING_KEYS:
        before, now = _lookup(saved, key), _lookup(current, key)
        if before is not None and before != now:
            raise ConfigError(
                f"{key}: {checkpoint.folder} was trained with {before}, and cannot continue with {now}; keep "
                f"{before}, or start a new run from these weights with model.init_from"
            )
    # A run ends when it reaches its last step exactly: one that starts past it would never end.
    if checkpoint.step > schedule.total_steps:
        raise ConfigError(
            f"{checkpoint.folder}: the checkpoint is past step {schedule.total_steps:,}, the end of the run by "
            f"train.epochs, train.max_steps and the global batch of {schedule.global_batch_size:,}; raise them, or "
            "continue from an earlier step with --checkpoint"
        )


def _lookup(config: Any, key: str) -> Any:
    """Return the value of a dotted key; None if the key is absent or the values are not a nested mapping."""
    # The config in a checkpoint is untrusted input: it may have any shape.
    return reduce(
        lambda found, name: found.get(name) if isinstance(found, dict) else None, key.split("."), config
    )
