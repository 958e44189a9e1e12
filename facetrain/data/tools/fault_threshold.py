"""Threshold for wrong labels, calibrated on the dataset by planting faults in its embeddings."""

# N images

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PRECISION = 0.95
"""Share of true faults among the reported ones that a threshold aims at."""
MIN_IMAGES = 20
"""Images that a threshold is calibrated on, at least; with fewer, nothing is reported."""
_LARGEST_SHARE = 0.25
"""Share of the images that is reported, at most: with more faults, labels and model disagree in general."""
_STEP = 0.01
_LARGEST_CHANCE = 0.5
"""Largest chance of a false report that an unreported image counts with; without it, one image could decide."""


@dataclass(frozen=True)
class FaultThreshold:
    """Score from which a label is reported as wrong, with the number of false reports to expect."""

    threshold: float
    """Infinity if no threshold reaches the precision."""
    expected_false: float
    """Expected number of correct labels among the reported ones."""
    images: int
    """Number of images that the threshold is calibrated on."""

    @property
    def too_few(self) -> bool:
        """Whether nothing is reported because there are fewer than `MIN_IMAGES`."""
        return self.images < MIN_IMAGES


NOTHING = FaultThreshold(np.inf, 0.0, MIN_IMAGES)


def calibrate_threshold(
    genuine_N: np.ndarray, impostor_N: np.ndarray, planted_N: np.ndarray
) -> FaultThreshold:
    """Return the lowest threshold on impostor − genuine whose reports are true with the precision `PRECISION`.

    The similarity of a correctly labeled image to the nearest other identity is taken to be distributed as for the
    images that are more similar to their identity than the median image, whose labels are almost all correct. Thus a
    correct label with the similarity g to its identity is reported with a known chance p(g), and each correct label
    that is not reported represents p / (1 − p) false reports (Horvitz and Thompson, J. Am. Stat. Assoc. 47, 1952).
    Faults that are not reported are subtracted; the planted faults give their number.

    Args:
        genuine_N: similarity to the image's identity; images with NaN are ignored.
        impostor_N: similarity to the nearest other identity.
        planted_N: similarity to a random other identity, which is a planted fault; images with NaN are ignored.
    """
    known = np.isfinite(genuine_N) & np.isfinite(planted_N)
    genuine, impostor, planted = genuine_N[known], impostor_N[known], planted_N[known]
    nothing = FaultThreshold(np.inf, 0.0, len(genuine))
    if nothing.too_few:
        return nothing
    trusted = np.sort(impostor[genuine >= np.median(genuine)])

    def odds(similarity: np.ndarray, threshold: float) -> float:
        # Images that are more similar to their identity cannot be reported by mistake.
        at_risk = similarity[similarity <= trusted[-1] - threshold]
        chance = np.minimum(1 - np.searchsorted(trusted, threshold + at_risk) / len(trusted), _LARGEST_CHANCE)
        return float((chance / (1 - chance)).sum())

    score = impostor - genuine
    planted_score = np.maximum(impostor, genuine) - planted  # its true identity is one of the others
    for threshold in np.arange(0.0, max(float(score.max()), 0.0), _STEP).tolist():
        reported, found = int((score >= threshold).sum()), float((planted_score >= threshold).mean())
        false = odds(genuine[score < threshold], threshold)
        if found:
            faults = max(reported - false, 0.0) / found
            false -= faults * odds(planted[planted_score < threshold], threshold) / len(planted)
        false = max(false, 0.0)
        if false <= (1 - PRECISION) * reported and reported <= _LARGEST_SHARE * len(score):
            return FaultThreshold(threshold, min(false, reported), len(genuine))
    return nothing
