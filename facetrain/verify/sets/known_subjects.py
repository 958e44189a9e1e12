"""Subjects of published sets of pairs, whose `.bin` files do not name the people.

The table `known_subjects.npz` beside this module has two arrays for each set, `NAME_image` and `NAME_subject`: the
number of the image and of the person at each place of the published list of pairs. `scripts/known_subjects` makes it
from the lists; docs/evaluation.md names the sets.
"""

# N images, two per pair   P pairs

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from facetrain.distinct import dense_ids

TABLE = Path(__file__).with_name("known_subjects.npz")
_MIN_DISTINCT = 0.98
"""Least share of the images of a list that are different files. CFP has 27 files twice under one person."""


def known_subjects(images: Sequence[bytes], same_P: np.ndarray) -> np.ndarray | None:
    """Return the subject id of each image of a published set, int64 (N,) from 0 without gaps; None for other sets.

    A set is recognized by its labels and by its repeated images, whatever the alignment and the encoding: LFW's list
    has 12,000 places for 7,701 images, and equal bytes must be at the same places. No other set has both. A set whose
    labels or repetitions differ in one place, or with two people on images of equal bytes, is not recognized.
    """
    for image_N, subject_N in _tables():
        if np.array_equal(subject_N[0::2] == subject_N[1::2], same_P):
            # Hashing the images is the slow part: only for a set with the labels of the list.
            bytes_N = dense_ids(images)
            if (
                _is_function(image_N, bytes_N)
                and _is_function(bytes_N, subject_N)
                and bytes_N.max() + 1 >= _MIN_DISTINCT * (image_N.max() + 1)
            ):
                return subject_N
    return None


def _is_function(key_N: np.ndarray, value_N: np.ndarray) -> bool:
    """Return whether equal keys have equal values."""
    _, first, inverse = np.unique(key_N, return_index=True, return_inverse=True)
    return np.array_equal(value_N[first][inverse], value_N)


@cache
def _tables() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return image and subject of each place of each published list, int64 (N,) from 0 without gaps."""
    with np.load(TABLE, allow_pickle=False) as table:
        names = [name.removesuffix("_image") for name in table.files if name.endswith("_image")]
        return [
            (table[f"{name}_image"].astype(np.int64), table[f"{name}_subject"].astype(np.int64))
            for name in names
        ]
