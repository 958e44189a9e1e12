"""Scale of similarity scores: the cosines of facetrain's models, or the scores of another system."""

# P pairs   E edges

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_DISTANCES = 4.0
"""Largest squared distance of two unit vectors, which have cosine −1."""
_RANKS = 200
"""Ranks of the genuine scores, and of the impostor scores: between any two is one of the 400 thresholds."""


@dataclass(frozen=True)
class ScoreScale:
    """Range of scores, and their relation to the squared distances of the published threshold grid.

    The highest score is distance 0, the lowest is distance 4. For cosines this is the squared distance of unit
    vectors: |a − b|² = 2 − 2 cos(a, b).
    """

    low: float = -1.0
    high: float = 1.0
    name: str = "cosine similarity"
    """Name of the scores in figures and tables."""

    def distance(self, score: np.ndarray) -> np.ndarray:
        """Return the distance from 0 to 4 of each score."""
        return _DISTANCES * ((self.high - score) / (self.high - self.low))

    def score(self, distance: float) -> float:
        """Return the score of a distance."""
        return self.high - distance * ((self.high - self.low) / _DISTANCES)


@dataclass(frozen=True)
class RankScale(ScoreScale):
    """Scores of any distribution: some of them have equal steps of distance, the others that of the next lower one.

    With thresholds in equal steps of the scores, one outlier, or likelihood ratios in place of their logarithms, would
    leave all other scores between two thresholds.
    """

    edge_E: tuple[float, ...] = ()
    """The scores with equal steps, ascending from `low`."""

    def distance(self, score: np.ndarray) -> np.ndarray:
        """Return the distance from 0 to 4 of each score."""
        return self._distances()[np.searchsorted(self.edge_E, score, side="right") - 1]

    def score(self, distance: float) -> float:
        """Return the score of a distance."""
        return float(np.interp(distance, self._distances()[::-1], self.edge_E[::-1]))

    def _distances(self) -> np.ndarray:
        return np.linspace(_DISTANCES, 0, len(self.edge_E))


COSINE = ScoreScale()
"""Scale of cosine similarities."""
_LEAST_MATCH = 0.1
"""Lowest value that the highest cosine of a set has: cosines of one person reach it in every usable system."""
_ROUNDING = 1e-6
"""Distance by which float32 brings a cosine outside of [−1, 1]."""


def scale_of(score_P: np.ndarray, same_P: np.ndarray) -> ScoreScale:
    """Return the scale of finite similarity scores float (P,) of unknown origin; `same_P` is true for a genuine pair.

    Scores from −1 to 1 of which one is negative and one at least 0.1 are taken as cosines, all others get ranks.
    """
    if -1 - _ROUNDING <= score_P.min() < 0 and _LEAST_MATCH <= score_P.max() <= 1 + _ROUNDING:
        return COSINE
    genuine_P, impostor_P = score_P[same_P], score_P[~same_P]
    low, high = float(score_P.min()), float(score_P.max())
    if high == low:
        high = max(low + 1, float(np.nextafter(low, np.inf)))  # above 2^53, low + 1 is low
    if len(genuine_P) and len(impostor_P) and (lowest := float(genuine_P.min())) > impostor_P.max():
        # All thresholds in the gap are right. Those at ranks above it are right on nine folds too, and would refuse the
        # lowest genuine score if that is in the tenth.
        return RankScale(low, high, "score", (low, lowest))
    edge_E = np.union1d(_ranked(genuine_P), -_ranked(-impostor_P))
    return RankScale(low, high, "score", (low, *edge_E[1:-1].tolist(), high))


def _ranked(score_P: np.ndarray) -> np.ndarray:
    """Return at most `_RANKS` of the different scores, from the lowest to the highest; none of no scores.

    Their ranks grow by a factor, because a system makes few errors: at any threshold, the next one changes the number
    of errors by a few percent.
    """
    distinct = np.unique(score_P)
    if not len(distinct):
        return distinct
    return distinct[np.geomspace(1, len(distinct), _RANKS).astype(int) - 1]
