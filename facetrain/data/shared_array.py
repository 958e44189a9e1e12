"""Files and arrays in memory that a process shares with those that it starts. Imports no torch."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.context import get_spawning_popen
from typing import Any

import numpy as np

from facetrain.errors import RunError
from facetrain.files import error_as

_LIMIT_ADVICE = {
    errno.EFBIG: "raise the limit of the size of files, which counts for this memory, too (ulimit -f)"
}


class SharedFile:
    """Open file, which a process that is being started gets as well, whatever has become of its path.

    It can be pickled only among the arguments of such a process.

    Attributes:
        descriptor: the open file; closed with this object.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[..., SharedFile], tuple[Any, ...]]:
        """Pickle as a duplicate of the file descriptor."""
        return _received, (reduction.DupFd(self.descriptor),)

    def __del__(self) -> None:
        """Close the file; its memory stays mapped."""
        os.close(self.descriptor)


def _received(handle: Any) -> SharedFile:
    return SharedFile(handle.detach())


class SharedArray:
    """Array of numbers in an anonymous file, which a started process inherits as a file descriptor.

    Among the arguments of a process that is being started, pickling sends the memory itself; elsewhere, a copy.
    Not `multiprocessing.shared_memory`: that is limited by /dev/shm (64 MiB in a container by default), and its
    segments remain after a process is killed.

    Attributes:
        array: the numbers; 0 at first.

    Raises:
        RunError: the system refuses the memory.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, file: SharedFile | None = None) -> None:
        size = max(np.dtype(dtype).itemsize * math.prod(shape), 1)  # no bytes cannot be mapped
        try:
            if file is None:
                file = SharedFile(os.memfd_create("facetrain-array"))
                os.ftruncate(file.descriptor, size)
            memory = mmap.mmap(file.descriptor, size)  # the array keeps it alive
        except OSError as error:
            place = f"{size / 1e6:,.1f} MB of memory for the processes that read images"
            raise error_as(RunError, place, error, _LIMIT_ADVICE.get(error.errno or 0, "")) from error
        self._file = file
        self.array: np.ndarray = np.ndarray(shape, dtype, memory)

    @classmethod
    def of(cls, numbers: np.ndarray, dtype: str) -> SharedArray:
        """Return a shared copy of numbers, all of which the type can hold."""
        shared = cls(numbers.shape, dtype)
        shared.array[...] = numbers
        return shared

    def __reduce__(self) -> tuple[Callable[..., SharedArray], tuple[Any, ...]]:
        """Pickle as the file, or as the numbers if no process is being started."""
        dtype = self.array.dtype.str
        if get_spawning_popen() is None:
            return SharedArray.of, (np.array(self.array), dtype)
        return SharedArray, (self.array.shape, dtype, self._file)
