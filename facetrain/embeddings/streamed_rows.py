"""Content of a file of embeddings: rows that are read block by block, and the limit of its size in memory."""

# N rows   n rows of one block   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from facetrain.errors import DataError
from facetrain.files import error_reason

_SPARE_BYTES = 1 << 27


class Columns(NamedTuple):
    """Content of a file of embeddings."""

    embedding: Any
    """Embeddings (N, D): an array, or `StreamedRows`."""
    name: list[str]
    label: np.ndarray
    quality: np.ndarray | None
    """None if the file does not have one number for each label."""
    model: np.ndarray | None
    """Fingerprint of the model (D,); None if the file has none."""
    flip: bool | None
    """Whether each embedding is the sum of two, of the image and its mirror image; None if the file does not say it."""


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


def require_fitting(path: Path, size: int) -> None:
    """Refuse a file that grows too much when it is decompressed: embeddings hardly compress.

    Raises:
        DataError: `size`, the bytes of its columns in memory, is too large.
    """
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: decompresses to {size:,} bytes, more than the {limit:,} that a file of this size may need"
        )


@contextmanager
def damage_as_error(path: Path, kind: str) -> Iterator[None]:
    """Turn any error of the block into a DataError, which says that the file is not of this kind, or damaged."""
    try:
        yield
    except DataError:
        raise
    # zipfile, zlib, NumPy and pyarrow have many errors for damaged files, without a common base.
    except Exception as error:
        raise DataError(f"{path}: damaged, or not {kind} ({error_reason(error, of_text=False)})") from error
