"""Rows of a file that is read from its beginning to its end, block by block."""

# N rows   n rows of one block   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


class StreamedRows:
    """Array (N, D) whose slices are read on access.

    A slice behind the last one continues the reading, another one begins it again. A search reads in order, so the
    file may be larger than the memory, and compressed.

    Args:
        shape: numbers of rows and columns.
        dtype: type of the numbers.
        blocks: returns an iterator over the rows from the first to the last, (n, D).
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], blocks: Callable[[], Iterator[np.ndarray]]
    ) -> None:
        self.shape, self.dtype, self._blocks = shape, dtype, blocks
        self._begin()

    def _begin(self) -> None:
        self._unread = self._blocks()
        self._first, self._block = 0, np.empty((0, *self.shape[1:]), self.dtype)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Return some rows.

        Raises:
            ValueError: the file is damaged. Its library raises other types too.
        """
        start, stop, _ = rows.indices(self.shape[0])
        if start < self._first:
            self._begin()
        parts = []
        while True:
            end = self._first + len(self._block)
            parts.append(self._block[max(start - self._first, 0) : stop - self._first])
            if stop <= end:
                return np.concatenate(parts)
            self._first, self._block = end, next(self._unread)
