"""Scale of similarity scores: the cosines of facetrain's models, or the scores of another system."""

# P pairs

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_DISTANCES = 4.0
"""Largest squared distance of two unit vectors, which have cosine −1."""


@dataclass(frozen=True)
class ScoreScale:
    """Range of scores, and its linear relation to the squared distances of the published threshold grid.

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

    def score(self, distance: Any) -> Any:
        """Return the score of a distance, float, or of each of several, float (…)."""
        return self.high - distance * ((self.high - self.low) / _DISTANCES)


COSINE = ScoreScale()
"""Scale of cosine similarities."""
_LEAST_MATCH = 0.1
"""Lowest value that the highest cosine of a set has: cosines of one person reach it in every usable system."""


def scale_of(score_P: np.ndarray) -> ScoreScale:
    """Return the scale of finite similarity scores float (P,) of unknown origin.

    Scores from −1 to 1 of which one is negative and one at least 0.1 are taken as cosines, all others get their range.
    """
    if -1 <= score_P.min() < 0 and _LEAST_MATCH <= score_P.max() <= 1:
        return COSINE
    return _range_scale(score_P)


def _range_scale(score_P: np.ndarray) -> ScoreScale:
    """Return the scale from the lowest to the highest score, so that the 400 thresholds have equal steps there."""
    low, high = float(score_P.min()), float(score_P.max())
    if high == low:
        high = max(low + 1, float(np.nextafter(low, np.inf)))  # above 2^53, low + 1 is low
    return ScoreScale(low, high, "score")
