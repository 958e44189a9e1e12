"""The 10-fold accuracy that LFW-style numbers are published as."""

# P pairs   T thresholds   F folds

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

THRESHOLDS = np.arange(0, 4, 0.01)
"""The grid of the published numbers, on squared distances of unit embeddings, which lie in [0, 4]."""


@dataclass(frozen=True)
class FoldAccuracy:
    """Accuracy of each fold at the threshold that was best on the others."""

    accuracy_F: np.ndarray
    threshold_F: np.ndarray

    @property
    def mean(self) -> float:
        """The number that is published."""
        return float(self.accuracy_F.mean())

    @property
    def std(self) -> float:
        """Its spread over the folds."""
        return float(self.accuracy_F.std())


def squared_distances(embedding: np.ndarray) -> np.ndarray:
    """Return the squared distance of rows 2i and 2i+1 after bringing all to length 1: (2P, D) -> (P,)."""
    unit = embedding / np.maximum(np.linalg.norm(embedding, axis=1, keepdims=True), 1e-12)
    return np.square(unit[0::2] - unit[1::2]).sum(1)


def fold_accuracy(distance_P: np.ndarray, same_P: np.ndarray, *, folds: int = 10) -> FoldAccuracy:
    """Score pairs by the protocol of LFW's unrestricted setting, as InsightFace computes it.

    The pairs are split into consecutive folds. A pair counts as of one person if its distance is
    below the threshold, which is the first of the grid with the highest accuracy on the other folds.

    Raises:
        ValueError: fewer pairs than folds.
    """
    if len(distance_P) < folds:
        raise ValueError(f"{len(distance_P)} pairs cannot be split into {folds} folds")
    fold_P = np.repeat(np.arange(folds), _fold_sizes(len(distance_P), folds))
    # Right decisions per fold and threshold: with the distances of each fold sorted, the pairs below
    # all thresholds are counted at once, instead of comparing every pair with every threshold.
    right_FT = np.stack(
        [_right_decisions(distance_P[fold_P == fold], same_P[fold_P == fold]) for fold in range(folds)]
    )
    others_FT = right_FT.sum(0) - right_FT
    size_F = np.bincount(fold_P)
    # As shares, not counts: the peer compares shares, and of equal ones takes the first.
    best_F = np.argmax(others_FT / (len(distance_P) - size_F)[:, None], axis=1)
    accuracy_F = right_FT[np.arange(folds), best_F] / size_F
    return FoldAccuracy(accuracy_F, THRESHOLDS[best_F])


def _fold_sizes(pairs: int, folds: int) -> np.ndarray:
    return np.full(folds, pairs // folds) + (np.arange(folds) < pairs % folds)


def _right_decisions(distance_P: np.ndarray, same_P: np.ndarray) -> np.ndarray:
    genuine, impostor = np.sort(distance_P[same_P]), np.sort(distance_P[~same_P])
    accepted_T = np.searchsorted(genuine, THRESHOLDS, side="left")
    rejected_T = len(impostor) - np.searchsorted(impostor, THRESHOLDS, side="left")
    return accepted_T + rejected_T
