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
No memory is allocated for a length before as many bytes have been found.
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
_MOST_DIMENSIONS = 32
"""MXNet's own limit. The product of very many sizes would take quadratic time."""
_DTYPES = {0: "<f4", 1: "<f8", 2: "<f2", 3: "u1", 4: "<i4", 5: "i1", 6: "<i8"}


def read_params(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a .params file by name, without the prefixes `arg:` and `aux:`.

    Raises:
        ModelError: the file is truncated, contains sparse arrays, or is not a .params file.
    """
    with os_errors_as(ModelError, path):
        cursor = _Cursor(path.read_bytes())
    try:
        magic, _, count = cursor.unpack("<QQQ")
        if magic != _LIST_MAGIC:
            raise ValueError(f"begins with {magic:#x} instead of {_LIST_MAGIC:#x}")
        arrays = [_read_array(cursor) for _ in range(count)]
        (count,) = cursor.unpack("<Q")
        names = [_read_name(cursor) for _ in range(count)]
        if len(names) != len(arrays) or len(set(names)) != len(names):
            raise ValueError(f"{len(arrays)} arrays, but {len(set(names))} different names")
    except (ValueError, KeyError, OverflowError, struct.error) as error:  # UnicodeDecodeError is a ValueError
        raise ModelError(
            f"{path}: not a .params file of MXNet, or damaged, at byte {cursor.offset}: {error}"
        ) from error
    return dict(zip(names, arrays, strict=True))


class _Cursor:
    """Position in the bytes of a file, which never passes their end."""

    def __init__(self, data: bytes) -> None:
        self._data, self.offset = memoryview(data), 0

    def read(self, length: int) -> memoryview:
        """Return the next bytes."""
        left = len(self._data) - self.offset
        if length > left:
            raise ValueError(f"needs {length} more bytes, the file has {left}")
        self.offset += length
        return self._data[self.offset - length : self.offset]

    def unpack(self, layout: str) -> tuple[int, ...]:
        """Return the next integers, in the notation of `struct`."""
        return struct.unpack(layout, self.read(struct.calcsize(layout)))


def _read_array(cursor: _Cursor) -> Tensor:
    (version,) = cursor.unpack("<I")
    # Before version 1 the first field is the number of dimensions, not a magic number.
    has_magic = version in (_V1, _V2, _V3)
    if version in (_V2, _V3) and cursor.unpack("<i") != (0,):
        raise ValueError("sparse arrays cannot be read")
    dimensions = cursor.unpack("<i")[0] if has_magic else version
    # Nothing follows an array without values. Version 3 (NumPy semantics) writes -1 for it, because an array of 0
    # dimensions is a scalar there.
    if dimensions == (-1 if version == _V3 else 0):
        return torch.empty(0)
    if not 0 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"an array of {dimensions} dimensions")
    shape = cursor.unpack(f"<{dimensions}{'q' if has_magic else 'I'}")
    if min(shape, default=0) < 0:
        raise ValueError(f"an array of shape {shape}")
    _, _, kind = cursor.unpack("<iii")  # after the device that held the array when it was saved
    dtype = np.dtype(_DTYPES[kind])
    data = cursor.read(math.prod(shape) * dtype.itemsize)
    return torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy())


def _read_name(cursor: _Cursor) -> str:
    (length,) = cursor.unpack("<Q")
    return str(cursor.read(length), "utf-8").removeprefix("arg:").removeprefix("aux:")
