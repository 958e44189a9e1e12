"""Memory of a teacher (`distill`), counted while it embeds one and two images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from facetrain.models.model_file import open_model
from facetrain.plan.memory import line_through, remembered
from facetrain.remote.download import local_path
from facetrain.torch_private import LiveBytes
from facetrain.training.precision import autocast_for
from facetrain.training.settings import DistillSettings
from facetrain.training.teacher_cache import cached_embedding_size


class TeacherMemory(NamedTuple):
    """Bytes of a teacher on one rank; none of a network that onnxruntime runs on the host."""

    embedding_size: int
    weight_bytes: int
    peak: Callable[[int], int]
    """Largest number of bytes while it embeds a batch."""


@remembered
def teacher_memory(distill: DistillSettings, precision: str) -> TeacherMemory:
    """Return the memory of a config's teacher with the number format `precision`; 0 if its embeddings are cached.

    Raises:
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
        DataError: the cache cannot be read.
    """
    if distill.cache is not None:
        return TeacherMemory(cached_embedding_size(Path(distill.cache)), 0, lambda batch: 0)
    cpu = torch.device("cpu")
    model, autocast = open_model(local_path(distill.teacher), cpu), autocast_for(precision, cpu)
    peaks, size = [], 0
    for images in (1, 2):
        pixels = torch.zeros(images, model.image_size, model.image_size, 3, dtype=torch.uint8)
        image_BCHW = model.prepare(pixels)
        with torch.no_grad(), autocast(), LiveBytes() as live:
            size = model.network(image_BCHW).shape[1]
        peaks.append(live.peak)
    weights = sum(t.nbytes for t in (*model.network.parameters(), *model.network.buffers()))
    return TeacherMemory(size, weights, line_through(1, peaks[0], 2, peaks[1]))
