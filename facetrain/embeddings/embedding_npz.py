"""Embeddings in `.npz` files, as `np.savez` writes them: one array for each column."""

# N images   n images of one block   D embedding

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from facetrain.embeddings.embeddings import Embeddings, require_columns, require_fitting
from facetrain.errors import DataError

_READ_ROWS = 4096
_MOST_HEADER = 1 << 16
"""Bytes of a member that may be its header; NumPy refuses headers of more than 10,000 characters."""


def write_npz(file: BinaryIO, content: Embeddings) -> None:
    """Write embeddings as float32; NumPy writes them piece by piece, and needs no second copy."""
    columns: dict[str, Any] = {
        "embedding": np.asarray(content.embedding, np.float32),
        "name": np.array(list(content.name)),
        "label": content.label,
        "quality": None if content.quality is None else content.quality.astype(np.float32),
        "model": content.model,
        "flip": content.flip,
    }
    np.savez(file, **{name: column for name, column in columns.items() if column is not None})


def open_npz(path: Path) -> Embeddings:
    """Return the content of a file; the embeddings are read on access.

    Raises:
        DataError: an array is missing, the file grows too much when it is decompressed, or the names are no texts.
        ValueError: the file is damaged. zipfile, zlib and NumPy raise other types too.
    """
    with zipfile.ZipFile(path) as archive:
        require_columns(path, (member.removesuffix(".npy") for member in archive.namelist()))
    embedding, name, label = (NpzArray.find(path, column) for column in ("embedding", "name", "label"))
    if objects := [array.member for array in (embedding, name, label) if array.dtype.hasobject]:
        raise DataError(
            f"{path}: {objects[0]} has Python objects; write numbers, and names as texts: numpy.array(names, str)"
        )
    quality = NpzArray.find_numbers(path, "quality", label.shape)
    model = NpzArray.find_numbers(path, "model", embedding.shape[1:])
    flip = NpzArray.find_numbers(path, "flip", (), kind="b")
    arrays = (embedding, name, label, quality, model, flip)
    require_fitting(path, sum(array.size for array in arrays if array))
    if name.dtype.kind != "U" or len(name.shape) != 1:
        raise DataError(f"{path}: the names must be texts, not {name.dtype} of shape {name.shape}")
    try:
        names = [str(text) for block in name.blocks() for text in block.tolist()]
    except SystemError as error:  # NumPy, for a number that is no character
        raise DataError(f"{path}: has a name that is no text") from error
    rows = StreamedRows(embedding.shape, embedding.dtype, embedding.blocks)
    qualities, fingerprint = (array and array.read() for array in (quality, model))
    is_sum = bool(flip.read()) if flip else None
    return Embeddings(rows, names, label.read(), path, qualities, fingerprint, is_sum)


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


class NpzArray(NamedTuple):
    """Array of a `.npz` file. One of Python objects, a pickle, cannot be read."""

    path: Path
    member: str
    size: int
    """Bytes of the array without compression."""
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @classmethod
    def find(cls, path: Path, column: str) -> NpzArray:
        """Read the header of an array.

        Raises:
            ValueError: it claims more than the bytes of the array, for which NumPy would allocate memory.
        """
        name = f"{column}.npy"
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            size = archive.getinfo(name).file_size
            # Not the member itself: NumPy reads a header of any length before it refuses one that is too long.
            shape, fortran_order, dtype = _read_header(BytesIO(member.read(_MOST_HEADER)))
        claimed = 0 if dtype.hasobject else math.prod(shape) * dtype.itemsize
        if not dtype.itemsize or min(shape, default=1) < 0 or claimed > size:
            raise ValueError(f"{name} claims the shape {shape} of {dtype} in {size:,} bytes")
        return cls(path, name, size, shape, fortran_order, dtype)

    @classmethod
    def find_numbers(
        cls, path: Path, column: str, shape: tuple[int, ...], *, kind: str = "f"
    ) -> NpzArray | None:
        """Read the header of an array; None without such numbers of this shape: it may be of another program."""
        with zipfile.ZipFile(path) as archive:
            if f"{column}.npy" not in archive.namelist():
                return None
        array = cls.find(path, column)
        return array if array.dtype.kind == kind and array.shape == shape else None

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the rows from the first to the last. After the last byte, zipfile has verified the checksum."""
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        if self.fortran_order:
            yield self.read()
            return
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as member:
            _read_header(member)
            for start in range(0, self.shape[0], _READ_ROWS):
                count = min(_READ_ROWS, self.shape[0] - start)
                data = member.read(count * row_bytes)
                yield np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def read(self) -> np.ndarray:
        """Return the array."""
        with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))


def _read_header(member: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    if np.lib.format.read_magic(member) == (1, 0):
        return np.lib.format.read_array_header_1_0(member)
    return np.lib.format.read_array_header_2_0(member)
