"""Subject ids of images or templates, derived from genuine pairs."""

# N items that are compared (images or templates)   P pairs

from __future__ import annotations

import numpy as np


def connected_subjects(
    first_P: np.ndarray, second_P: np.ndarray, same_P: np.ndarray, count: int
) -> np.ndarray:
    """Return the subject id of each of `count` items, from 0 without gaps: int64 (N,).

    Subjects are the connected components of the graph of genuine pairs (`same_P`). A person whose images
    no chain of genuine pairs connects counts as several subjects; two people are never merged.
    """
    # By hand: training verifies too, and the import of scipy's graphs would delay its start.
    first, second = first_P[same_P], second_P[same_P]
    lowest_N, before_N = np.arange(count), np.full(count, -1)
    # Label propagation with pointer jumping: each item points to one of its component, and the one that it points to
    # takes the lowest id among its pairs. A chain of n items takes about log2(n) passes instead of n.
    while not np.array_equal(lowest_N, before_N):
        before_N = lowest_N.copy()
        lower = np.minimum(lowest_N[first], lowest_N[second])
        for side in (first, second):
            np.minimum.at(lowest_N, lowest_N[side], lower)
        lowest_N = lowest_N[lowest_N]
    return np.unique(lowest_N, return_inverse=True)[1].astype(np.int64)
