"""Arrays in `.npy` files of NumPy, read without pickle."""

from __future__ import annotations

import os
import tokenize
from pathlib import Path

import numpy as np

from facetrain.files import open_regular

_DAMAGE = (
    *(TypeError, OverflowError, FloatingPointError, RecursionError, MemoryError),
    *(SyntaxError, tokenize.TokenError),  # NumPy parses the header as Python
)


def map_npy(path: Path) -> np.ndarray:
    """Map an array into memory. NumPy compares the size that the header claims with the file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: it is no array, or an array of objects.
    """
    os.close(open_regular(path))  # NumPy would wait for the writer of a pipe
    try:
        with np.errstate(over="raise"):  # the product of the sides that a damaged header claims
            return np.lib.format.open_memmap(path, "r")
    except _DAMAGE as error:
        raise ValueError(str(error) or type(error).__name__) from error
