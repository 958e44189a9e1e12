"""Exact error rates from sorted scores; higher scores mean more alike."""

# P pairs

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FARS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)


@dataclass(frozen=True)
class Roc:
    """The receiver operating characteristic: a point for every score that occurs, from strictest to laxest."""

    far: np.ndarray
    """False accept rate (FMR), ascending from 0 to 1."""
    tar: np.ndarray
    """True accept rate at the same threshold."""
    threshold: np.ndarray
    """A pair is accepted at this score and above; the first point accepts nothing."""
    impostors: int
    """Pairs of different people: no false accept rate below one in so many can be told."""


def roc(score_P: np.ndarray, same_P: np.ndarray) -> Roc | None:
    """Return the exact ROC, or None where all pairs are of one kind."""
    impostors, genuine = int((~same_P).sum()), int(same_P.sum())
    if not impostors or not genuine:
        return None
    order = np.argsort(-score_P, kind="stable")
    score, same = score_P[order], same_P[order]
    # Equal scores are accepted together: only the last of them is a point.
    last = np.append(np.flatnonzero(np.diff(score)), len(score) - 1)
    accepted = np.cumsum(same)[last]
    return Roc(
        far=np.append(0.0, (last + 1 - accepted) / impostors),
        tar=np.append(0.0, accepted / genuine),
        threshold=np.append(np.inf, score[last]),
        impostors=impostors,
    )


def tar_at_far(curve: Roc, far: float) -> float | None:
    """Return the largest true accept rate whose false accept rate is at most `far`.

    None where there are fewer than 1/far pairs of different people: the number would be that of a
    threshold that no impostor has tested.
    """
    if curve.impostors * far < 1 - 1e-9:
        return None
    return float(curve.tar[np.searchsorted(curve.far, far * (1 + 1e-12), side="right") - 1])


def auc(curve: Roc) -> float:
    """Return the area under the curve: how often a genuine pair scores above an impostor pair."""
    return float(np.trapezoid(curve.tar, curve.far))


def equal_error_rate(curve: Roc) -> float:
    """Return the rate at which false accepts and false rejects are as frequent, interpolated between points."""
    gap = curve.far - (1 - curve.tar)
    after = int(np.argmax(gap >= 0))
    if after == 0:
        return float(curve.far[0])
    before = after - 1
    share = -gap[before] / (gap[after] - gap[before])
    return float(curve.far[before] + share * (curve.far[after] - curve.far[before]))


def threshold_at(curve: Roc, far: float) -> float:
    """Return the lowest score from which on at most `far` of the impostor pairs are accepted.

    Where that is none, it is the next number above the highest score.
    """
    index = int(np.searchsorted(curve.far, far * (1 + 1e-12), side="right")) - 1
    return float(curve.threshold[index]) if index else float(np.nextafter(curve.threshold[1], np.inf))


def eer_threshold(curve: Roc) -> float:
    """Return the strictest score at which false accepts are at least as frequent as false rejects."""
    return float(curve.threshold[int(np.argmax(curve.far >= 1 - curve.tar))])
