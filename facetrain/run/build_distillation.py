"""Builder of the distillation: opens the teacher of the config."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.data.augment import Augment
from facetrain.data.dataset import FaceDataset
from facetrain.models.model_file import open_model
from facetrain.run.compatibility import digest_labels
from facetrain.training.distillation import Distillation
from facetrain.training.precision import autocast_for
from facetrain.training.teacher import LiveTeacher, Teacher, digest_model
from facetrain.training.teacher_cache import CachedTeacher

_PROJECTION_STREAM = 7
"""Number that derives the key of the initial projection from config.seed; build.py lists the others."""


def build_distillation(
    config: Config, device: torch.device, source: FaceDataset, augment: Augment
) -> Distillation | None:
    """Open the teacher and build its loss; None if the config has no teacher.

    `source` is the training data, `augment` draws the flips of its images.

    Raises:
        DataError: the cache cannot be read, or belongs to other data or another teacher.
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
    """
    distill = config.distill
    if distill is None:
        return None
    path = Path(distill.teacher)
    teacher: Teacher
    if distill.cache is None:
        model = open_model(path, device)
        autocast = autocast_for(config.train.precision, device)
        teacher = LiveTeacher(model, digest_model(model, path), device, autocast)
    else:
        teacher = CachedTeacher(
            Path(distill.cache),
            dataset=digest_labels(source),
            # The model is needed for this check only.
            teacher=digest_model(open_model(path, torch.device("cpu")), path),
            num_images=source.num_images,
            flips=augment.flips,
            needs_mirrored=config.data.augment.flip > 0,
        )
    distillation = Distillation(
        teacher,
        distill.loss,
        weight=distill.weight,
        embedding_size=config.model.embedding_size,
        seed=key_of(config.seed, _PROJECTION_STREAM) & (2**63 - 1),
    )
    return distillation.to(device)
