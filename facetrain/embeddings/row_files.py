"""Embeddings that are appended to a temporary file chunk by chunk."""

# N images   n images of one chunk   D embedding

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.files import os_errors_as

_ADVICE = "free some space, or set TMPDIR to another disk"


class RowFile:
    """Rows of float32 numbers in an unnamed file in TMPDIR, which disappears with this object and its array.

    Args:
        count: number of rows in the end, whose space is reserved at the beginning.
    """

    def __init__(self, count: int) -> None:
        self._path, self._count = Path(tempfile.gettempdir()), count
        self._size = self._done = 0
        with os_errors_as(DataError, self._path, _ADVICE):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        # A mapped array keeps the content.
        weakref.finalize(self, self._file.close)

    def append(self, row_nD: np.ndarray) -> None:
        """Write rows.

        Raises:
            DataError: the disk is full, or the file cannot be written.
        """
        row_nD = np.ascontiguousarray(row_nD, np.float32)
        with os_errors_as(DataError, self._path, _ADVICE):
            if not self._done:
                self._size = row_nD.shape[1]
                # A full disk is reported now and not after hours; and a write to mapped memory would end the process.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self._file.fileno(), 0, self._count * self._size * row_nD.itemsize)
            self._file.write(row_nD.data)
            self._file.flush()
        self._done += len(row_nD)

    def array(self) -> np.ndarray:
        """Return all rows, (N, D), mapped into memory; changes of the array are not written.

        Raises:
            DataError: the file cannot be read.
        """
        with os_errors_as(DataError, self._path):
            return np.asarray(np.memmap(self._file, np.float32, "c", shape=(self._done, self._size)))
