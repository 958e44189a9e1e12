"""Files of embeddings with image names, labels and qualities: `.npz` (NumPy) and `.parquet`.

Embeddings of `.npz` files are read in blocks, from the first to the last, for galleries that do not fit into memory.
These are ordinary file reads: mapped memory would end the process if the file shrinks.
"""

# N images   n images of one block   D embedding

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.embeddings.embedding_npz import open_npz, write_npz
from facetrain.embeddings.embedding_parquet import open_parquet, write_parquet
from facetrain.embeddings.streamed_rows import Columns, damage_as_error
from facetrain.errors import DataError
from facetrain.files import new_file, open_regular
from facetrain.telemetry.log import warn

SUFFIXES = (".npz", ".parquet")
_KIND = "a file of embeddings"
BLOCK_BYTES = 1 << 24
"""Bytes of a block of embeddings in float32: 8,192 embeddings of size 512."""


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
        with damage_as_error(self.path, _KIND):
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


def open_embeddings(path: Path) -> Embeddings:
    """Open a file of embeddings that `save_embeddings` or another program wrote, without reading its embeddings.

    Raises:
        DataError: the file cannot be read, lacks a column, or its columns do not fit together.
    """
    open_columns = open_npz if path.suffix == ".npz" else open_parquet
    with damage_as_error(path, _KIND):
        os.close(open_regular(path))  # zipfile would wait for the writer of a pipe
        embedding, name, label, quality, model, flip = open_columns(path)
    fits = len(embedding.shape) == 2 and (len(name),) == label.shape == embedding.shape[:1]
    if not fits or embedding.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {len(name):,} names, labels of shape {label.shape} and embeddings {embedding.shape} of "
            f"{embedding.dtype}; expected one name, one label and one row of numbers for each image"
        )
    if label.dtype.kind not in "iu":
        raise DataError(f"{path}: expected labels that are whole numbers (−1 for none), not {label.dtype}")
    if not all(embedding.shape):
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    return Embeddings(embedding, name, label, path, quality, model, flip)


def save_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write a `.npz` or `.parquet` file, complete or not at all.

    Raises:
        DataError: the suffix is unknown, pyarrow is not installed, or the file cannot be written.
    """
    require_format(path)
    write = write_npz if path.suffix == ".npz" else write_parquet
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:
        label, quality, model, flip = embeddings.label, embeddings.quality, embeddings.model, embeddings.flip
        write(file, Columns(embeddings.embedding, list(embeddings.name), label, quality, model, flip))


def require_format(path: Path) -> None:
    """Check that a file with this suffix can be written.

    Raises:
        DataError: the suffix is neither `.npz` nor `.parquet`, or pyarrow is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown suffix of a file of embeddings; use {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        import_pyarrow(path)
