"""Memory of the head on one rank: its real tables, and the arithmetic of its sweep without running it."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K   C a chunk of S

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from facetrain.distributed.world import World
from facetrain.head.build import HeadRun, HeadStage, build_head
from facetrain.head.class_chunk import default_chunk_size
from facetrain.head.settings import HeadSettings
from facetrain.optim.settings import OptimSettings
from facetrain.plan.pass_cost import remembered

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_ROUNDING = {"float32": 0, "bfloat16": 14, "int8": 9}
"""Temporary bytes per number that stochastic rounding needs: random bits, sums and the result."""
_MOVED_BY_TORCH = {"float32": 58, "bfloat16": 182, "int8": 197}
"""Bytes per number of the sampled centers that a step moves with the update by PyTorch's operations, by the narrowest
dtype of centers and momentum: counted by tests/support/head_traffic.py."""


@dataclass(frozen=True)
class HeadLoad:
    """Part of a head on the rank with the largest shard, and what a micro-batch asks of it."""

    settings: HeadSettings
    optim: OptimSettings
    embedding_size: int
    rows: int
    """Classes of the shard."""
    global_batch: int
    """Embeddings per call: of all ranks, of one micro-batch."""
    world_size: int
    product_bytes: int = 4
    """Bytes of a number in the factors of the matrix products: 2 in bfloat16, else 4."""
    stages: tuple[HeadSettings, ...] = ()
    """Settings in all stages of the run; a table of expectations exists from the first stage on."""
    trained: bool = True
    """False for class centers of a teacher, which have neither moments nor a gradient."""
    cuda: bool = True
    """On a GPU a skipped update is masked by a factor, as the host does not read whether it is skipped."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether the centers are updated inside the backward pass; not with accumulation."""
        return self.trained and self.optim.accumulate == 1

    @property
    def sampled(self) -> int:
        """Classes of this rank in the sample of a step, on average."""
        rate = self.settings.sample_rate
        if rate >= 1:
            return self.rows
        # Positive classes are always in the sample. Their number is at most the rank's part of the batch.
        positive = min(self.global_batch / self.world_size, self.rows)
        return min(round(rate * self.rows + (1 - rate) * positive), self.rows)

    @property
    def chunk(self) -> int:
        """Classes whose logits exist at a time."""
        if self.settings.chunk_size != "auto":
            return min(self.settings.chunk_size, self.sampled)
        chunk = default_chunk_size(self.global_batch, self.embedding_size, "cuda" if self.cuda else "cpu")
        return min(chunk, self.sampled)


class HeadWork(NamedTuple):
    """Bytes of a step beside the tables, on the device."""

    peak: int
    """Peak while the backbone's activations exist."""
    accumulated: int
    """Part of `peak`: gradient of the centers that is kept until the end of the step."""
    update: int
    """Peak at the end of a step that has accumulated its gradient; else 0."""


def table_bytes(load: HeadLoad) -> tuple[int, int]:
    """Return the bytes of the class centers and of their moments, wherever they are placed.

    Raises:
        ConfigError: the optimizer cannot keep its moments in the type of the settings.
    """
    centers, moments = _bytes_per_row(
        load.settings, load.optim, load.embedding_size, load.stages, trained=load.trained
    )
    return load.rows * centers, load.rows * moments


@remembered
def _bytes_per_row(
    settings: HeadSettings,
    optim: OptimSettings,
    embedding_size: int,
    stages: tuple[HeadSettings, ...],
    *,
    trained: bool,
) -> tuple[int, int]:
    """Build the head of one class without memory; return the bytes of its centers and of its moments."""
    world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("meta"))
    run = HeadRun(stages=tuple(HeadStage(0, stage) for stage in stages), trained=trained)
    in_memory = settings.model_copy(update={"placement": "device"})
    head = build_head(in_memory, optim, run, world, embedding_size=embedding_size, num_classes=1)
    sizes = {name: table.nbytes for name, table in head.row_state().items()}
    centers = sum(sizes.get(name, 0) for name in ("weight", "expectation"))
    return centers, sum(sizes.values()) - centers


def head_work(load: HeadLoad) -> HeadWork:
    """Return the bytes that a step needs beside the tables."""
    samples, micro_batches = load.settings.sample_rate < 1, load.optim.accumulate
    # Two int64 per sampled class: its row, and its place in the sample.
    held = _gathered_embeddings(load) + (16 * load.sampled if samples else 0)
    accumulated = update = 0
    if load.trained and not load.updates_in_backward:
        numbers, per_number = load.sampled * load.embedding_size, 4 + _update_bytes_per_number(load)
        # Micro-batches differ in their positive classes. With sampling, the gradient of each is kept until the end of
        # the step and joined there; otherwise they are added up.
        accumulated = 4 * numbers * (micro_batches if samples else 1)
        update = 4 * numbers + load.chunk * load.embedding_size * per_number
        if samples:
            update = numbers * max(4 * (2 * micro_batches + 1), 4 + per_number)
    return HeadWork(held + _chunk_peak(load) + accumulated, accumulated, update)


