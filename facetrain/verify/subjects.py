"""Who is in which image, as far as a list of pairs tells."""

# N things that are compared (images, templates)   P pairs

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np


def connected_subjects(
    first_P: np.ndarray, second_P: np.ndarray, same_P: np.ndarray, count: int
) -> np.ndarray:
    """Return whose each of `count` things is, by a number from 0 without gaps: int (N,).

    Two things are of one subject if a chain of genuine pairs leads from one to the other. A subject whose
    images no genuine pair connects counts as several; nobody is taken for another.
    """
    first, second = first_P[same_P], second_P[same_P]
    lowest_N, before_N = np.arange(count), np.full(count, -1)
    # Each thing learns the lowest number in its chain: from its pairs, and from the thing of the number it has.
    while not np.array_equal(lowest_N, before_N):
        before_N = lowest_N.copy()
        lower = np.minimum(lowest_N[first], lowest_N[second])
        for side in (first, second):
            np.minimum.at(lowest_N, lowest_N[side], lower)
            np.minimum.at(lowest_N, side, lower)
        lowest_N = lowest_N[lowest_N]
    return np.unique(lowest_N, return_inverse=True)[1].astype(np.int64)


def dense_ids(things: Sequence[Hashable]) -> np.ndarray:
    """Return a number for each thing, the same for equal ones: int (N,), in the order of first appearance."""
    seen: dict[Hashable, int] = {}
    return np.array([seen.setdefault(thing, len(seen)) for thing in things], dtype=np.int64)
