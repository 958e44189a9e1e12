"""Memory that several processes see, and the page-locked view of it that a GPU copies from."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np


class SharedBytes:
    """A stretch of memory that travels to child processes as a file without a name.

    Not POSIX shared memory: that counts against /dev/shm, of which a container has 64 MiB, and stays
    behind when a process is killed.
    """

    def __init__(self, size: int, file: int | None = None) -> None:
        if file is None:
            file = _nameless_file()
            os.ftruncate(file, size)
        self._file = file
        self._size = size
        self._map = mmap.mmap(file, size)

    def array(self, shape: tuple[int, ...], dtype: type[np.generic], offset: int = 0) -> np.ndarray:
        """Look at part of it as an array; it lives as long as the array does."""
        return np.ndarray(shape, dtype, self._map, offset)

    def __reduce__(self) -> tuple[Callable[..., SharedBytes], tuple[Any, int]]:
        """Hand the file to a process that is being started."""
        return _attach, (reduction.DupFd(self._file), self._size)

    def __del__(self) -> None:
        """Close the file; the memory goes when the last array does."""
        if hasattr(self, "_file"):
            os.close(self._file)


def _attach(handle: Any, size: int) -> SharedBytes:
    return SharedBytes(size, handle.detach())


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("facetrain-batches")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
