"""Memory of a teacher (`distill`), counted while it embeds one and two images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from facetrain.config.schema import Config
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.models.onnx_network import OnnxNetwork
from facetrain.plan.memory import Linear, linear_between, remembered
from facetrain.remote.download import local_path
from facetrain.torch_private import LiveBytes
from facetrain.training.precision import autocast_for
from facetrain.training.settings import DistillSettings
from facetrain.training.teacher_cache import cached_embedding_size


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of a teacher on one rank."""

    embedding_size: int
    weight_bytes: int = 0
    """Bytes of parameters and buffers; 0 if its embeddings are cached."""
    peak: Linear | None = None
    """Largest number of bytes while it embeds a batch; None if its embeddings are cached, or onnxruntime runs it."""
    is_counted: bool = True
    """False for a network that onnxruntime runs on the host: its memory is unknown."""


@remembered
def teacher_memory(distill: DistillSettings, precision: str) -> TeacherMemory:
    """Return the memory of a config's teacher with the number format `precision`. Results are remembered.

    Raises:
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
        DataError: the cache cannot be read.
    """
    if distill.cache is not None:
        return TeacherMemory(cached_embedding_size(Path(distill.cache)))
    model = open_model(local_path(distill.teacher), torch.device("cpu"))
    (size, one), (_, two) = (_embed(model, images, precision) for images in (1, 2))
    if isinstance(model.network, OnnxNetwork):
        return TeacherMemory(size, is_counted=False)
    state = (*model.network.parameters(), *model.network.buffers())
    return TeacherMemory(size, sum(tensor.nbytes for tensor in state), linear_between(1, one, 2, two))


def teacher_bytes(config: Config, batch: int, moments: int) -> tuple[int, int]:
    """Return the bytes of a config's teacher and projection, and the peak beside them while it embeds a batch.

    `moments` are those that the optimizer keeps of each number.

    Raises:
        ModelError, CheckpointError, DataError: as `teacher_memory`.
    """
    if config.distill is None:
        return 0, 0
    cost = teacher_memory(config.distill, config.train.precision)
    projection = 0
    if cost.embedding_size != config.model.embedding_size:
        # With its gradient and its moments.
        projection = 4 * cost.embedding_size * config.model.embedding_size * (2 + moments)
    return cost.weight_bytes + projection, cost.peak(batch) if cost.peak else 0


def _embed(model: EmbeddingModel, images: int, precision: str) -> tuple[int, int]:
    """Return the length of an embedding, and the peak of bytes of the forward pass."""
    pixels = torch.zeros(images, model.image_size, model.image_size, 3, dtype=torch.uint8)
    image_BCHW, autocast = model.prepare(pixels), autocast_for(precision, torch.device("cpu"))
    with torch.no_grad(), autocast(), LiveBytes() as live:
        size = model.network(image_BCHW).shape[1]
    return size, live.peak
