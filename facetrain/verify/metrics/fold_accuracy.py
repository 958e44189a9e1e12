"""10-fold accuracy, the metric of LFW, CFP, AgeDB, CALFW and CPLFW.

The protocol is the unrestricted setting of Huang et al., "Labeled Faces in the Wild", 2007: each fold is
scored at the threshold that is best on the other nine. The threshold grid and the split into folds are those
of InsightFace's `verification.py`, which the published numbers come from.
"""

# P pairs   T thresholds   F folds   S subjects   R draws of subjects

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.pair_folds import FOLDS
from facetrain.embeddings.normalization import l2_normalize
from facetrain.verify.metrics.bootstrap import share
from facetrain.verify.metrics.pair_blocks import PairBlocks, every_subject_once
from facetrain.verify.metrics.roc import require_pairs

THRESHOLDS = np.arange(0, 4, 0.01)
"""InsightFace's grid of thresholds on the squared distance of unit embeddings, which is in [0, 4]."""
_PAIRS_PER_BLOCK = 512
"""Pairs whose distances are computed at a time: the copies of their embeddings in float64 fit into the CPU's cache."""


@dataclass(frozen=True)
class FoldAccuracy:
    """Accuracy and threshold of each fold; the threshold is the best one on the other folds."""

    accuracy_F: np.ndarray
    """Share of correct decisions, float64 (F,)."""
    threshold_F: np.ndarray
    """Squared distance, float64 (F,)."""

    @property
    def mean(self) -> float:
        """Mean accuracy of the folds: the published number."""
        return float(self.accuracy_F.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the accuracy over the folds, with divisor F as in the published code."""
        return float(self.accuracy_F.std())


@dataclass(frozen=True)
class GridRoc:
    """ROC as InsightFace computes it: rates at each threshold of the grid, averaged over the folds."""

    threshold_T: np.ndarray
    """Squared distances. A pair is accepted if its squared distance is below the threshold."""
    tpr_T: np.ndarray
    """True accept rate, float64 (T,)."""
    fpr_T: np.ndarray
    """False accept rate, float64 (T,)."""


class FoldSearch:
    """Search for the best threshold of each fold, over all thresholds and many draws of subjects at once.

    A pair with squared distance d is accepted from the first threshold above d. The number of correct
    decisions at all thresholds is therefore a cumulative sum over the grid: it begins with the impostor pairs
    of the fold, all rejected; each step adds the genuine pairs and subtracts the impostor pairs that the next
    threshold accepts. The published code repeats a pass over all pairs for every threshold and fold.

    Raises:
        ValueError: there are fewer pairs than folds.
    """

    def __init__(
        self,
        distance_P: np.ndarray,
        same_P: np.ndarray,
        folds: int,
        first_P: np.ndarray,
        second_P: np.ndarray,
    ) -> None:
        """Sort squared distances float (P,), labels bool (P,) and the subject ids of both sides, int (P,)."""
        if len(distance_P) < folds:
            raise ValueError(f"{len(distance_P)} pairs cannot be split into {folds} folds")
        fold_P = np.repeat(np.arange(folds), [len(part) for part in np.array_split(distance_P, folds)])
        width = len(THRESHOLDS) + 1
        # side="right": a pair whose distance equals a threshold is rejected there, as in the published code.
        block_P = fold_P * width + np.searchsorted(THRESHOLDS, distance_P, side="right")
        self._shape = (folds, width)
        self._genuine, self._impostors = (
            PairBlocks(block_P[kind], folds * width, first_P[kind], second_P[kind])
            for kind in (same_P, ~same_P)
        )

    def accepted(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of accepted genuine and impostor pairs at each threshold, (R, F, T + 1) each.

        The last entry is the number of all pairs of the fold.
        """
        genuine, impostors = (
            np.cumsum(kind.counts(drawn_RS).reshape(-1, *self._shape), axis=2)
            for kind in (self._genuine, self._impostors)
        )
        return genuine, impostors

    def accuracy(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the accuracy and the threshold of every fold in every draw: float64 (R, F) each.

        The threshold is the first of the grid with the highest accuracy on the other folds. The accuracy is
        NaN for a fold without pairs in the draw.
        """
        genuine, impostors = self.accepted(drawn_RS)
        correct = (genuine + impostors[:, :, -1:] - impostors)[:, :, :-1]
        # All folds without one fold are the training set of that fold. argmax takes the first of equal counts, as the
        # published code does.
        best = np.argmax(correct.sum(1, keepdims=True) - correct, axis=2)
        size = genuine[:, :, -1] + impostors[:, :, -1]
        hits = np.take_along_axis(correct, best[:, :, None], axis=2)[:, :, 0]
        return share(hits, size), THRESHOLDS[best]


def mean_over_folds(accuracy_RF: np.ndarray) -> np.ndarray:
    """Return the mean accuracy of the folds with pairs in each draw: float64 (R,), NaN for a draw without pairs."""
    folds_R = np.isfinite(accuracy_RF).sum(1)
    total_R = np.nansum(accuracy_RF, axis=1)
    return share(total_R, folds_R)


def squared_distances(embedding: np.ndarray) -> np.ndarray:
    """Return the squared Euclidean distance of rows 2i and 2i+1 after L2 normalization: (2P, D) -> float64 (P,).

    Raises:
        ValueError: the rows are no pairs.
    """
    if embedding.ndim != 2 or len(embedding) % 2:
        raise ValueError(f"embeddings of shape {embedding.shape}; give two rows for each pair, (2P, D)")
    distance_P = np.empty(len(embedding) // 2)
    for begin in range(0, len(distance_P), _PAIRS_PER_BLOCK):
        block = slice(begin, begin + _PAIRS_PER_BLOCK)
        unit = l2_normalize(embedding[2 * block.start : 2 * block.stop].astype(np.float64))
        distance_P[block] = np.square(unit[0::2] - unit[1::2]).sum(1)
    return distance_P


def fold_accuracy(distance_P: np.ndarray, same_P: np.ndarray) -> FoldAccuracy:
    """Return the accuracy of ten consecutive folds for squared distances float (P,) and labels bool (P,).

    Raises:
        ValueError: there are fewer pairs than folds, or see `require_pairs`.
    """
    accuracy, threshold = _search(distance_P, same_P, FOLDS).accuracy(every_subject_once())
    return FoldAccuracy(accuracy[0], threshold[0])


def grid_roc(distance_P: np.ndarray, same_P: np.ndarray, *, folds: int = FOLDS) -> GridRoc:
    """Return InsightFace's ROC on the grid. A fold without genuine, or impostor, pairs counts as rate 0, as there.

    Raises:
        ValueError: there are fewer pairs than folds, or see `require_pairs`.
    """
    accepted = _search(distance_P, same_P, folds).accepted(every_subject_once())
    tpr_T, fpr_T = ((kind / np.maximum(kind[:, :, -1:], 1))[0, :, :-1].mean(0) for kind in accepted)
    return GridRoc(THRESHOLDS, tpr_T, fpr_T)


def _search(distance_P: np.ndarray, same_P: np.ndarray, folds: int) -> FoldSearch:
    """Return the search for one draw, in which all pairs count once, as if they were of one subject."""
    require_pairs(distance_P, same_P)
    subject_P = np.zeros(len(same_P), np.int64)
    return FoldSearch(distance_P, same_P, folds, subject_P, subject_P)
