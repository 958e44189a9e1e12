"""Array in memory that a process shares with those that it starts. Imports no torch."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np


class SharedArray:
    """Array of numbers in an anonymous file, which a started process inherits as a file descriptor.

    Among the arguments of a process that is being started, pickling sends the memory itself; elsewhere, a copy.
    Not `multiprocessing.shared_memory`: that is limited by /dev/shm (64 MiB in a container by default), and its
    segments remain after a process is killed.

    Attributes:
        array: the numbers; 0 at first.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, file: int | None = None) -> None:
        size = max(np.dtype(dtype).itemsize * math.prod(shape), 1)  # no bytes cannot be mapped
        if file is None:
            file = os.memfd_create("facetrain-array")
            os.ftruncate(file, size)
        self._file = file
        memory = mmap.mmap(file, size)  # the array keeps it alive
        self.array: np.ndarray = np.ndarray(shape, dtype, memory)

    @classmethod
    def of(cls, numbers: np.ndarray, dtype: str) -> SharedArray:
        """Return a shared copy of numbers, all of which the type can hold."""
        shared = cls(numbers.shape, dtype)
        shared.array[...] = numbers
        return shared

    def __reduce__(self) -> tuple[Callable[..., SharedArray], tuple[Any, ...]]:
        """Pickle as a duplicate of the file descriptor, or as the numbers if no process is being started."""
        dtype = self.array.dtype.str
        if get_spawning_popen() is None:
            return SharedArray.of, (np.array(self.array), dtype)
        return _attach, (self.array.shape, dtype, reduction.DupFd(self._file))

    def __del__(self) -> None:
        """Close the file; the memory is freed with the last array."""
        if hasattr(self, "_file"):
            os.close(self._file)


def _attach(shape: tuple[int, ...], dtype: str, handle: Any) -> SharedArray:
    return SharedArray(shape, dtype, handle.detach())
