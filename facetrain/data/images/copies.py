"""Copies among images, which are equal byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np


def different_images(images: Iterable[bytes], label_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the images without copies, and of those that have copies with other labels.

    Of equal images with one label the first one stays. Of those with several labels none does, because the right label
    is unknown. Both are int64 and ascending; `label_N` is int (N,).
    """
    digests = [hashlib.sha256(image).digest() for image in images]
    _, first, group_N = np.unique(digests, return_index=True, return_inverse=True)
    is_disputed = np.zeros(len(first), bool)
    is_disputed[group_N[label_N != label_N[first[group_N]]]] = True
    return np.sort(first[~is_disputed]), np.flatnonzero(is_disputed[group_N])
