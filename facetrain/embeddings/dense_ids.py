"""Numbering of equal keys, and the different ones of many images."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence

import numpy as np


def dense_ids(keys: Sequence[Hashable]) -> np.ndarray:
    """Return an id for each key, equal for equal keys, from 0 in order of first appearance: int64 (N,)."""
    seen: dict[Hashable, int] = {}
    return np.fromiter((seen.setdefault(key, len(seen)) for key in keys), np.int64, len(keys))


def different_images(images: Iterable[bytes]) -> np.ndarray:
    """Return the numbers of the images without the copies of earlier ones, byte for byte: int64 (N,), ascending."""
    digests = [hashlib.sha256(image).digest() for image in images]
    return np.sort(np.unique(digests, return_index=True)[1])
