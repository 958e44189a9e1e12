"""Embeddings that are read from their file in blocks, for galleries that do not fit into memory.

The columns of a `.npz` without compression are read in place. A `.parquet` file is first copied to an unnamed temporary
file. Reads are ordinary file reads: pages of mapped memory count as memory of the process, and end it if the file
shrinks.
"""

# N images   n images of one block   D embedding

from __future__ import annotations

import os
import struct
import tempfile
import weakref
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats.arrow_columns import decoded_bytes, import_pyarrow
from facetrain.data.positional_file import PositionalFile
from facetrain.embeddings.embedding_files import (
    COLUMNS,
    Embeddings,
    load_embeddings,
    parquet_batches,
    read_array_header,
    require_fitting,
)
from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as

BLOCK_BYTES = 1 << 24
"""Bytes of a block of embeddings in float32: 8,192 embeddings of size 512."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of name and extra field, at the end of the 30 bytes before a member of a zip file (APPNOTE.TXT, 4.3.7)."""


@dataclass(frozen=True)
class StoredEmbeddings:
    """Embeddings with names and labels; rows are read on access."""

    path: Path
    """File or input, for messages."""
    count: int
    size: int
    name: Sequence[str]
    label: Sequence[int] | np.ndarray
    read: Callable[[int, int], np.ndarray]
    """Rows from `start` to `stop` as they are stored, (n, D)."""

    @classmethod
    def of(cls, embeddings: Embeddings, path: Path) -> StoredEmbeddings:
        """Return embeddings in memory in this form."""
        rows = embeddings.embedding
        count, size = rows.shape
        return cls(path, count, size, embeddings.name, embeddings.label, lambda start, stop: rows[start:stop])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from `start` to `stop` as they are stored, float32 (n, D).

        Raises:
            DataError: the file cannot be read, or a number or its square is not finite.
        """
        stored_nD = self.read(start, min(stop, self.count))
        with np.errstate(over="ignore"):  # float64 beyond float32: reported below
            row_nD = np.array(
                stored_nD, np.float32, order="C"
            )  # a copy: torch needs memory that can be written
        # One pass: a sum is finite only if all numbers are, and squares cannot cancel.
        with np.errstate(over="ignore", invalid="ignore"):
            square_n = np.einsum("nd,nd->n", row_nD, row_nD)
        if not np.isfinite(square_n).all():
            row = int(np.flatnonzero(~np.isfinite(square_n))[0])
            raise DataError(
                f"{self.path}: row {start + row:,} ({self.name[start + row]}) has numbers that are not "
                "finite, or whose squares are not; embed the image again or remove the row"
            )
        return row_nD

    def blocks(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the number of the first row of each block, and its rows, float32 (n, D)."""
        step = rows_per_block(self.size)
        for start in range(0, self.count, step):
            yield start, self.rows(start, start + step)


