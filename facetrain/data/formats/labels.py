"""Labels from the names of identities, and the first image of each label."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


def label_of_each(identities: Iterable[int | str]) -> dict[int | str, int]:
    """Return the label of each identity: the number itself if all are numbers, otherwise the rank in sorted order."""
    distinct = set(identities)
    if all(isinstance(identity, int) for identity in distinct):
        return {identity: int(identity) for identity in distinct}
    return {identity: label for label, identity in enumerate(sorted(distinct, key=str))}


def first_images(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the index of the first image of each label, int64 (num_classes,); -1 for a label without images."""
    first = np.full(num_classes, -1, np.int64)
    # Of several assignments to one element, the last one counts.
    first[labels[::-1]] = np.arange(len(labels) - 1, -1, -1)
    return first
