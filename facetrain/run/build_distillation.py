"""Builder of the distillation: opens the teacher of the config."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.models.model_file import open_model
from facetrain.training.distillation import Distillation
from facetrain.training.precision import autocast_for
from facetrain.training.teacher import LiveTeacher, digest_model

_PROJECTION_STREAM = 7
"""Number that derives the key of the initial projection from config.seed; build.py lists the others."""


def build_distillation(config: Config, device: torch.device) -> Distillation | None:
    """Open the teacher and build its loss; None if the config has no teacher.

    Raises:
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
    """
    distill = config.distill
    if distill is None:
        return None
    path = Path(distill.teacher)
    model = open_model(path, device)
    teacher = LiveTeacher(
        model, digest_model(model, path), device, autocast_for(config.train.precision, device)
    )
    distillation = Distillation(
        teacher,
        distill.loss,
        weight=distill.weight,
        embedding_size=config.model.embedding_size,
        seed=key_of(config.seed, _PROJECTION_STREAM) & (2**63 - 1),
    )
    return distillation.to(device)
