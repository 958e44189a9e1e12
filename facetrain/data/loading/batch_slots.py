"""Shared memory that the reading processes fill with batches. Imports no torch."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np


class BatchSlots:
    """Buffers of the batches that are read ahead, in shared memory; one slot holds this rank's images of one step.

    An anonymous file, which child processes inherit as a file descriptor: pickling sends the memory itself, not a copy.
    Not `multiprocessing.shared_memory`: that is limited by /dev/shm (64 MiB in a container by default), and its
    segments remain after a process is killed.
    """

    index: np.ndarray
    """Dataset index of each image, int64 (slots, rows)."""
    image: np.ndarray
    """Pixels, uint8 (slots, rows, image_size, image_size, 3)."""

    def __init__(self, slots: int, rows: int, image_size: int, file: int | None = None) -> None:
        shape = slots, rows, image_size, image_size, 3
        # An int64 for each image, then the pixels.
        index_bytes = 8 * slots * rows
        size = index_bytes + math.prod(shape)
        if file is None:
            file = os.memfd_create("facetrain-batches")
            os.ftruncate(file, size)
        self._file = file
        memory = mmap.mmap(file, size)  # the arrays keep it alive
        self.index = np.ndarray((slots, rows), np.int64, memory)
        self.image = np.ndarray(shape, np.uint8, memory, offset=index_bytes)

    def __reduce__(self) -> tuple[Callable[..., BatchSlots], tuple[Any, ...]]:
        """Pickle as a duplicate of the file descriptor, for a process that is being started."""
        return _attach, (reduction.DupFd(self._file), *self.image.shape[:3])

    def __del__(self) -> None:
        """Close the file; the memory is freed with the last array."""
        if hasattr(self, "_file"):
            os.close(self._file)


def _attach(handle: Any, slots: int, rows: int, image_size: int) -> BatchSlots:
    return BatchSlots(slots, rows, image_size, handle.detach())
