"""Whether a run can go on from a checkpoint under a config: asked before anything is built."""

from __future__ import annotations

from functools import reduce
from typing import Any

from facetrain.checkpoint.load import Checkpoint
from facetrain.config.loading import plain_config
from facetrain.config.schema import Config
from facetrain.errors import ConfigError
from facetrain.run.build import Plan

_LAID_DOWN = (
    "data.image_size",
    "model.backbone",
    "model.layers",
    "model.widths",
    "model.embedding_size",
    "head.sub_centers",
    "head.momentum_dtype",
    "optim.name",
)
"""Keys that decide which tensors a checkpoint holds."""


def require_resumable(checkpoint: Checkpoint, config: Config, plan: Plan) -> None:
    """Refuse a config under which a checkpoint's tensors would not fit, or the run would be over already.

    Raises:
        ConfigError: it is such a config; the message names the key.
    """
    model = checkpoint.meta.get("model")
    saved, now = model.get("config") if isinstance(model, dict) else None, plain_config(config)
    for key in _LAID_DOWN:
        was, wanted = _value(saved, key), _value(now, key)
        if was is not None and was != wanted:
            raise ConfigError(
                f"{key}: {checkpoint.folder} was trained with {was}, and cannot go on with {wanted}; leave it, "
                "or train a new run with model.init_from"
            )
    # Nothing would end such a run: it ends where it comes to its last step.
    if checkpoint.step > plan.total_steps:
        raise ConfigError(
            f"{checkpoint.folder}: the run is past step {plan.total_steps:,}, at which train.epochs, train.max_steps "
            f"and batches of {plan.global_batch_size:,} end it; raise them, or go on from an earlier --checkpoint"
        )


def _value(config: Any, key: str) -> Any:
    # A checkpoint comes from outside: whatever stands there, a key that is not found decides nothing.
    return reduce(
        lambda found, name: found.get(name) if isinstance(found, dict) else None, key.split("."), config
    )
