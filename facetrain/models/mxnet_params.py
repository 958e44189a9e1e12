"""MXNet's .params files: named arrays, read without MXNet.

The layout, little-endian, follows `NDArray::Save` in MXNet 1.x (src/ndarray/ndarray.cc): the list's
magic, eight bytes of zero, the number of arrays, the arrays, the number of names, the names. Nothing
is allocated on the word of the file: every length is held against the bytes that are left.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from facetrain.errors import ModelError

_LIST_MAGIC = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8"}
_MOST_DIMENSIONS = 32


def read_params(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .params file by name, without the `arg:` and `aux:` in front.

    Raises:
        ModelError: the file is cut off, holds sparse arrays, or is none of MXNet's.
    """
    try:
        cursor = _Cursor(path, path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    magic, _ = cursor.take("<QQ")
    if magic != _LIST_MAGIC:
        raise ModelError(f"{path}: starts with {magic:#x}, MXNet's .params with {_LIST_MAGIC:#x}")
    arrays = [_read_array(cursor) for _ in range(cursor.count("arrays", smallest=4))]
    names = [_read_name(cursor) for _ in range(cursor.count("names", smallest=8))]
    if len(names) != len(arrays) or len(set(names)) != len(names):
        raise ModelError(f"{path}: has {len(arrays)} arrays and {len(set(names))} different names")
    return dict(zip(names, arrays, strict=True))


class _Cursor:
    """A place in the file's bytes that never runs past their end."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self._data, self._at = path, data, 0

    def bytes(self, length: int) -> memoryview:
        """Return the next bytes."""
        left = len(self._data) - self._at
        if length > left:
            raise ModelError(f"{self.path}: byte {self._at}: needs {length} bytes more, the file has {left}")
        self._at += length
        return memoryview(self._data)[self._at - length : self._at]

    def take(self, layout: str) -> tuple[int, ...]:
        """Return the next whole numbers, as `struct` describes them."""
        return struct.unpack(layout, self.bytes(struct.calcsize(layout)))

    def count(self, what: str, *, smallest: int) -> int:
        """Return how many things follow, each of which takes some bytes at least."""
        (number,) = self.take("<Q")
        if number * smallest > len(self._data) - self._at:
            raise ModelError(
                f"{self.path}: byte {self._at}: announces {number} {what}, more than the file holds"
            )
        return number


def _read_array(cursor: _Cursor) -> Tensor:
    (version,) = cursor.take("<I")
    if version in (_V2, _V3):
        (storage,) = cursor.take("<i")
        if storage != 0:
            raise ModelError(
                f"{cursor.path}: holds a sparse array (storage {storage}); only dense ones are read"
            )
    shape = _read_shape(cursor, version)
    if shape is None:
        return torch.empty(0)
    cursor.take("<ii")  # the device it lay on
    (kind,) = cursor.take("<i")
    if kind not in _DTYPES:
        raise ModelError(f"{cursor.path}: holds an array of the unknown type {kind}")
    dtype = np.dtype(_DTYPES[kind])
    data = cursor.bytes(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())


def _read_shape(cursor: _Cursor, version: int) -> tuple[int, ...] | None:
    """Return an array's shape, or None for one that was never filled, of which nothing follows."""
    # Before version 1 there was no magic: the first number is the number of dimensions, in 32 bits each.
    old = version not in (_V1, _V2, _V3)
    dimensions = version if old else cursor.take("<i")[0]
    if dimensions == (-1 if version == _V3 else 0):
        return None
    if not 0 <= dimensions <= _MOST_DIMENSIONS:
        raise ModelError(f"{cursor.path}: holds an array of {dimensions} dimensions")
    shape = cursor.take(f"<{dimensions}{'I' if old else 'q'}")
    if any(length < 0 for length in shape):
        raise ModelError(f"{cursor.path}: holds an array of shape {shape}")
    return shape


def _read_name(cursor: _Cursor) -> str:
    (length,) = cursor.take("<Q")
    try:
        name = str(cursor.bytes(length), "utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{cursor.path}: a name is not UTF-8") from error
    return name.removeprefix("arg:").removeprefix("aux:")
