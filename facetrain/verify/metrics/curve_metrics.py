"""Metrics that follow from the ROC. A new one is a function here, and its line in `CURVE_METRICS`.

A formula takes many curves at once: the curve of a set is one, and the bootstrap draws of its subjects are many.
"""

# R curves   V points of a curve

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from facetrain.verify.metrics.bootstrap import share
from facetrain.verify.metrics.roc import FARS, ROUNDING, Roc, can_measure, eer_threshold, threshold_at

Formula = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Maps false and true accept rates, float64 (R, V) each and ascending from 0 to 1, to a number of each curve, (R,)."""


@dataclass(frozen=True)
class CurveMetric:
    """Metric of the ROC of a set."""

    name: str
    formula: Formula
    far: float = 1.0
    """False accept rate that the set must be able to measure: one in so many impostor pairs."""
    threshold: Callable[[Roc], float] | None = None
    """Returns the score from which pairs are accepted; None for a metric of all thresholds."""
    is_rate: bool = True
    """Whether it is printed in percent."""
    rises: bool = True
    """Whether a better model has a larger value."""

    def of(self, curve: Roc) -> float | None:
        """Return the metric of a curve; None if the set is too small for it."""
        return value_of(curve, self.formula) if can_measure(curve.impostors, self.far) else None


def auc(far_RV: np.ndarray, tar_RV: np.ndarray) -> np.ndarray:
    """Return the area under each curve by the trapezoidal rule: float64 (R,).

    It is the probability that a random genuine pair scores higher than a random impostor pair; ties count one half
    (Hanley and McNeil, "The meaning and use of the area under a ROC curve", 1982).
    """
    return np.asarray(np.trapezoid(tar_RV, far_RV, axis=1))


def equal_error_rate(far_RV: np.ndarray, tar_RV: np.ndarray) -> np.ndarray:
    """Return the rate at which FMR and FNMR of each curve are equal: float64 (R,) (ISO/IEC 19795-1).

    Linear interpolation between the two neighboring points of the ROC.
    """
    # The gap rises from −1 to 1 along the curve, so its first value of at least 0 is where the rates cross.
    gap_RV = far_RV - (1 - tar_RV)
    row = np.arange(len(gap_RV))
    after = np.argmax(gap_RV >= 0, axis=1)
    before = after - 1
    rise = gap_RV[row, after] - gap_RV[row, before]
    part = share(-gap_RV[row, before], rise)
    return np.asarray(far_RV[row, before] + part * (far_RV[row, after] - far_RV[row, before]))


def tar_at_far(far_RV: np.ndarray, tar_RV: np.ndarray, *, far: float) -> np.ndarray:
    """Return the largest true accept rate at a false accept rate of at most `far`: float64 (R,).

    This is the metric of IJB-C (Maze et al., "IARPA Janus Benchmark-C", 2018); in ISO/IEC 19795-1 it is 1 − FNMR at an
    FMR limit. NaN for a draw without impostor pairs.
    """
    last = (far_RV <= far * ROUNDING).sum(1) - 1
    # Without impostor pairs, every rate is NaN and no point is counted.
    return np.where(last < 0, np.nan, tar_RV[np.arange(len(tar_RV)), last])


CURVE_METRICS = (
    CurveMetric("auc", auc, is_rate=False),
    CurveMetric("eer", equal_error_rate, threshold=eer_threshold, rises=False),
    *(
        CurveMetric(f"tar@{far:.0e}", partial(tar_at_far, far=far), far, partial(threshold_at, far=far))
        for far in FARS
    ),
)
"""Metrics of the ROC of a set of pairs, in the order of the output."""


def value_of(curve: Roc, formula: Formula) -> float:
    """Return the metric of one curve."""
    return float(formula(curve.far[None], curve.tar[None])[0])
