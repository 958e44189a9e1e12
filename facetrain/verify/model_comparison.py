"""Two models on one set: whether the difference is more than chance."""

# R draws of subjects

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.verify import bootstrap
from facetrain.verify.result import Interval, Result


@dataclass(frozen=True)
class Difference:
    """One number of two models."""

    first: float
    second: float
    interval: Interval
    """Of first − second."""
    p: float
    """How often a difference as far from 0 would come by chance if there were none; two-sided."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, and the difference."""
        return {
            "first": self.first,
            "second": self.second,
            "difference": self.first - self.second,
            "interval": self.interval,
            "p": self.p,
        }


def compare_results(first: Result, second: Result) -> dict[str, Difference]:
    """Compare two models on the same draws of the same subjects, number by number.

    What makes a set hard makes it hard for both, so the difference moves less than either number, and
    overlapping intervals of the two decide nothing. The p-value is twice the share of draws on the other
    side of 0, each counted with the set itself (Davison and Hinkley, "Bootstrap methods and their
    application", 1997, section 4.4).
    """
    found = {}
    for name in first.replicates:
        one, other = first.metrics.get(name), second.metrics.get(name)
        if one is None or other is None or name not in second.replicates:
            continue
        gap_R = first.replicates[name] - second.replicates[name]
        gap_R = gap_R[np.isfinite(gap_R)]
        if len(gap_R):
            low, high = np.quantile(gap_R, [(1 - bootstrap.LEVEL) / 2, (1 + bootstrap.LEVEL) / 2])
            found[name] = Difference(one, other, (float(low), float(high)), _two_sided(gap_R))
    return found


def _two_sided(gap_R: np.ndarray) -> float:
    tail = min(np.count_nonzero(gap_R <= 0), np.count_nonzero(gap_R >= 0))
    return min(1.0, 2 * (tail + 1) / (len(gap_R) + 1))
