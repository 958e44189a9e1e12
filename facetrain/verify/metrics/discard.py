"""Error-versus-discard curve: what a quality measure of the images is worth.

If the images with the lowest quality are discarded, fewer genuine pairs are rejected. A useful measure makes the false
non-match rate fall quickly (Grother and Tabassi, "Performance of biometric quality measures", TPAMI 2007; ISO/IEC
29794-1:2024, error versus discard characteristic).
"""

# P pairs   G genuine pairs   V points of the curve

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LARGEST_SHARE = 0.5
"""Share of discarded pairs at the end of the area: beyond it, a system would refuse most of its users."""
_POINTS = 101
"""Points of the curve in the JSON."""


@dataclass(frozen=True)
class DiscardCurve:
    """False non-match rate at one threshold, without the genuine pairs of the lowest quality."""

    quality: str
    """Name of the quality measure."""
    share: np.ndarray
    """Share of the genuine pairs that is discarded, ascending from 0, float64 (V,)."""
    fnmr: np.ndarray
    """False non-match rate of the other genuine pairs, float64 (V,)."""
    min_quality: np.ndarray
    """Lowest quality of the other genuine pairs: the limit that discards this share, float (V,)."""
    rejected: int
    """Number of rejected genuine pairs, before any is discarded: the errors that the curve rests on."""

    @property
    def area_ratio(self) -> float | None:
        """Area under the curve up to `LARGEST_SHARE`, divided by the area of random discarding; None without errors.

        Random discarding does not change the rate, so the ratio is 1; a smaller value is better.
        """
        if not self.fnmr[0]:
            return None
        share = np.minimum(self.share, LARGEST_SHARE)
        # The rate holds from one point to the next, where the next pairs are discarded.
        area = float((np.diff(np.append(share, LARGEST_SHARE)) * self.fnmr).sum())
        return area / (LARGEST_SHARE * float(self.fnmr[0]))

    def as_json(self) -> dict[str, Any]:
        """Return the ratio and at most 101 points."""
        kept = np.unique(np.searchsorted(self.share, np.linspace(0, self.share[-1], _POINTS)))
        return {
            "quality": self.quality,
            "area_ratio": self.area_ratio,
            "rejected": self.rejected,
            "share": self.share[kept].tolist(),
            "fnmr": self.fnmr[kept].tolist(),
            "min_quality": self.min_quality[kept].tolist(),
        }


def discard_curve(
    score_P: np.ndarray, same_P: np.ndarray, quality_P: np.ndarray, threshold: float, *, quality: str
) -> DiscardCurve | None:
    """Return the curve of the genuine pairs; None if there are none.

    Args:
        score_P: similarity scores, float (P,).
        same_P: True for a genuine pair, bool (P,).
        quality_P: quality of each pair, float (P,): the quality of its worse image.
        threshold: score from which pairs are accepted. It stays the same for all shares.
        quality: name of the measure.
    """
    rejected_G = (score_P < threshold)[same_P]
    quality_G = quality_P[same_P]
    if not len(rejected_G):
        return None
    order = np.argsort(quality_G, kind="stable")
    # Pairs of one quality are discarded together: the curve has a point before each distinct quality.
    quality_G = quality_G[order]
    first = np.flatnonzero(np.diff(quality_G, prepend=-np.inf))
    left = len(order) - first
    rejected = int(rejected_G.sum())
    rejected_left = rejected - np.concatenate([[0], np.cumsum(rejected_G[order])])[first]
    return DiscardCurve(quality, first / len(order), rejected_left / left, quality_G[first], rejected)
