"""Embeddings of the training data by a teacher, written once and read by runs with `distill.cache`."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from facetrain.config.schema import Config
from facetrain.data.build import open_training_data
from facetrain.data.dataset import FaceDataset
from facetrain.data.identity_counts import images_of_large_identities
from facetrain.data.images.augment import Augment
from facetrain.data.open_dataset import open_dataset
from facetrain.distributed.world import join
from facetrain.embeddings.embed_images import embed_in_chunks, open_embedder
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.image_inputs import dataset_images
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.normalization import require_finite
from facetrain.models.embedding_model import EmbeddingModel, open_model
from facetrain.models.model_digest import digest_model
from facetrain.progress import ProgressCallback
from facetrain.remote.download import local_path
from facetrain.run.folder.data_digests import digest_labels, digest_landmarks, digest_samples
from facetrain.training.teacher_cache import CachedTeacher, new_cache

_CHUNK = 1 << 14
"""Images that are embedded at a time: 64 MiB of embeddings with 512 numbers, two rows each."""


def write_teacher_embeddings(
    model: Path,
    dataset: Path,
    output: Path,
    inference: Inference,
    *,
    flip: bool = True,
    progress: ProgressCallback | None = None,
) -> tuple[int, int]:
    """Write the embeddings of a dataset, with `flip` of the mirror images too; return their number and length.

    All ranks call it, and the leader writes.

    Raises:
        ModelError: the model cannot be opened, or an embedding is not finite.
        DataError: the dataset cannot be read, or the file cannot be written.
    """
    source = open_dataset(dataset)
    images, count = dataset_images(source), source.num_images

    def embed(embedder: ImageEmbedder, indices: range) -> np.ndarray:
        name = str(dataset)
        rows_NRD = embedder.embed_rows(images, name=name, mirrored=flip, indices=indices, landmarks=landmarks)
        require_finite(rows_NRD.reshape(len(rows_NRD), -1), name, indices)
        return rows_NRD

    with join(inference.device) as world:
        opened = open_model(model, world.device)
        landmarks = source.landmarks if opened.takes_landmarks else None
        embedder = open_embedder(opened, world, inference)
        chunks = embed_in_chunks(embedder, embed, count, _CHUNK, progress)
        first = next(chunks)  # an ONNX file may not state the length of its embeddings
        shape = (count, *first[1].shape[1:])
        cache = new_cache(output, shape, _digests(source, opened, model))
        with cache if world.is_leader else nullcontext() as write:
            for indices, rows in chain([first], chunks):
                if write is not None:
                    write(indices.start, rows)
    return count, int(shape[2])


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
    path = local_path(distill.teacher)
    # The cache has the embeddings of the whole dataset, without `data.min_images_per_identity`.
    whole, index = source, None
    if config.data.min_images_per_identity > 1:
        whole = open_training_data(config.data.model_copy(update={"min_images_per_identity": 1}))
        index = images_of_large_identities(whole, config.data.min_images_per_identity)
    # The model is needed for this check only.
    digests = _digests(whole, open_model(path, torch.device("cpu")), path)
    if not digests["samples"]:  # objects in a store; the cache was written from a copy of them
        del digests["samples"]
    return CachedTeacher(
        local_path(distill.cache),
        digests=digests,
        num_images=whole.num_images,
        index=index,
        flips=augment.flips,
        needs_mirrored=config.data.augment.flip > 0,
    )


def _digests(source: FaceDataset, teacher: EmbeddingModel, path: Path) -> dict[str, str]:
    """Return the digests of a dataset and of a teacher from `path`, as `new_cache` takes them."""
    return {
        "dataset": digest_labels(source),
        "samples": digest_samples(source),
        "landmarks": digest_landmarks(source) if teacher.takes_landmarks else "",
        "teacher": digest_model(teacher, path),
    }