def rows_per_block(size: int) -> int:
    """Return how many embeddings of a size one block has."""
    return max(BLOCK_BYTES // (4 * size), 1)


def open_embeddings(path: Path) -> StoredEmbeddings:
    """Open a file of embeddings without reading its rows.

    A compressed `.npz` is read as a whole.

    Raises:
        DataError: the file cannot be read, lacks a column, or its columns do not fit together.
    """
    try:
        stored = _open_npz(path) if path.suffix == ".npz" else _open_parquet(path)
    except DataError:
        raise
    except Exception as error:  # as in load_embeddings
        raise DataError(f"{path}: not a file of embeddings ({error_reason(error)})") from error
    if not stored.count or not stored.size:
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    return stored


def _open_npz(path: Path) -> StoredEmbeddings:
    file = PositionalFile(path)
    columns: dict[str, _ArrayInFile] = {}
    with zipfile.ZipFile(path) as archive:
        for column in COLUMNS:
            shape, fortran_order, dtype, header = read_array_header(archive, f"{column}.npy")
            member = archive.getinfo(f"{column}.npy")
            is_mapped = (
                member.compress_type == zipfile.ZIP_STORED and not fortran_order and not dtype.hasobject
            )
            if not is_mapped or not dtype.itemsize:  # texts without characters have no bytes
                return StoredEmbeddings.of(load_embeddings(path), path)
            lengths = _LOCAL_HEADER.unpack(file.bytes_at(member.header_offset, _LOCAL_HEADER.size))
            start = member.header_offset + _LOCAL_HEADER.size + sum(lengths) + header
            columns[column] = _ArrayInFile(file, start, shape, dtype)
    embedding, name, label = (columns[column] for column in COLUMNS)
    fits = len(embedding.shape) == 2 and name.shape == label.shape == embedding.shape[:1]
    if not fits or embedding.dtype.kind != "f":
        raise DataError(
            f"{path}: names of shape {name.shape}, labels {label.shape} and embeddings {embedding.shape} of "
            f"{embedding.dtype}; expected one name, one label and one row of floating-point numbers for each image"
        )
    if label.dtype.kind not in "iu" or name.dtype.kind != "U":
        raise DataError(f"{path}: the names must be texts, and the labels whole numbers (−1 for none)")
    count, size = embedding.shape
    return StoredEmbeddings(path, count, size, name, label, embedding.rows)


class _ArrayInFile(Sequence[Any]):
    """Array at an offset of a file; items are read on access. Slices are not supported."""

    def __init__(
        self, file: PositionalFile, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self._file, self._offset, self.shape, self.dtype = file, offset, shape, dtype
        self._row_bytes = dtype.itemsize * int(np.prod(shape[1:]))

    def __len__(self) -> int:
        return self.shape[0]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from `start` to `stop`.

        Raises:
            DataError: the file cannot be read.
        """
        size = (stop - start) * self._row_bytes
        data = self._file.bytes_at(self._offset + start * self._row_bytes, size)
        if len(data) < size:
            raise DataError(f"{self._file.path}: the file is truncated; write it again")
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])

    def __getitem__(self, index: Any) -> Any:
        # Iteration over a Sequence ends at the first IndexError.
        if not 0 <= index < len(self):
            raise IndexError(index)
        try:
            return self.rows(int(index), int(index) + 1)[0].item()
        except SystemError as error:  # NumPy, for a number that is no character
            raise DataError(f"{self._file.path}: row {index:,} has a name that is no text") from error


def _open_parquet(path: Path) -> StoredEmbeddings:
    pa = import_pyarrow(path)
    labels, names, name_bytes, count, size = [], [], 0, 0, 0
    rows = _TemporaryRows()
    for embedding_nD, name, label_n in parquet_batches(path):
        if size not in (0, embedding_nD.shape[1]):
            raise DataError(
                f"{path}: embeddings of sizes {size} and {embedding_nD.shape[1]}; embed all images with one model"
            )
        size, count = embedding_nD.shape[1], count + len(embedding_nD)
        # Before the names are decoded: one long name may belong to many rows.
        name_bytes += decoded_bytes(name)
        require_fitting(path, name_bytes)
        names.append(name.cast(pa.large_string()))
        labels.append(label_n)
        rows.append(embedding_nD)
    if not count:
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    label = np.concatenate(labels)
    name = pa.chunked_array(names)
    name.validate(full=True)
    if label.dtype.kind not in "iu" or name.null_count:
        raise DataError(f"{path}: the names must be texts, and the labels whole numbers (−1 for none)")
    return StoredEmbeddings(path, count, size, _ArrowTexts(name), label, rows.read)


class _ArrowTexts(Sequence[str]):
    """Texts of a pyarrow column, which need their bytes and an offset in memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._column[int(index)].as_py()


class _TemporaryRows:
    """Rows in an unnamed file, which disappears with this object."""

    def __init__(self) -> None:
        with tempfile.TemporaryFile() as file:
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)
        self._dtype: np.dtype[Any] = np.dtype(np.float32)
        self._size, self._end = 0, 0

    def append(self, row_nD: np.ndarray) -> None:
        """Write rows of the same type and size as those before.

        Raises:
            DataError: the disk is full.
        """
        self._dtype, self._size = row_nD.dtype, row_nD.shape[1]
        data = memoryview(np.ascontiguousarray(row_nD).tobytes())
        with os_errors_as(DataError, Path(tempfile.gettempdir()), "free some space, or set TMPDIR"):
            while data:  # a write may end early
                written = os.pwrite(self._file, data, self._end)
                data, self._end = data[written:], self._end + written

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from `start` to `stop`."""
        row_bytes = self._size * self._dtype.itemsize
        data = os.pread(self._file, (stop - start) * row_bytes, start * row_bytes)
        return np.frombuffer(data, self._dtype).reshape(-1, self._size)
