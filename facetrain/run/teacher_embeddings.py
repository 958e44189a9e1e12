"""Embeddings of the training data by a teacher, written once and read by runs with `distill.cache`."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import numpy as np

from facetrain.data.open_dataset import open_dataset
from facetrain.distributed.world import join
from facetrain.models.model_file import open_model
from facetrain.progress import ProgressCallback
from facetrain.run.compatibility import digest_labels
from facetrain.training.teacher import digest_model
from facetrain.training.teacher_cache import new_cache
from facetrain.verify.embedder import ImageEmbedder
from facetrain.verify.image_embeddings import embed_in_chunks, input_landmarks, read_input

_CHUNK = 1 << 14
"""Images that are embedded at a time: 64 MiB of embeddings with 512 numbers, two rows each."""


def write_teacher_embeddings(
    model: Path,
    dataset: Path,
    output: Path,
    *,
    flip: bool = True,
    device: str = "auto",
    batch_size: int = 256,
    bf16: bool = False,
    progress: ProgressCallback | None = None,
) -> tuple[int, int]:
    """Write the embeddings of a dataset, with `flip` also those of the mirror images; return their number and length.

    Raises:
        ModelError: the model cannot be opened.
        DataError: the dataset cannot be read, or the file cannot be written.
    """
    digest = digest_labels(open_dataset(dataset))
    images, _, _ = read_input(dataset)
    count = len(images)

    def embed(embedder: ImageEmbedder, indices: range) -> np.ndarray:
        return embedder.embed_rows(
            images, name=str(dataset), mirrored=flip, indices=indices, landmarks=landmarks
        )

    with join(device) as world:
        opened = open_model(model, world.device)
        landmarks = input_landmarks(opened, dataset)
        chunks = embed_in_chunks(
            opened, count, world, embed, chunk=_CHUNK, batch_size=batch_size, bf16=bf16, progress=progress
        )
        first = next(chunks)  # an ONNX file may not state the length of its embeddings
        shape = (count, *first[1].shape[1:])
        with new_cache(output, shape, dataset=digest, teacher=digest_model(opened, model)) as rows_NRT:
            for indices, rows in chain([first], chunks):
                rows_NRT[indices.start : indices.stop] = rows
    return count, int(shape[2])
