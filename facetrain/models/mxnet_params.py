"""Reader of MXNet's .params files: named arrays.

File layout, little-endian, as `NDArray::Save` writes it in MXNet 1.x (src/ndarray/ndarray.cc):

    byte 0     0x112, the magic number of a list: uint64
    byte 8     reserved, 0: uint64
    byte 16    N, the number of arrays: uint64
    byte 24    N arrays, see below
    then       M, the number of names (N, or 0 without names): uint64
    then       M names: the length in bytes as uint64, and UTF-8 text such as "arg:conv0_weight" or "aux:bn0_moving_var"

    array      magic number of the version: uint32
               storage type, 0 for dense: int32                (versions 2 and 3)
               number of dimensions: int32, and each length: int64
               device type and device number: 2 × int32
               dtype, a key of `_DTYPES`: int32
               values in C order

Before version 1 an array had no magic number: it began with the number of dimensions and the lengths, all uint32.
Every length is compared with the number of bytes left before memory is allocated for it.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import ModelError
from facetrain.files import os_errors_as

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8"}
_MAX_DIMENSIONS = 32  # NumPy's limit


def read_params(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .params file by name, without the prefixes `arg:` and `aux:`.

    Raises:
        ModelError: the file is truncated, contains sparse arrays, or is not a .params file.
    """
    with os_errors_as(ModelError, path):
        data = path.read_bytes()
    cursor = _Cursor(path, data)
    magic, _ = cursor.unpack("<QQ")
    if magic != _LIST_MAGIC:
        raise ModelError(
            f"{path}: not a .params file of MXNet: begins with {magic:#x} instead of {_LIST_MAGIC:#x}"
        )
    arrays = [_read_array(cursor) for _ in range(cursor.count("arrays", min_bytes=4))]
    names = [_read_name(cursor) for _ in range(cursor.count("names", min_bytes=8))]
    if len(names) != len(arrays) or len(set(names)) != len(names):
        raise ModelError(f"{path}: has {len(arrays)} arrays but {len(set(names))} different names")
    return dict(zip(names, arrays, strict=True))


class _Cursor:
    """Position in the bytes of a file, which never passes their end."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self._data, self._offset = path, data, 0

    def read(self, length: int) -> memoryview:
        """Return the next bytes."""
        left = len(self._data) - self._offset
        if length > left:
            raise ModelError(
                f"{self.path}: byte {self._offset}: needs {length} more bytes, the file has {left}"
            )
        self._offset += length
        return memoryview(self._data)[self._offset - length : self._offset]

    def unpack(self, layout: str) -> tuple[int, ...]:
        """Return the next integers, in the notation of `struct`."""
        return struct.unpack(layout, self.read(struct.calcsize(layout)))

    def count(self, items: str, *, min_bytes: int) -> int:
        """Return the number of items that follow, each of at least `min_bytes`."""
        (number,) = self.unpack("<Q")
        if number * min_bytes > len(self._data) - self._offset:
            raise ModelError(
                f"{self.path}: byte {self._offset}: {number} {items} need more bytes than the file has"
            )
        return number


def _read_array(cursor: _Cursor) -> Tensor:
    (version,) = cursor.unpack("<I")
    if version in (_V2, _V3):
        (storage,) = cursor.unpack("<i")
        if storage != 0:
            raise ModelError(
                f"{cursor.path}: has a sparse array (storage type {storage}); only dense arrays can be read"
            )
    shape = _read_shape(cursor, version)
    if shape is None:
        return torch.empty(0)
    cursor.unpack("<ii")  # the device that held the array when it was saved
    (kind,) = cursor.unpack("<i")
    if kind not in _DTYPES:
        raise ModelError(f"{cursor.path}: has an array of the unknown dtype {kind}")
    dtype = np.dtype(_DTYPES[kind])
    data = cursor.read(math.prod(shape) * dtype.itemsize)
    try:
        return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())
    except ValueError as error:  # no values, but lengths whose product NumPy cannot represent
        raise ModelError(f"{cursor.path}: has an array of shape {shape}") from error


def _read_shape(cursor: _Cursor, version: int) -> tuple[int, ...] | None:
    """Return the shape of an array, or None for an array without values, after which no fields follow."""
    # Before version 1 the first field is the number of dimensions, not a magic number.
    has_magic = version in (_V1, _V2, _V3)
    dimensions = cursor.unpack("<i")[0] if has_magic else version
    # Version 3 (NumPy semantics) writes -1 for an unknown shape, because 0 dimensions are a scalar there.
    if dimensions == (-1 if version == _V3 else 0):
        return None
    if not 0 <= dimensions <= _MAX_DIMENSIONS:
        raise ModelError(f"{cursor.path}: has an array of {dimensions} dimensions")
    shape = cursor.unpack(f"<{dimensions}{'q' if has_magic else 'I'}")
    if any(length < 0 for length in shape):
        raise ModelError(f"{cursor.path}: has an array of shape {shape}")
    return shape


def _read_name(cursor: _Cursor) -> str:
    (length,) = cursor.unpack("<Q")
    try:
        name = str(cursor.read(length), "utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{cursor.path}: has a name that is not UTF-8") from error
    return name.removeprefix("arg:").removeprefix("aux:")
