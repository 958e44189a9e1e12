"""Builder of the distillation: opens the teacher of the config, and prepares its class centers."""

from __future__ import annotations

from pathlib import Path

from facetrain.config.schema import Config
from facetrain.counter_rng import Stream, key_of
from facetrain.data.dataset import FaceDataset
from facetrain.distributed.world import World
from facetrain.head.head_group import Head, head_parts
from facetrain.models.embedding_model import open_model
from facetrain.models.model_digest import digest_model
from facetrain.remote.download import local_path
from facetrain.run.parts.head import build_teacher_centers
from facetrain.run.parts.loader import build_augment
from facetrain.run.parts.step_schedule import StepSchedule
from facetrain.run.parts.teacher_embeddings import open_cache
from facetrain.training.distillation import Distillation, Teacher
from facetrain.training.precision import autocast_for
from facetrain.training.teacher import LiveTeacher
from facetrain.training.teacher_cache import CachedTeacher

_CLASSES_PER_MEAN = 1 << 16
"""Classes whose means are computed together: their sums are float64, several times as large as the centers."""


def build_distillation(
    config: Config,
    world: World,
    num_classes: int,
    run_folder: Path,
    schedule: StepSchedule,
    source: FaceDataset,
) -> Distillation | None:
    """Open the teacher and build its loss; None if the config has no teacher.

    `source` is the training data. Row files of class centers are created in `run_folder`.

    Raises:
        DataError: the cache cannot be read, or belongs to other data or another teacher.
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
    """
    distill = config.distill
    if distill is None:
        return None
    teacher: Teacher
    if distill.cache is None:
        path = local_path(distill.teacher)
        model = open_model(path, world.device)
        autocast = autocast_for(config.train.precision, world.device)
        teacher = LiveTeacher(model, digest_model(model, path), autocast)
    else:
        teacher = open_cache(config, source, build_augment(config))
    centers: Head | None = None
    if distill.loss == "fixed_centers":
        assert isinstance(teacher, CachedTeacher), "the config requires a cache"
        centers = build_teacher_centers(
            config, world, (num_classes, teacher.embedding_size), run_folder, schedule=schedule, source=source
        )
        # Each rank reads the embeddings of its classes only.
        for part in head_parts(centers):
            first, past = part.shard
            for start in range(first, past, _CLASSES_PER_MEAN):
                stop = min(start + _CLASSES_PER_MEAN, past)
                rows = part.head.weight.data[start - first : stop - first]
                teacher.mean_embeddings(source.labels, start, stop, into=rows)
    distillation = Distillation(
        teacher,
        weight=distill.weight,
        margin_weight=distill.margin_weight,
        embedding_size=config.model.embedding_size,
        seed=key_of(config.seed, Stream.PROJECTION) & (2**63 - 1),
        centers=centers,
    )
    return distillation.to(world.device)
