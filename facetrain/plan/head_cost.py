"""Memory of the head on one rank: the same arithmetic as its tables and its sweep, without running them."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K   C a chunk of S

from __future__ import annotations

from dataclasses import dataclass

import torch

from facetrain.head.class_chunk import default_chunk_size
from facetrain.head.row_optimizer import moment_layout
from facetrain.optim.settings import OptimSettings

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_ROUNDING = {"float32": 0, "bfloat16": 14, "int8": 9}
"""Temporary bytes per number that stochastic rounding needs: random bits, sums and the result."""
_MOVED_BY_TORCH = {"float32": 58, "bfloat16": 182, "int8": 197}
"""Bytes per number of the sampled centers that a step moves with the update by PyTorch's operations, by the narrowest
dtype of centers and momentum: counted by tests/support/head_traffic.py."""


@dataclass(frozen=True)
class HeadShape:
    """The settings of a head on which its memory and its time depend."""

    num_classes: int
    embedding_size: int
    global_batch: int
    """Embeddings per call: of all ranks, of one micro-batch."""
    world_size: int
    optimizer: OptimSettings
    sub_centers: int = 1
    sample_rate: float = 1.0
    accumulate: int = 1
    chunk_size: int | None = None
    """Classes per chunk; None: the head's default for this batch and device."""
    weight_dtype: str = "float32"
    momentum_dtype: str = "float32"
    placement: str = "device"
    product_bytes: int = 4
    """Bytes of a number in the factors of the matrix products: 2 in bfloat16, else 4."""
    update_in_backward: bool = True
    """The centers are updated inside the backward pass; not with accumulation."""
    trained: bool = True
    """False for class centers of a teacher, which have neither moments nor a gradient."""
    expectations: bool = False
    """The loss compares with expectations of the classes (`head.expectations`)."""
    keeps_expectations: bool = False
    """There is a table of expectations as large as the centers, also in stages that do not use it."""
    cuda: bool = True
    """On a GPU a skipped update is masked by a factor, as the host does not read whether it is skipped."""

    @property
    def rows(self) -> int:
        """Classes of the largest shard."""
        return -(-self.num_classes // self.world_size)

    @property
    def sampled(self) -> int:
        """Classes of this rank in the sample of a step, on average."""
        if self.sample_rate >= 1:
            return self.rows
        # Positive classes are always in the sample. Their number is at most the rank's part of the batch.
        positive = min(self.global_batch / self.world_size, self.rows)
        return min(round(self.sample_rate * self.rows + (1 - self.sample_rate) * positive), self.rows)

    @property
    def width(self) -> int:
        """Numbers of all centers of one class."""
        return self.embedding_size * self.sub_centers

    @property
    def chunk(self) -> int:
        """Classes whose logits exist at a time."""
        default = default_chunk_size(
            self.global_batch * self.sub_centers, self.width, "cuda" if self.cuda else "cpu"
        )
        return min(self.chunk_size or default, self.sampled)

    @property
    def moment_bytes_per_row(self) -> int:
        """Bytes that the optimizer keeps for one class."""
        if not self.trained:
            return 0
        layout = moment_layout(self.optimizer, self.width, getattr(torch, self.momentum_dtype))
        return sum(columns * dtype.itemsize for columns, dtype in layout.values())

    @property
    def moments(self) -> int:
        """Moments that the optimizer keeps of each number: 1 for SGD with momentum, 2 for AdamW."""
        if self.optimizer.name == "adamw":
            return 2
        return 1 if self.optimizer.momentum else 0


@dataclass(frozen=True)
class HeadBytes:
    """Bytes of the head on one rank."""

    centers: int
    """Class centers on the device."""
    moments: int
    """Their moments on the device."""
    work: int
    """Peak beside them while the backbone's activations exist, on the device."""
    accumulated: int
    """Part of `work`: gradient of centers that is kept until the end of the step; 0 with `update_in_backward`."""
    update: int
    """Peak beside them at the end of a step that accumulated its gradient; else 0."""
    elsewhere: int
    """Centers and moments in the host's memory or on its disk."""


def head_bytes(shape: HeadShape) -> HeadBytes:
    """Return the bytes of the head on the rank with the largest shard."""
    centers = shape.rows * shape.width * _BYTES[shape.weight_dtype] * (2 if shape.keeps_expectations else 1)
    moments = shape.rows * shape.moment_bytes_per_row
    # Two int64 per sampled class: its row, and its place in the sample.
    sample = 0 if shape.sample_rate >= 1 else 16 * shape.sampled
    accumulated = _accumulated_gradient(shape)
    work = _gathered_embeddings(shape) + sample + _chunk_peak(shape) + accumulated
    elsewhere = 0
    if shape.placement != "device":
        centers, moments, elsewhere = 0, 0, centers + moments
    return HeadBytes(centers, moments, work, accumulated, _update_peak(shape), elsewhere)


def moved_per_number(shape: HeadShape, *, one_pass: bool) -> int:
    """Return the bytes that a step reads and writes in device memory for each number of the sampled centers.

    The factors, which are in proportion to the batch, are not included. A test compares these numbers with the count of
    the head's own step.

    Args:
        shape: settings of the head.
        one_pass: the Triton kernel updates the centers.
    """
    weight, moment = _BYTES[shape.weight_dtype], _BYTES[shape.momentum_dtype]
    if not one_pass and shape.trained:
        narrowest = min((shape.weight_dtype, shape.momentum_dtype), key=_BYTES.__getitem__)
        return _MOVED_BY_TORCH[narrowest]
    factor = shape.product_bytes
    # Made in the forward and again in the backward pass.
    copies = 0 if weight == factor else 2 * (weight + factor)
    norms, logits, embeddings_gradient = weight, 2 * factor, factor
    if not shape.trained:
        return norms + copies + logits + embeddings_gradient
    gradient = factor
    update = gradient + 2 * weight + 2 * moment
    return norms + copies + logits + embeddings_gradient + gradient + update


def _gathered_embeddings(shape: HeadShape) -> int:
    # Five float32 tensors (G, D): unit embeddings, target centers, their contributions to the centers' gradient, the
    # embeddings' gradient, and the contribution of a chunk to it. Beside these, the factors of the products: unit
    # embeddings (in float32 no copy is needed) and weighted embeddings.
    factors = 2 * _narrow_bytes(shape) or 4
    return shape.global_batch * shape.embedding_size * (5 * 4 + factors)


def _chunk_peak(shape: HeadShape) -> int:
    """Return the peak of one chunk: in its products, in its gradient, or in its update."""
    logit_count = shape.global_batch * shape.chunk
    slopes = logit_count * shape.sub_centers * (_narrow_bytes(shape) or 4)
    logits = logit_count * shape.sub_centers * (4 + _narrow_bytes(shape))
    if shape.sub_centers > 1:
        # int64: the nearest sub-center; float32: its logit.
        logits += logit_count * (8 + 4)
    numbers = shape.chunk * shape.width
    factor = _narrow_bytes(shape) if shape.weight_dtype == "float32" else 0
    converted = 4 if shape.weight_dtype == "bfloat16" else 0
    # A gradient that is kept until the end of the step is counted in `_accumulated_gradient`.
    gradient = 4 if shape.update_in_backward else 0
    # The product of gradient and center, before it is summed over each row.
    product = 4 if shape.trained else 0
    held = numbers * (_copied_bytes(shape) + factor)
    # Random bits for stochastic rounding, drawn once per step for the largest chunk.
    noise = 0 if shape.weight_dtype == shape.momentum_dtype == "float32" else 4 * numbers
    return noise + max(
        logits + held,
        slopes + held + numbers * (gradient + converted + product),
        numbers * (4 + _update_bytes_per_number(shape)) if shape.update_in_backward else 0,
    )


def _accumulated_gradient(shape: HeadShape) -> int:
    """Return the bytes of the sampled rows' gradient, if the update waits for the end of the step."""
    if shape.update_in_backward or not shape.trained:
        return 0
    rows = shape.sampled * shape.width * 4
    # With sampling, micro-batches differ in their positive classes, so the gradient of each is kept.
    return rows if shape.sample_rate >= 1 else rows * shape.accumulate


def _update_peak(shape: HeadShape) -> int:
    """Return the peak at the end of a step: joining the accumulated gradients, or updating their rows."""
    if shape.update_in_backward or not shape.trained:
        return 0
    numbers = shape.sampled * shape.width
    if shape.sample_rate >= 1:
        return 4 * numbers + shape.chunk * shape.width * (4 + _update_bytes_per_number(shape))
    return numbers * max(4 * (2 * shape.accumulate + 1), 8 + _update_bytes_per_number(shape))


def _update_bytes_per_number(shape: HeadShape) -> int:
    """Return the bytes per number that an update needs: copies of rows and moments, and temporaries."""
    rounding = max(_ROUNDING[shape.weight_dtype], _ROUNDING[shape.momentum_dtype])
    converted = 4 if shape.weight_dtype == "bfloat16" else _copied_bytes(shape)
    moments = _copied_bytes(shape) if shape.momentum_dtype == "float32" else 4
    temporaries = 16 if shape.optimizer.name == "adamw" else 0
    masked = 4 if shape.cuda else 0
    return converted + moments * shape.moments + max(temporaries, rounding) + masked


def _copied_bytes(shape: HeadShape) -> int:
    """Return the bytes per number of rows that are copied to be read; consecutive rows on the device are not."""
    if shape.sample_rate >= 1 and shape.placement == "device":
        return 0
    return _BYTES[shape.weight_dtype]


def _narrow_bytes(shape: HeadShape) -> int:
    """Return the bytes of a number in a 16-bit copy for the products; 0 if the products are in float32."""
    return shape.product_bytes if shape.product_bytes < 4 else 0
