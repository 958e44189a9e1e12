"""Split of the classes over ranks."""

from __future__ import annotations

from typing import NamedTuple


class ClassShard(NamedTuple):
    """Contiguous range of classes, [start, stop), that one rank holds."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of classes in the range."""
        return self.stop - self.start


def shard_classes(num_classes: int, rank: int, world_size: int) -> ClassShard:
    """Split classes into contiguous ranges whose sizes differ by at most one; the first ranks have the larger ones."""
    # Contiguous, so that a checkpoint of any number of ranks is read as ranges.
    base, extra = divmod(num_classes, world_size)
    start = rank * base + min(rank, extra)
    return ClassShard(start, start + base + (rank < extra))
