"""Builder of the distillation: opens the teacher of the config, and prepares its class centers."""

from __future__ import annotations

from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.counter_rng import key_of
from facetrain.data.augment import Augment
from facetrain.data.dataset import FaceDataset
from facetrain.data.open_dataset import images_of_large_identities, open_dataset
from facetrain.distributed.world import World
from facetrain.head.head_group import Head, head_parts
from facetrain.models.model_file import open_model
from facetrain.run.build_head import build_teacher_centers
from facetrain.run.compatibility import digest_labels
from facetrain.training.distillation import CENTER_LOSSES, Distillation
from facetrain.training.precision import autocast_for
from facetrain.training.teacher import LiveTeacher, Teacher, digest_model
from facetrain.training.teacher_cache import CachedTeacher

_PROJECTION_STREAM = 7
"""Number that derives the key of the initial projection from config.seed; build.py lists the others."""


def build_distillation(
    config: Config,
    world: World,
    num_classes: int,
    run_folder: Path,
    source: FaceDataset,
    augment: Augment,
) -> Distillation | None:
    """Open the teacher and build its loss; None if the config has no teacher.

    `source` is the training data, `augment` draws the flips of its images. Row files of class centers are created in
    `run_folder`.

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
    cached: CachedTeacher | None = None
    if distill.cache is None:
        model = open_model(path, world.device)
        autocast = autocast_for(config.train.precision, world.device)
        teacher = LiveTeacher(model, digest_model(model, path), world.device, autocast)
    else:
        teacher = cached = open_cache(config, source, augment)
    centers: Head | None = None
    if distill.loss in CENTER_LOSSES:
        centers = build_teacher_centers(
            config, world, num_classes, run_folder, embedding_size=teacher.embedding_size, source=source
        )
        if distill.loss == "fixed_centers":
            assert cached is not None, "the config requires a cache"
            for part in head_parts(centers):
                cached.mean_embeddings(source.labels, *part.shard, into=part.head.weight.data)
    distillation = Distillation(
        teacher,
        distill.loss,
        weight=distill.weight,
        margin_weight=distill.margin_weight,
        embedding_size=config.model.embedding_size,
        seed=key_of(config.seed, _PROJECTION_STREAM) & (2**63 - 1),
        centers=centers,
    )
    return distillation.to(world.device)


def open_cache(config: Config, source: FaceDataset, augment: Augment) -> CachedTeacher:
    """Open the file `distill.cache` for training on `source`.

    Raises:
        DataError: it cannot be read, or belongs to other data or another teacher.
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
    """
    distill = config.distill
    assert distill is not None, "the config has no teacher"
    assert distill.cache is not None, "the config has no cache"
    path = Path(distill.teacher)
    # The cache has the embeddings of the whole dataset, without `data.min_images_per_identity`.
    whole, index = source, None
    if config.data.min_images_per_identity > 1:
        whole = open_dataset(Path(config.data.train))
        index = images_of_large_identities(whole, config.data.min_images_per_identity)
    return CachedTeacher(
        Path(distill.cache),
        dataset=digest_labels(whole),
        # The model is needed for this check only.
        teacher=digest_model(open_model(path, torch.device("cpu")), path),
        num_images=whole.num_images,
        index=index,
        flips=augment.flips,
        needs_mirrored=config.data.augment.flip > 0,
    )
