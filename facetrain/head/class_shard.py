"""Which classes belong to which rank: whole numbers only."""

from __future__ import annotations

from typing import NamedTuple


class ClassShard(NamedTuple):
    """A contiguous range of classes, [start, stop)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """How many classes there are in it."""
        return self.stop - self.start


def shard_classes(num_classes: int, rank: int, world_size: int) -> ClassShard:
    """Split classes into contiguous ranges whose sizes differ by one at most; the first are larger."""
    base, extra = divmod(num_classes, world_size)
    start = rank * base + min(rank, extra)
    return ClassShard(start, start + base + (rank < extra))
