"""Split of the classes over ranks, and of a rank's classes into pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

_PIECE = 1 << 16


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


def row_pieces(rows: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges [start, stop) of a table's rows, so that nobody needs a copy of all rows at once."""
    for start in range(0, rows, _PIECE):
        yield start, min(start + _PIECE, rows)
