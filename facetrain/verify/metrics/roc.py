"""Exact ROC of similarity scores, and thresholds on it; `curve_metrics` has the metrics.

The terms of ISO/IEC 19795-1 ("Biometric performance testing and reporting") and of the face-recognition
papers correspond as follows; a decision here is one comparison, so the rates agree:

    FAR, false accept rate   = FMR, false match rate            share of impostor pairs that are accepted
    FRR, false reject rate   = FNMR, false non-match rate       share of genuine pairs that are rejected
    TAR, true accept rate    = 1 − FNMR

A genuine pair shows one person, an impostor pair two. A higher score means more similar.
"""

# P pairs

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from facetrain.text import count_text

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""False accept rates at which the true accept rate is reported: the six of InsightFace's IJB tables."""
FMRS = (1e-3, 1e-4, 1e-5, 1e-6)
"""False match rates for which thresholds are calibrated."""
FPIRS = (1e-1, 1e-2)
"""False positive identification rates at which TPIR is reported; IJB-B and IJB-C report these two."""
RULE_OF_30 = 30
"""With fewer false accepts, a rate is not known to ± 30 % with 90 % confidence (Doddington's rule of 30; ISO/IEC
19795-1:2006, annex B)."""
ROUNDING = 1 + 1e-12
"""Factor on a FAR limit: a rate that equals the limit up to float64 rounding is allowed."""


@dataclass(frozen=True)
class Roc:
    """Receiver operating characteristic with one point per distinct score, strictest threshold first.

    All arrays have one more entry than there are distinct scores. No point is interpolated.
    """

    far: np.ndarray
    """False accept rate, ascending from 0 to 1; float64."""
    tar: np.ndarray
    """True accept rate at the same threshold, ascending from 0 to 1; float64."""
    threshold: np.ndarray
    """A pair is accepted if its score is at least the threshold. The first entry is inf: no pair is accepted. In the
    dtype of the scores, in which they are compared with it."""
    impostors: int
    """Number of impostor pairs. A FAR below `1 / impostors` cannot be measured."""


def few_errors(errors: int, kind: str) -> str:
    """Return the remark on a rate that rests on so many errors of a kind, such as `false accept`; empty from 30 on."""
    return (
        f"uncertain: rests on {count_text(errors, kind)}, fewer than {RULE_OF_30}"
        if errors < RULE_OF_30
        else ""
    )


def require_pairs(value_P: np.ndarray, same_P: np.ndarray) -> None:
    """Check the scores, or the distances, of pairs and their labels.

    Raises:
        ValueError: they are not (P,) each, a value is NaN or of an unsigned type, which has no negative, or the labels
            are not bool: of 0 and 1, `~` makes −1 and −2.
    """
    if value_P.ndim != 1 or value_P.shape != same_P.shape:
        raise ValueError(
            f"values of shape {value_P.shape} and labels of shape {same_P.shape}; give one of each for every pair, (P,)"
        )
    if same_P.dtype != np.bool_:
        raise ValueError(f"labels of dtype {same_P.dtype}; give bool, True for a genuine pair")
    if value_P.dtype.kind == "u":
        raise ValueError(f"scores or distances of dtype {value_P.dtype}; give floating point numbers")
    if np.isnan(value_P).any():
        raise ValueError("a score or distance is NaN; give every pair a number")


def roc(score_P: np.ndarray, same_P: np.ndarray) -> Roc | None:
    """Return the exact ROC of scores float (P,) with labels bool (P,), True for a genuine pair.

    Return None if there are no genuine or no impostor pairs.

    Raises:
        ValueError: see `require_pairs`.
    """
    require_pairs(score_P, same_P)
    impostors, genuine = int((~same_P).sum()), int(same_P.sum())
    if not impostors or not genuine:
        return None
    order = np.argsort(-score_P, kind="stable")
    score, same = score_P[order], same_P[order]
    # A threshold accepts equal scores together, so only the last pair of each distinct score is a point.
    last = np.append(np.flatnonzero(score[1:] != score[:-1]), len(score) - 1)
    accepted = np.cumsum(same)[last]
    return Roc(
        far=np.append(0.0, (last + 1 - accepted) / impostors),
        tar=np.append(0.0, accepted / genuine),
        threshold=np.append(np.array(np.inf, np.result_type(score, np.float16)), score[last]),
        impostors=impostors,
    )


def can_measure(impostors: int, far: float) -> bool:
    """Return whether so many impostor pairs can show a FAR; for fewer, it means that none is accepted."""
    return impostors >= least_impostors(far)


def least_impostors(far: float) -> int:
    """Return the smallest number of impostor pairs that can show a FAR."""
    return math.ceil(1 / (far * ROUNDING))


def far_at(curve: Roc, far: float) -> float:
    """Return the largest false accept rate of a threshold that does not exceed `far`."""
    return float(curve.far[_last_point(curve, far)])


def far_of(curve: Roc, threshold: float) -> float:
    """Return the false accept rate of a threshold."""
    return float(curve.far[int(np.searchsorted(-curve.threshold, -threshold, side="right")) - 1])


def threshold_at(curve: Roc, far: float) -> float:
    """Return the lowest score that, as a threshold, accepts at most a share `far` of the impostor pairs.

    If even the highest score accepts more, return the next larger number of the scores' dtype, which accepts no pair.
    """
    index = _last_point(curve, far)
    # The next float64 above a float32 score would be rounded to this score again, when they are compared.
    return float(curve.threshold[index] if index else np.nextafter(curve.threshold[1], curve.threshold[0]))


def _last_point(curve: Roc, far: float) -> int:
    """Return the last point of a curve whose false accept rate does not exceed `far`."""
    return int(np.searchsorted(curve.far, far * ROUNDING, side="right")) - 1


def eer_threshold(curve: Roc) -> float:
    """Return the highest score that, as a threshold, gives a false accept rate of at least the false reject rate."""
    return float(curve.threshold[int(np.argmax(curve.far * ROUNDING >= 1 - curve.tar))])
