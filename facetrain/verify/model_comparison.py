"""Paired comparison of two models on one evaluation set."""

# R draws of subjects

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.result import Interval, Result
from facetrain.verify.metrics.scored_pairs import NO_SHARES


@dataclass(frozen=True)
class Difference:
    """One metric of two models, with the significance of the difference."""

    first: float
    second: float
    interval: Interval
    """95 % interval of `first − second`."""
    p: float
    """Two-sided p-value of the hypothesis that the difference is 0; below 0.05 if and only if `interval` excludes 0."""
    is_bound: bool = False
    """Whether no draw is on the other side of 0, so that p is smaller than what so many draws can show."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the difference."""
        return {
            "first": self.first,
            "second": self.second,
            "difference": self.first - self.second,
            "interval": self.interval,
            "p": self.p,
            "p_is_bound": self.is_bound,
        }


def compare_results(first: Result, second: Result) -> dict[str, Difference]:
    """Compare two models on the same bootstrap draws, metric by metric.

    A metric that rests on fewer than `bootstrap.LEAST_SUBJECTS` subjects is left out.

    A set that is hard for one model is usually hard for the other, so the paired difference varies less than
    either metric: overlapping intervals of two models do not show that they are equal.

    The p-value is 1 − the highest confidence level at which the interval of the difference excludes 0, so that p < 0.05
    if and only if the 95 % interval excludes 0. With S subjects, the interval of level 1 − p ends at the shares q and
    1 − q of the draws,

        q = Φ(−t(1 − p / 2; S − 1) · √(S / (S − 1)))

    where t is the quantile of Student's t (`bootstrap.interval_quantiles`). The p-value is the solution of this
    equation for the share q of draws on the other side of 0. For many subjects it is 2 q.
    """
    differences = {}
    for name in first.replicates:
        one, other = first.metrics.get(name), second.metrics.get(name)
        subjects = first.subjects_of(name)
        if (
            one is None
            or other is None
            or name not in second.replicates
            or subjects < bootstrap.LEAST_SUBJECTS
        ):
            continue
        gap_R = first.replicates[name] - second.replicates[name]
        gap_R = gap_R[np.isfinite(gap_R)]
        if len(gap_R):
            tail, _ = bootstrap.interval_quantiles(subjects)
            # Both ends from one share, because 1 − tail is rounded. 0.0 − x is never −0.0.
            low, high = np.quantile(gap_R, tail), 0.0 - np.quantile(-gap_R, tail)
            if low == high == 0 and name not in NO_SHARES:
                # As in bootstrap.interval: models that decide alike on these people may differ on others.
                high = bootstrap.unseen_share(subjects)
                low = -high
            # As in bootstrap.interval: the interval contains the difference that it belongs to.
            reach = min(float(low), one - other), max(float(high), one - other)
            p, is_bound = _two_sided_p(gap_R, subjects, one - other)
            differences[name] = Difference(one, other, reach, p, is_bound)
    return differences


def _two_sided_p(gap_R: np.ndarray, subjects: int, difference: float) -> tuple[float, bool]:
    """Return 1 − the highest confidence level at which the interval excludes 0, 1 if there is none.

    Also return whether it is the smallest number that so many draws can show.
    """
    if difference == 0:
        # The interval contains the difference.
        return 1.0, False
    share = _share_below_zero(np.sort(gap_R if difference > 0 else -gap_R))
    # R draws cannot show a share below 1 / (R + 1): Davison and Hinkley, "Bootstrap methods and their application",
    # 1997, section 4.4. Few draws of few subjects cannot even show the share of the 95 % interval. It then ends at the
    # outermost draw, and the p-value must not contradict it.
    draws, tail = len(gap_R), bootstrap.interval_quantiles(subjects)[0]
    least = min(1, tail * draws) / (draws + 1)
    return bootstrap.excluded_level(max(share, least), subjects), share <= least


def _share_below_zero(sorted_R: np.ndarray) -> float:
    """Return the share at which the quantile of sorted draws, interpolated as in np.quantile, becomes positive."""
    below = int(np.count_nonzero(sorted_R <= 0))
    if below in (0, len(sorted_R)):
        return float(below > 0)
    last, first = float(sorted_R[below - 1]), float(sorted_R[below])
    return (below - 1 - last / (first - last)) / (len(sorted_R) - 1)
