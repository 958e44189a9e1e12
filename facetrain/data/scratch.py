"""Memory that the system may put aside on a disk."""

from __future__ import annotations

import os
import tempfile

import numpy as np

from facetrain.errors import DataError


def scratch_array(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Return an array of zeros in a file without a name, in TMPDIR; it is gone with the last reference.

    Raises:
        DataError: there is no room for it.
    """
    array = np.empty((0,), dtype)
    size = int(np.prod(shape)) * array.itemsize
    try:
        with tempfile.TemporaryFile() as file:
            if hasattr(os, "posix_fallocate"):
                # Asked for now: memory mapped from a full disk ends the process when it is written.
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            return np.asarray(np.memmap(file, dtype, "w+", shape=shape))
    except OSError as error:
        raise DataError(
            f"{tempfile.gettempdir()}: no room for {size:,} bytes of scratch ({error.strerror or error}); "
            "free some, or set TMPDIR to a folder on another disk"
        ) from error
