"""Embeddings of images with their names and labels, whose rows may be read from a file block by block."""

# N images   n images of one block   D embedding

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from facetrain.errors import DataError
from facetrain.files import error_reason
from facetrain.telemetry.log import warn
from facetrain.text import listed

BLOCK_BYTES = 1 << 24
"""Bytes of a block of embeddings in float32: 8,192 embeddings of size 512."""
_COLUMNS = ("embedding", "name", "label")
_MOST_GROWTH, _SPARE_BYTES = 8, 1 << 27
"""A file may need so many times its bytes in memory, and the spare ones: float32 with the numbers of an int8 network,
and names of a fixed width, are five times smaller when they are compressed."""


class Rows(Protocol):
    """Array (N, D) of embeddings, or a file that reads slices of it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and columns."""

    def __getitem__(self, rows: slice, /) -> np.ndarray:
        """Return some rows as they are stored."""


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of images, with their names and labels. The embeddings of an opened file are read on access."""

    stored: Rows
    """Embeddings as they are stored: floating-point (N, D)."""
    name: Sequence[str]
    """Name of each image."""
    label: np.ndarray
    """Class of each image, int (N,); −1 if it has none."""
    path: Path = Path("embeddings")
    """File or input, for messages."""
    quality: np.ndarray | None = None
    """Length of each embedding before normalization, float (N,); None for a file without the column."""
    model: np.ndarray | None = None
    """Fingerprint of the model, (D,), see `model_fingerprint`; None if it is unknown."""
    flip: bool | None = None
    """Whether each embedding is the sum of two, of the image and its mirror image; None if it is unknown."""

    @property
    def count(self) -> int:
        """Number of embeddings."""
        return self.stored.shape[0]

    @property
    def size(self) -> int:
        """Numbers of an embedding."""
        return self.stored.shape[1]

    @property
    def embedding(self) -> np.ndarray:
        """All embeddings as they are stored, (N, D)."""
        return np.asarray(self.stored[: self.count])

    def usable(self, min_quality: float) -> np.ndarray:
        """Return which images have at least a quality, bool (N,); all images for 0.

        Raises:
            DataError: the file has no qualities, or no image has this one.
        """
        if not min_quality:
            return np.ones(self.count, bool)
        if self.quality is None:
            raise DataError(
                f"{self.path}: has no column `quality`; embed the images again, or give no minimum"
            )
        if np.isnan(self.quality).all():
            raise DataError(f"{self.path}: its embeddings had length 1, and so no quality; give no minimum")
        usable_N: np.ndarray = self.quality >= min_quality  # false for NaN
        if not usable_N.any():
            raise DataError(
                f"{self.path}: no image has a quality of {min_quality:g} or more; the highest is "
                f"{np.nanmax(self.quality):.4g}; use better images, or a lower minimum"
            )
        return usable_N

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from `start` to `stop`, float32 or float64 (n, D).

        Raises:
            DataError: the file cannot be read, or a number is not finite.
        """
        with damage_as_error(self.path):
            stored_nD = self.stored[start : min(stop, self.count)]
        row_nD = np.asarray(stored_nD, np.float64 if stored_nD.dtype.itemsize > 4 else np.float32)
        if not np.isfinite(row_nD).all():
            row = int(np.flatnonzero(~np.isfinite(row_nD).all(1))[0])
            raise DataError(
                f"{self.path}: row {start + row:,} ({self.name[start + row]}) has numbers that are not finite; embed "
                "the image again, or write zeros if the system cannot process it"
            )
        return row_nD

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number of the first row of each block, and its rows, float32 or float64 (n, D)."""
        step = max(BLOCK_BYTES // (4 * self.size), 1)
        for start in range(0, self.count, step):
            yield start, self.rows(start, start + step)


def warn_of_unknown_model(embeddings: Embeddings) -> None:
    """Warn if nothing says of which model embeddings are: cosines of embeddings of two models mean nothing."""
    if embeddings.model is None:
        warn(
            f"{embeddings.path}: has no fingerprint of its model (array `model`); that both files are of one model is "
            "not checked"
        )


def require_columns(path: Path, found: Iterable[str]) -> None:
    """Refuse a file without one of the columns that every file of embeddings has.

    Raises:
        DataError: a column is missing.
    """
    found = sorted(found)
    if missing := [column for column in _COLUMNS if column not in found]:
        raise DataError(
            f"{path}: has no column {missing[0]}, but {listed(found)}; a file of embeddings has {', '.join(_COLUMNS)}, "
            "with a row for each image"
        )


def require_fitting(path: Path, size: int) -> None:
    """Refuse a file that grows too much when it is decompressed.

    Raises:
        DataError: `size`, the bytes of its columns in memory, is too large.
    """
    limit = _MOST_GROWTH * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: decompresses to {size:,} bytes, more than the {limit:,} that a file of this size may need; "
            "write it without compression, an .npz file with numpy.savez"
        )


@contextmanager
def damage_as_error(path: Path, kind: str = "a file of embeddings") -> Iterator[None]:
    """Turn any error of the block into a DataError, which says that the file is not of this kind, or damaged."""
    try:
        yield
    except DataError:
        raise
    # zipfile, zlib, NumPy and pyarrow have many errors for damaged files, without a common base.
    except Exception as error:
        raise DataError(f"{path}: damaged, or not {kind} ({error_reason(error, of_text=False)})") from error
