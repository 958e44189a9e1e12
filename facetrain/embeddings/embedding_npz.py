"""Embeddings in `.npz` files, as `np.savez` writes them: the arrays `embedding`, `name` and `label`."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from facetrain.data.positional_file import PositionalFile
from facetrain.embeddings.decoded_size import require_fitting
from facetrain.errors import DataError

_COLUMNS = ("embedding", "name", "label")
_HEADER_BYTES = 1 << 14
_LOCAL_HEADER = struct.Struct("<26xHH")
"""Lengths of name and extra field, at the end of the 30 bytes before a member of a zip file (APPNOTE.TXT, 4.3.7)."""


def write_npz(
    file: BinaryIO, rows: Any, names: Sequence[str], label: np.ndarray, dtype: np.dtype[Any], block: int
) -> None:
    """Write what `np.savez` writes, `block` rows at a time, without a second copy of the columns in memory."""
    count = len(names)
    width = max((len(name) for name in names), default=1)
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], Callable[[slice], Any]]] = {
        "embedding": (dtype, rows.shape, lambda part: rows[part]),
        "name": (
            np.dtype(f"<U{max(width, 1)}"),
            (count,),
            lambda part: [names[row] for row in range(part.start, min(part.stop, count))],
        ),
        "label": (label.dtype, (count,), lambda part: label[part]),
    }
    with zipfile.ZipFile(file, "w") as archive:
        for column, (kind, shape, values) in columns.items():
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            with archive.open(f"{column}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for start in range(0, count, block):
                    part = slice(start, start + block)
                    member.write(np.ascontiguousarray(values(part), kind).tobytes())


def open_npz(path: Path) -> tuple[Any, Sequence[str], Any]:
    """Return the columns embedding, name and label.

    Embeddings and names are read in place, on access, if they are stored without compression.

    Raises:
        DataError: the file grows too much when it is decompressed, or the names are no texts.
        ValueError: the file is damaged. zipfile, zlib and NumPy raise other types too.
    """
    file = PositionalFile(path)
    with zipfile.ZipFile(path) as archive:
        headers = [_read_header(archive, f"{column}.npy") for column in _COLUMNS]
        require_fitting(path, sum(header.member.file_size for header in headers))
        embedding, name, label = (_column(archive, file, header) for header in headers)
    if name.dtype.kind != "U" or len(name.shape) != 1:
        raise DataError(f"{path}: the names must be texts, not {name.dtype} of shape {name.shape}")
    names = name if isinstance(name, ArrayInFile) else name.tolist()
    return embedding, names, np.asarray(label[:]) if label.shape else label


class _Header(NamedTuple):
    """Description of an array of a `.npz` file."""

    member: zipfile.ZipInfo
    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]
    size: int
    """Bytes before the first number."""


def _read_header(archive: zipfile.ZipFile, name: str) -> _Header:
    """Read the header of an array.

    Raises:
        ValueError: it claims more than the bytes of the array, for which NumPy would allocate memory.
    """
    with archive.open(name) as file:
        head = io.BytesIO(file.read(_HEADER_BYTES))  # not the whole header, whose length the file claims
    version = np.lib.format.read_magic(head)
    read_header = (
        np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    )
    shape, fortran_order, dtype = read_header(head)
    member = archive.getinfo(name)
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize > member.file_size:
        raise ValueError(f"{name} claims the shape {shape} in {member.file_size:,} bytes")
    return _Header(member, shape, fortran_order, dtype, head.tell())


def _column(archive: zipfile.ZipFile, file: PositionalFile, header: _Header) -> Any:
    stored = header.member.compress_type == zipfile.ZIP_STORED and not header.fortran_order
    # Texts without characters have no bytes; NumPy refuses pickled objects.
    if stored and header.dtype.itemsize and not header.dtype.hasobject and header.shape:
        return ArrayInFile(file, header)
    with archive.open(header.member) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


class ArrayInFile(Sequence[Any]):
    """Array in an archive without compression; items and slices of rows are read on access.

    Once the rows have been read from the first to the last in this order, as a search does, the checksum of the archive
    has been verified too.
    """

    def __init__(self, file: PositionalFile, header: _Header) -> None:
        self._file, self.shape, self.dtype = file, header.shape, header.dtype
        lengths = _LOCAL_HEADER.unpack(file.bytes_at(header.member.header_offset, _LOCAL_HEADER.size))
        start = header.member.header_offset + _LOCAL_HEADER.size + sum(lengths)
        self._offset = start + header.size
        self._row_bytes = header.dtype.itemsize * math.prod(header.shape[1:])
        self._expected_crc, self._name = header.member.CRC, header.member.filename
        self._crc, self._verified = zlib.crc32(file.bytes_at(start, header.size)), 0

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        """Return an item of an array of one dimension, or some rows: texts as a list, numbers as an array."""
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            row_nD = self._read(start, stop)
            return self._texts(row_nD, start) if self.dtype.kind == "U" else row_nD
        if not 0 <= index < len(self):  # iteration over a Sequence ends at the first IndexError
            raise IndexError(index)
        return self[int(index) : int(index) + 1][0]

    def _texts(self, text_n: np.ndarray, start: int) -> list[str]:
        try:
            return list(map(str, text_n.tolist()))
        except SystemError as error:  # NumPy, for a number that is no character
            place = f"row {start:,}" + (" or a later one" if len(text_n) > 1 else "")
            raise DataError(f"{self._file.path}: {place} has a name that is no text") from error

    def _read(self, start: int, stop: int) -> np.ndarray:
        data = self._file.bytes_at(self._offset + start * self._row_bytes, (stop - start) * self._row_bytes)
        if len(data) < (stop - start) * self._row_bytes:
            raise DataError(f"{self._file.path}: truncated in row {start + len(data) // self._row_bytes:,}")
        if start == self._verified:
            self._crc, self._verified = zlib.crc32(data, self._crc), stop
            if stop == len(self) and self._crc != self._expected_crc:
                raise DataError(
                    f"{self._file.path}: damaged, the checksum of {self._name} differs; write the file again"
                )
        return np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])
