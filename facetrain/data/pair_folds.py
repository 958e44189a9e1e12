"""The ten folds of a set of pairs: runs of consecutive pairs, as in the published lists."""

# P pairs

from __future__ import annotations

import numpy as np

FOLDS = 10


def has_mixed_folds(same_P: np.ndarray) -> bool:
    """Return whether every run of consecutive pairs that is a fold has genuine and impostor pairs."""
    return all(part.any() and not part.all() for part in np.array_split(same_P, min(FOLDS, len(same_P))))


def fold_order(same_P: np.ndarray) -> np.ndarray:
    """Return the order of the pairs whose consecutive runs are the folds, int (P,).

    It is the given order, as in the published lists, unless the pairs are sorted by kind: then fold i gets the i-th
    tenth of the genuine and the i-th tenth of the impostor pairs. The threshold of a fold would otherwise come from
    folds that have none of its kind, which can halve the accuracy.
    """
    genuine = int(same_P.sum())
    too_few = min(genuine, len(same_P) - genuine) < FOLDS
    # A list of two published folds already changes its kind three times.
    is_sorted = np.count_nonzero(np.diff(same_P)) < 3
    if too_few or not is_sorted or has_mixed_folds(same_P):
        return np.arange(len(same_P))
    from sklearn.model_selection import StratifiedKFold  # its import would delay the start of every run

    return np.concatenate([fold for _, fold in StratifiedKFold(FOLDS).split(same_P, same_P)])
