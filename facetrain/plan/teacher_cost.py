"""Memory and operations of a teacher (`distill`), counted while it embeds one and two images."""

# B images   H, W height and width

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from facetrain.config.schema import Config
from facetrain.models.model_file import EmbeddingModel, open_model
from facetrain.models.onnx_network import OnnxNetwork
from facetrain.plan.memory_traffic import MemoryTraffic
from facetrain.torch_private import LiveBytes
from facetrain.training.settings import DistillSettings
from facetrain.training.teacher_cache import cached_embedding_size

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TeacherCost:
    """Bytes and operations of a teacher on one rank; all but the first two are 0 if its embeddings are cached."""

    embedding_size: int
    is_counted: bool = True
    """False for a network that onnxruntime runs on the host: its memory and its time are unknown."""
    state_bytes: int = 0
    """Bytes of parameters and buffers."""
    peak_per_image: int = 0
    """Peak of bytes of the forward pass for each image."""
    flops_per_image: int = 0
    """Operations of the forward pass; a multiply-add counts as two."""
    moved_per_image: int = 0
    """Bytes that the kernels read and write for each image."""
    moved_per_pass: int = 0
    """Bytes that they read and write for any number of images."""
    launches: int = 0
    """Kernels that the host launches."""


@lru_cache(maxsize=4)
def teacher_cost(distill: DistillSettings, precision: str) -> TeacherCost:
    """Return the cost of a config's teacher with the number format `precision`. Results are cached.

    Raises:
        ModelError: the teacher cannot be opened.
        CheckpointError: it is a damaged checkpoint.
        DataError: the cache cannot be read.
    """
    if distill.cache is not None:
        return TeacherCost(cached_embedding_size(Path(distill.cache)))
    model = open_model(Path(distill.teacher), torch.device("cpu"))
    if isinstance(model.network, OnnxNetwork):
        image_BCHW = model.prepare(torch.zeros(1, model.image_size, model.image_size, 3, dtype=torch.uint8))
        return TeacherCost(model.network(image_BCHW).shape[1], is_counted=False)
    one, two = (_count(model, images, precision) for images in (1, 2))
    moved_per_image = two.moved - one.moved
    state = (*model.network.parameters(), *model.network.buffers())
    return TeacherCost(
        one.embedding_size,
        state_bytes=sum(tensor.numel() * tensor.element_size() for tensor in state),
        peak_per_image=two.peak - one.peak,
        flops_per_image=two.flops - one.flops,
        moved_per_image=moved_per_image,
        moved_per_pass=max(one.moved - moved_per_image, 0),
        launches=one.launches,
    )


def teacher_bytes(config: Config, batch: int, moments: int) -> tuple[int, int]:
    """Return the bytes of a config's teacher and projection, and the peak beside them while it embeds a batch.

    `moments` are those that the optimizer keeps of each number.

    Raises:
        ModelError, CheckpointError, DataError: as `teacher_cost`.
    """
    if config.distill is None:
        return 0, 0
    cost = teacher_cost(config.distill, config.train.precision)
    projection = 0
    if config.distill.loss != "relational" and cost.embedding_size != config.model.embedding_size:
        # With its gradient and its moments.
        projection = 4 * cost.embedding_size * config.model.embedding_size * (2 + moments)
    return cost.state_bytes + projection, batch * cost.peak_per_image


@dataclass(frozen=True)
class _Counts:
    embedding_size: int
    peak: int
    flops: int
    moved: int
    launches: int


def _count(model: EmbeddingModel, images: int, precision: str) -> _Counts:
    """Count the forward pass for some images."""
    side = model.image_size
    image_BCHW = model.prepare(torch.zeros(images, side, side, 3, dtype=torch.uint8))
    autocast = torch.autocast("cpu", _DTYPES[precision]) if precision in _DTYPES else nullcontext()
    with torch.no_grad(), autocast:
        with LiveBytes() as live, MemoryTraffic() as traffic:
            size = model.network(image_BCHW).shape[1]
        with FlopCounterMode(display=False) as counter:
            model.network(image_BCHW)
    return _Counts(size, live.peak, counter.get_total_flops(), traffic.bytes, traffic.launches)
