"""10-fold accuracy of each group of a set by itself, with thresholds of its own: the protocol of RFW's tables."""

# P pairs   V groups   S subjects   R draws of subjects   F folds

from __future__ import annotations

import numpy as np

from facetrain.verify.fold_accuracy import FOLDS, FoldSearch, fold_order
from facetrain.verify.scored_pairs import ScoredPairs


class GroupFolds:
    """Search for the thresholds of the folds of each group, over all draws of subjects at once.

    The folds of a group are runs of its consecutive pairs, as in a set that has only this group. A draw is one of all
    subjects of the set, so that differences between the groups have intervals.
    """

    def __init__(self, pairs: ScoredPairs, group_P: np.ndarray, groups: int) -> None:
        """Sort the pairs of each group; `group_P`, int (P,), is its number from 0."""
        self._searches: list[FoldSearch | None] = []
        distance_P, sides = pairs.scale.distance(pairs.score_P), pairs.sides
        for group in range(groups):
            index = np.flatnonzero(group_P == group)
            same = pairs.same_P[index]
            if len(index) < FOLDS or same.all() or not same.any():
                self._searches.append(None)
                continue
            index = index[fold_order(same)]
            one_side, other_side = (side[index] for side in sides)
            self._searches.append(
                FoldSearch(distance_P[index], pairs.same_P[index], FOLDS, one_side, other_side)
            )

    def accuracy(self, drawn_RS: np.ndarray) -> np.ndarray:
        """Return the mean accuracy of the folds of each group in every draw: float64 (R, V).

        It is NaN for a group with fewer pairs than folds or without pairs of both kinds, and in a draw without its
        pairs.
        """
        means = []
        for search in self._searches:
            if search is None:
                means.append(np.full(len(drawn_RS), np.nan))
                continue
            accuracy_RF = search.accuracy(drawn_RS)[0]
            folds_R = np.isfinite(accuracy_RF).sum(1)
            total_R = np.nansum(accuracy_RF, axis=1)
            means.append(np.divide(total_R, folds_R, out=np.full(len(total_R), np.nan), where=folds_R > 0))
        return np.stack(means, axis=1)
