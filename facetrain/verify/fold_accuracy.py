"""The 10-fold accuracy that LFW-style numbers are published as."""

# P pairs   T thresholds   F folds   S subjects   R draws of them

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.verify.pair_blocks import PairBlocks, every_subject_once

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


@dataclass(frozen=True)
class GridRoc:
    """The curve that the published code draws: rates at each threshold of the grid, averaged over the folds."""

    threshold_T: np.ndarray
    """A pair is accepted if its squared distance is below this."""
    tpr_T: np.ndarray
    fpr_T: np.ndarray


class FoldSearch:
    """The search for each fold's threshold on the other folds, for all thresholds and many draws of subjects at once.

    A pair with squared distance d is accepted from the first threshold above d on. So the right decisions
    at all thresholds are one cumulative sum over the grid: it starts from the impostors of the fold, all
    rejected, and each cell of the grid adds its genuine pairs and takes its impostors away.

    Raises:
        ValueError: fewer pairs than folds.
    """

    def __init__(
        self,
        distance_P: np.ndarray,
        same_P: np.ndarray,
        folds: int,
        first_P: np.ndarray,
        second_P: np.ndarray,
    ) -> None:
        """Take the pairs, and the subject of either side."""
        if len(distance_P) < folds:
            raise ValueError(f"{len(distance_P)} pairs cannot be split into {folds} folds")
        fold_P = np.repeat(np.arange(folds), _fold_sizes(len(distance_P), folds))
        width = len(THRESHOLDS) + 1
        cell_P = fold_P * width + np.searchsorted(THRESHOLDS, distance_P, side="right")
        self._shape = (folds, width)
        self._genuine, self._impostors = (
            PairBlocks(cell_P[kind], folds * width, first_P[kind], second_P[kind])
            for kind in (same_P, ~same_P)
        )

    def accepted(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return how many genuine and impostor pairs lie below each threshold: (R, F, T + 1), the last all."""
        genuine, impostors = (
            np.cumsum(kind.sums(drawn_RS).reshape(-1, *self._shape), axis=2)
            for kind in (self._genuine, self._impostors)
        )
        return genuine, impostors

    def accuracy(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracy and the threshold of every fold in every draw: (R, F) each.

        The threshold is the first of the grid with the highest accuracy on the other folds. A fold of
        which nothing was drawn has accuracy NaN.
        """
        genuine, impostors = self.accepted(drawn_RS)
        right = (genuine + impostors[:, :, -1:] - impostors)[:, :, :-1]
        best = np.argmax(right.sum(1, keepdims=True) - right, axis=2)
        size = genuine[:, :, -1] + impostors[:, :, -1]
        hits = np.take_along_axis(right, best[:, :, None], axis=2)[:, :, 0]
        accuracy = np.divide(hits, size, out=np.full(size.shape, np.nan), where=size > 0)
        return accuracy, THRESHOLDS[best]


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
    whole = np.zeros(len(same_P), np.int64)
    accuracy, threshold = FoldSearch(distance_P, same_P, folds, whole, whole).accuracy(every_subject_once())
    return FoldAccuracy(accuracy[0], threshold[0])


def grid_roc(distance_P: np.ndarray, same_P: np.ndarray, *, folds: int = 10) -> GridRoc:
    """Return InsightFace's curve: a fold that has no pairs of a kind counts as 0, as there.

    Raises:
        ValueError: fewer pairs than folds.
    """
    whole = np.zeros(len(same_P), np.int64)
    accepted = FoldSearch(distance_P, same_P, folds, whole, whole).accepted(every_subject_once())
    tpr_T, fpr_T = ((kind / np.maximum(kind[:, :, -1:], 1))[0, :, :-1].mean(0) for kind in accepted)
    return GridRoc(THRESHOLDS, tpr_T, fpr_T)


def _fold_sizes(pairs: int, folds: int) -> np.ndarray:
    return np.full(folds, pairs // folds) + (np.arange(folds) < pairs % folds)
