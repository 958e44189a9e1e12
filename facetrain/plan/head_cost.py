"""Bytes of the head on one rank: the same arithmetic as its storage and its sweep, without running them."""

# G gathered batch   D embedding   K this rank's classes   S sampled of K   C a chunk of S

from __future__ import annotations

from dataclasses import dataclass

_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
_INT8_BLOCK = 128
"""Numbers that share a float32 scale where a table is held in 8 bits."""
_MOMENTS = {"sgd": 1, "adamw": 2}
_ROUNDING = {"float32": 0, "bfloat16": 14, "int8": 9}
"""Temporary bytes per number that is rounded at random: noise, sums, the result."""


@dataclass(frozen=True)
class HeadShape:
    """The numbers on which the head's cost depends."""

    num_classes: int
    embedding_size: int
    global_batch: int
    """Rows that one call gathers: all ranks, one micro-batch."""
    world_size: int
    sub_centers: int = 1
    sample_rate: float = 1.0
    accumulate: int = 1
    chunk_size: int | None = None
    optimizer: str = "sgd"
    weight_dtype: str = "float32"
    momentum_dtype: str = "float32"
    placement: str = "device"
    product_bytes: int = 4
    """Of a factor of the matrix products: 2 in bf16, else 4."""
    fused: bool = True
    """The centers are updated inside the backward pass; not with accumulation or a loss scale."""
    cuda: bool = True
    """On a GPU the update is masked, not asked for."""

    @property
    def rows(self) -> int:
        """Classes of the largest shard."""
        return -(-self.num_classes // self.world_size)

    @property
    def sampled(self) -> int:
        """Classes of this rank in a step's sample, on average."""
        if self.sample_rate >= 1:
            return self.rows
        positive = min(self.global_batch / self.world_size, self.rows)
        return min(round(self.sample_rate * self.rows + (1 - self.sample_rate) * positive), self.rows)

    @property
    def width(self) -> int:
        """Numbers of one class's centers."""
        return self.embedding_size * self.sub_centers

    @property
    def chunk(self) -> int:
        """Classes whose logits exist at a time."""
        columns = self.global_batch * self.sub_centers
        # As the head has it: enough logits to fill a GPU; or a chunk that stays in a processor's last cache.
        fitting = (1 << 26) // columns if self.cuda else (1 << 22) // (2 * columns + 3 * self.width)
        return min(self.chunk_size or max(fitting, 128), self.sampled)


@dataclass(frozen=True)
class HeadBytes:
    """What the head holds on one rank."""

    centers: int
    moments: int
    work: int
    """The most that exists beside them while the backbone's activations exist, on the device."""
    collected: int
    """Of `work`: gradient of centers that waits for the end of the step; 0 where nothing waits."""
    update: int
    """The most that exists beside them at the end of a step that collected its gradient; else 0."""
    elsewhere: int
    """Of centers and moments that lie in the host's memory or on its disk."""


def head_bytes(shape: HeadShape) -> HeadBytes:
    """Work out what the head holds, on the rank with the largest shard."""
    row = shape.width * shape.rows
    centers = row * _BYTES[shape.weight_dtype]
    moments = row * _BYTES[shape.momentum_dtype] * _MOMENTS[shape.optimizer]
    if shape.momentum_dtype == "int8":
        moments += 4 * shape.rows * -(-shape.width // _INT8_BLOCK)
    sample = 0 if shape.sample_rate >= 1 else 16 * shape.sampled
    work = _gathered(shape) + sample + _chunk(shape) + _collected(shape)
    elsewhere = 0
    if shape.placement != "device":
        centers, moments, elsewhere = 0, 0, centers + moments
    return HeadBytes(centers, moments, work, _collected(shape), _joined(shape), elsewhere)


def _gathered(shape: HeadShape) -> int:
    # Unit embeddings, their own centers, what they add to those, their gradient and a chunk's part of it; as
    # factors of the products, unit embeddings (which float32 need not copy) and weighted ones.
    factors = 2 * _narrow(shape) or 4
    return shape.global_batch * shape.embedding_size * (5 * 4 + factors)


def _chunk(shape: HeadShape) -> int:
    """Return the most that one chunk takes: in its last product, in the step after it, or in its update."""
    pairs = shape.global_batch * shape.chunk
    slopes = pairs * shape.sub_centers * (_narrow(shape) or 4)
    logits = pairs * shape.sub_centers * (4 + _narrow(shape))
    if shape.sub_centers > 1:  # which is nearest, and the logit of that one
        logits += pairs * (8 + 4)
    numbers = shape.chunk * shape.width
    factor = _narrow(shape) if shape.weight_dtype == "float32" else 0
    converted = 4 if shape.weight_dtype == "bfloat16" else 0
    # A gradient that waits for the end of the step is counted there.
    gradient = 4 if shape.fused else 0
    held = numbers * (_taken(shape) + factor)
    # The step's draw of random bits, by which storage in fewer bits is rounded.
    noise = 0 if shape.weight_dtype == shape.momentum_dtype == "float32" else 4 * numbers
    # 4: a product that is summed over the row.
    return noise + max(
        logits + held,
        slopes + held + numbers * (gradient + converted + 4),
        numbers * (4 + _update_per_number(shape)) if shape.fused else 0,
    )


def _collected(shape: HeadShape) -> int:
    """Gradient of the step's rows, where the update waits for the end of the step."""
    if shape.fused:
        return 0
    rows = shape.sampled * shape.width * 4
    # Samples of micro-batches differ by their positives, so each is kept.
    return rows if shape.sample_rate >= 1 else rows * shape.accumulate


def _joined(shape: HeadShape) -> int:
    """Return what joining the collected gradients takes, then updating all their rows at once."""
    if shape.fused:
        return 0
    numbers = shape.sampled * shape.width
    if shape.sample_rate >= 1:
        return 4 * numbers + shape.chunk * shape.width * (4 + _update_per_number(shape))
    return numbers * max(4 * (2 * shape.accumulate + 1), 8 + _update_per_number(shape))


def _update_per_number(shape: HeadShape) -> int:
    """Bytes per number of the rows that are updated: copies of rows and moments, and temporaries."""
    rounding = max(_ROUNDING[shape.weight_dtype], _ROUNDING[shape.momentum_dtype])
    converted = 4 if shape.weight_dtype == "bfloat16" else _taken(shape)
    moments = _taken(shape) if shape.momentum_dtype == "float32" else 4
    temporaries = 16 if shape.optimizer == "adamw" else 0
    masked = 4 if shape.cuda else 0
    return converted + moments * _MOMENTS[shape.optimizer] + max(temporaries, rounding) + masked


def _taken(shape: HeadShape) -> int:
    """Bytes per number of rows that are copied to be read; consecutive rows on the device are not."""
    if shape.sample_rate >= 1 and shape.placement == "device":
        return 0
    return _BYTES[shape.weight_dtype]


def _narrow(shape: HeadShape) -> int:
    return shape.product_bytes if shape.product_bytes < 4 else 0
