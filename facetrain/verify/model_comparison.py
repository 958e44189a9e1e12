"""Paired comparison of two models on one evaluation set."""

# R draws of subjects

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.verify import bootstrap
from facetrain.verify.result import Interval, Result


@dataclass(frozen=True)
class Difference:
    """One metric of two models, with the significance of the difference."""

    first: float
    second: float
    interval: Interval
    """95 % interval of `first − second`."""
    p: float
    """Two-sided p-value of the hypothesis that the difference is 0."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the difference."""
        return {
            "first": self.first,
            "second": self.second,
            "difference": self.first - self.second,
            "interval": self.interval,
            "p": self.p,
        }


def compare_results(first: Result, second: Result) -> dict[str, Difference]:
    """Compare two models on the same bootstrap draws, metric by metric.

    A set that is hard for one model is usually hard for the other, so the paired difference varies less than
    either metric: overlapping intervals of two models do not show that they are equal. The p-value is twice
    the share of draws on the other side of 0, with one added to both counts (Davison and Hinkley, "Bootstrap
    methods and their application", 1997, section 4.4).
    """
    differences = {}
    for name in first.replicates:
        one, other = first.metrics.get(name), second.metrics.get(name)
        if one is None or other is None or name not in second.replicates:
            continue
        gap_R = first.replicates[name] - second.replicates[name]
        gap_R = gap_R[np.isfinite(gap_R)]
        if len(gap_R):
            low, high = np.quantile(gap_R, bootstrap.interval_quantiles(first.subjects))
            # As in bootstrap.interval: the interval contains the difference that it belongs to.
            reach = min(float(low), one - other), max(float(high), one - other)
            differences[name] = Difference(one, other, reach, _two_sided_p(gap_R))
    return differences


def _two_sided_p(gap_R: np.ndarray) -> float:
    tail = min(np.count_nonzero(gap_R <= 0), np.count_nonzero(gap_R >= 0))
    return min(1.0, 2 * (tail + 1) / (len(gap_R) + 1))
