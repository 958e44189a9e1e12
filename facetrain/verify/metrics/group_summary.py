"""Fairness summary: how much the error rates of groups of people differ, at one threshold for all groups."""

# V groups   R draws of subjects

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from facetrain.verify.metrics.bootstrap import share

_ERRORS = ("fmr", "fnmr")
RATES = ("accuracy", "fmr", "fnmr")
"""Rates of a group that the summary is made of."""


@dataclass(frozen=True)
class Group:
    """Metrics of the pairs of one group, or of the differences between all groups of a column.

    The metrics of a group are `accuracy`, `fmr`, `fnmr`, `pairs`, `genuine` and `impostors`. Those of the
    differences are in `summarize_groups`; a ratio is None if the lowest rate is 0.
    """

    column: str
    """Column of the slice table."""
    value: str | None
    """Value of the column that the pairs share; None for the differences between all groups."""
    metrics: dict[str, float | None]
    """Metrics by name; None where the groups have too few pairs."""
    interval: dict[str, tuple[float, float]]
    """95 % interval of each metric."""

    def as_json(self) -> dict[str, Any]:
        """Return the metrics at the top level and the intervals under `intervals`."""
        value = {} if self.value is None else {"value": self.value}
        return {"column": self.column, **value, **self.metrics, "intervals": self.interval}


def summarize_groups(rates: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the summary of the groups' rates in every draw: (R,) by name, NaN where it is not defined.

    - `accuracy_mean`, `accuracy_spread`: mean and standard deviation over the groups, with divisor V − 1, as in the
      tables of RFW (Wang and Deng, "Mitigating bias in face recognition using skewness-aware reinforcement
      learning", CVPR 2020).
    - `skewed_error_ratio`: highest error by lowest error, error being 1 − accuracy (same paper).
    - `fmr_worst_to_mean`, `fnmr_worst_to_mean`: highest rate by the geometric mean of all groups, the measure of
      NIST's FRTE demographics report and of ISO/IEC 19795-10:2024.
    - `fmr_worst_to_best`, `fnmr_worst_to_best`: highest by lowest rate.
    - `fmr_gini`, `fnmr_gini`: Gini coefficient of the rates, corrected for few groups, from 0 for equal rates to 1
      (Howard, Laird and others, "Evaluating proposed fairness models for face recognition algorithms", 2022).

    NIST IR 8429 (Grother, 2022) compares these measures of ISO/IEC 19795-10's performance differentials.

    A ratio is not defined if the lowest rate is 0: the groups have too few pairs for this threshold. For equal rates,
    the ratios are exactly 1 and the others exactly 0: the ends of intervals must not miss them by a rounding.

    Args:
        rates: `accuracy`, `fmr` and `fnmr` of each of V >= 2 groups in each draw, float (R, V); NaN where a draw has
            no pairs of a group.
    """
    accuracy_RV = rates["accuracy"]
    error_RV = 1 - accuracy_RV
    return {
        "accuracy_mean": accuracy_RV.mean(1),
        "accuracy_spread": (accuracy_RV - accuracy_RV[:, :1]).std(1, ddof=1),
        "skewed_error_ratio": share(error_RV.max(1), error_RV.min(1)),
        **{f"{rate}_worst_to_mean": _worst_to_mean(rates[rate]) for rate in _ERRORS},
        **{f"{rate}_worst_to_best": share(rates[rate].max(1), rates[rate].min(1)) for rate in _ERRORS},
        **{f"{rate}_gini": _gini(rates[rate]) for rate in _ERRORS},
    }


def without_chance(drawn_RV: np.ndarray, rate_V: np.ndarray) -> np.ndarray:
    """Return the rates of draws, float (R, V), with the differences between the groups reduced by what chance adds.

    Chance makes the rates `rate_V` of equal groups differ in a set, and in a draw of its people once more: the measures
    of nearly all draws would be above that of all people. Both times, the variance over the groups grows on average by
    that of the differences between draw and set. Draws without pairs of a group are left out.
    """
    drawn_RV = drawn_RV[np.isfinite(drawn_RV).all(1)]
    mean_R1 = drawn_RV.mean(1, keepdims=True)
    variance_R1 = drawn_RV.var(1, ddof=1, keepdims=True)
    chance = (drawn_RV - rate_V).var(1, ddof=1).sum() / max(len(drawn_RV), 1)
    left_R1 = np.maximum(variance_R1 - 2 * chance, 0)
    # Of equal rates, nothing is left.
    factor_R1 = np.sqrt(np.divide(left_R1, variance_R1, out=np.zeros_like(left_R1), where=variance_R1 > 0))
    return np.asarray(mean_R1 + factor_R1 * (drawn_RV - mean_R1))


def _worst_to_mean(rate_RV: np.ndarray) -> np.ndarray:
    worst_R1 = rate_RV.max(1, keepdims=True)
    relative_RV = share(rate_RV, np.broadcast_to(worst_R1, rate_RV.shape))
    # The logarithm of 0 makes the mean 0, and the ratio is then not defined.
    with np.errstate(divide="ignore"):
        mean_R = np.exp(np.log(relative_RV).mean(1))
    return share(np.ones_like(mean_R), mean_R)


def _gini(rate_RV: np.ndarray) -> np.ndarray:
    """Return the Gini coefficient times V / (V − 1), so that one group with all errors gives 1."""
    # The sum of all differences, from the sorted rates: a table of the differences would be the square of the groups.
    count = rate_RV.shape[1]
    sorted_RV = np.sort(rate_RV, axis=1)
    gap_R = (sorted_RV - sorted_RV[:, ::-1]) @ (np.arange(1, count + 1) - (count + 1) / 2)
    return share(gap_R, count * (count - 1) * rate_RV.mean(1))