def moved_per_number(load: HeadLoad, *, one_pass: bool) -> int:
    """Return the bytes that a step reads and writes in device memory for each number of the sampled centers.

    The factors, which are in proportion to the batch, are not included. A test compares these numbers with the count of
    the head's own step.

    Args:
        load: the head and its batch.
        one_pass: the Triton kernel updates the centers.
    """
    weight, moment = _BYTES[load.settings.weight_dtype], _BYTES[load.settings.momentum_dtype]
    if not one_pass:
        narrowest = min((load.settings.weight_dtype, load.settings.momentum_dtype), key=_BYTES.__getitem__)
        return _MOVED_BY_TORCH[narrowest]
    factor = load.product_bytes
    # Made in the forward and again in the backward pass.
    copies = 0 if weight == factor else 2 * (weight + factor)
    norms, logits, embeddings_gradient = weight, 2 * factor, factor
    gradient = factor
    update = gradient + 2 * weight + 2 * moment
    return norms + copies + logits + embeddings_gradient + gradient + update


def _gathered_embeddings(load: HeadLoad) -> int:
    # Five float32 tensors (G, D): unit embeddings, target centers, their contributions to the centers' gradient, the
    # embeddings' gradient, and the contribution of a chunk to it. Beside these, the factors of the products: unit
    # embeddings (in float32 no copy is needed) and weighted embeddings.
    factors = 2 * _narrow_bytes(load) or 4
    return load.global_batch * load.embedding_size * (5 * 4 + factors)


def _chunk_peak(load: HeadLoad) -> int:
    """Return the peak of one chunk: in its products, in its gradient, or in its update."""
    logit_count = load.global_batch * load.chunk
    slopes = logit_count * (_narrow_bytes(load) or 4)
    logits = logit_count * (4 + _narrow_bytes(load))
    numbers = load.chunk * load.embedding_size
    factor = _narrow_bytes(load) if load.settings.weight_dtype == "float32" else 0
    converted = 4 if load.settings.weight_dtype == "bfloat16" else 0
    # With sampling, a gradient that waits for the end of the step is kept as it is; without, it
    # is added to the gradient of the micro-batches before.
    is_added = load.trained and load.settings.sample_rate >= 1
    gradient = 4 if load.updates_in_backward or is_added else 0
    # The product of gradient and center, before it is summed over each row.
    product = 4 if load.trained else 0
    held = numbers * (_copied_bytes(load) + factor)
    # A product in float32 on a CPU copies its first factor if that is transposed, see `head.class_chunk`.
    transposed = slopes if load.trained and not load.cuda and not _narrow_bytes(load) else 0
    # Random bits for stochastic rounding, drawn once per step for the largest chunk.
    noise = 0 if load.settings.weight_dtype == load.settings.momentum_dtype == "float32" else 4 * numbers
    return noise + max(
        logits + held,
        slopes + transposed + held + numbers * gradient,
        slopes + held + numbers * (gradient + converted + product),
        numbers * (4 + _update_bytes_per_number(load)) if load.updates_in_backward else 0,
    )


def _update_bytes_per_number(load: HeadLoad) -> int:
    """Return the bytes per number that an update needs: copies of rows and moments, and temporaries."""
    rounding = max(_ROUNDING[load.settings.weight_dtype], _ROUNDING[load.settings.momentum_dtype])
    converted = 4 if load.settings.weight_dtype == "bfloat16" else _copied_bytes(load)
    moments = _copied_bytes(load) if load.settings.momentum_dtype == "float32" else 4
    temporaries = 16 if load.optim.name == "adamw" else 0
    masked = 4 if load.cuda else 0
    return converted + moments * load.optim.moments + max(temporaries, rounding) + masked


def _copied_bytes(load: HeadLoad) -> int:
    """Return the bytes per number of rows that are copied to be read; consecutive rows on the device are not."""
    if load.settings.sample_rate >= 1 and load.settings.placement == "device":
        return 0
    return _BYTES[load.settings.weight_dtype]


def _narrow_bytes(load: HeadLoad) -> int:
    """Return the bytes of a number in a 16-bit copy for the products; 0 if the products are in float32."""
    return load.product_bytes if load.product_bytes < 4 else 0
