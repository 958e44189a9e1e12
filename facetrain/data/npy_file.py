"""Arrays in `.npy` files of NumPy, read without pickle."""

from __future__ import annotations

import tokenize
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

_DAMAGE = (EOFError, TypeError, OverflowError, FloatingPointError, RecursionError, MemoryError, BadZipFile)
_NOT_PYTHON = (SyntaxError, tokenize.TokenError)
"""NumPy parses the header as Python."""


def map_npy(path: Path) -> np.ndarray:
    """Map an array into memory. NumPy compares the size that the header claims with that of the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no array, or an array of objects.
    """
    try:
        with np.errstate(over="raise"):  # the product of the sides that a damaged header claims
            array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (*_DAMAGE, *_NOT_PYTHON) as error:
        raise ValueError(str(error) or type(error).__name__) from error
    if not isinstance(array, np.ndarray):
        array.close()
        raise ValueError("an archive of arrays")
    return array
