"""Shared memory that the reading processes fill with batches. Imports no torch."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np


class SharedMemory:
    """Anonymous file mapping that child processes inherit as a file descriptor.

    Not `multiprocessing.shared_memory`: that is limited by /dev/shm (64 MiB in a container by default),
    and its segments remain after a process is killed.
    """

    def __init__(self, size: int, file: int | None = None) -> None:
        if file is None:
            file = os.memfd_create("facetrain-batches")
            os.ftruncate(file, size)
        self._file = file
        self._size = size
        self._map = mmap.mmap(file, size)

    def array(self, shape: tuple[int, ...], dtype: type[np.generic], offset: int = 0) -> np.ndarray:
        """Return a view of the memory from a byte offset on; it keeps the mapping alive."""
        return np.ndarray(shape, dtype, self._map, offset)

    def __reduce__(self) -> tuple[Callable[..., SharedMemory], tuple[Any, int]]:
        """Pickle as a duplicate of the file descriptor, for a process that is being started."""
        return _attach, (reduction.DupFd(self._file), self._size)

    def __del__(self) -> None:
        """Close the file; the memory is freed with the last view."""
        if hasattr(self, "_file"):
            os.close(self._file)


def _attach(handle: Any, size: int) -> SharedMemory:
    return SharedMemory(size, handle.detach())


class BatchSlots:
    """Buffers of the batches that are read ahead, in shared memory; one slot holds this rank's images of one step.

    Pickling sends the shared memory itself, not a copy.
    """

    index: np.ndarray
    """Dataset index of each image, int64 (slots, rows)."""
    image: np.ndarray
    """Pixels, uint8 (slots, rows, image_size, image_size, 3)."""

    def __init__(self, slots: int, rows: int, image_size: int) -> None:
        self._shape = (slots, rows, image_size, image_size, 3)
        # An int64 for each image, then the pixels.
        self._memory = SharedMemory(8 * slots * rows + math.prod(self._shape))
        self._map_arrays()

    def _map_arrays(self) -> None:
        slots, rows = self._shape[:2]
        self.index = self._memory.array((slots, rows), np.int64)
        self.image = self._memory.array(self._shape, np.uint8, offset=8 * slots * rows)

    def __getstate__(self) -> tuple[tuple[int, ...], SharedMemory]:
        """Return the shape and the shared memory."""
        return self._shape, self._memory

    def __setstate__(self, state: tuple[tuple[int, int, int, int, int], SharedMemory]) -> None:
        """Map the same memory in another process."""
        self._shape, self._memory = state
        self._map_arrays()
