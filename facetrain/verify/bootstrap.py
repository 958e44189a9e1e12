"""How far a number would move with other people in the test set: the bootstrap over subjects.

Pairs of one set share their people, so they are not independent, and an interval from pairs drawn
singly is too narrow. Here whole subjects are drawn, as often as there are, with replacement. A subject
that was drawn w times brings its genuine pairs w times, a pair of two subjects comes as often as the
product of both: the vertex bootstrap of Fogliato, Patil and Perona, "Confidence intervals for error
rates in 1:1 matching tasks", 2023.
"""

# R draws   S subjects   P pairs   K distinct genuine scores   V vertices of a curve

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from facetrain.verify.pair_blocks import PairBlocks

LEVEL = 0.95
"""Share of the replicates that lie inside an interval."""
_CHUNK = 1 << 23
"""Pairs times draws that are held at once."""


def draw_subjects(subjects: int, replicates: int, *, pairs: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield how often each subject is drawn, uint16 (R, S), as many draws at a time as `pairs` leave room for.

    A draw depends on the seed, its number and the number of subjects alone, so two models on one set are
    compared on the same draws.
    """
    step = max(1, _CHUNK // max(subjects, pairs, 1))
    for start in range(0, replicates, step):
        yield np.stack([_draw(subjects, seed, row) for row in range(start, min(start + step, replicates))])


def _draw(subjects: int, seed: int, replicate: int) -> np.ndarray:
    drawn = np.random.default_rng((seed, replicate)).integers(0, subjects, subjects)
    return np.bincount(drawn, minlength=subjects).astype(np.uint16)


def interval(replicate_R: np.ndarray, subjects: int) -> tuple[float, float] | None:
    """Return the middle `LEVEL` of the replicates, or None where none of them has the number.

    Where no draw has an error, or each has nothing else, drawing again tells nothing. Then the interval ends
    where that would happen to n independent subjects in 2.5 % of cases (Clopper and Pearson, 1934).
    """
    known = replicate_R[np.isfinite(replicate_R)]
    if not len(known):
        return None
    low, high = (float(end) for end in np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    if low == high and low in (0.0, 1.0):
        reach = 1 - ((1 - LEVEL) / 2) ** (1 / max(subjects, 1))
        return (0.0, reach) if low == 0 else (1 - reach, 1.0)
    return low, high


class WeightedCurve:
    """The exact ROC of one list of scores for many draws of their subjects.

    The true accept rate moves at scores of genuine pairs only. So impostor pairs are summed between
    neighboring genuine scores, and each draw costs two cumulative sums over those, however many
    impostors there are; the polygon is the same as with a vertex for every score.
    """

    def __init__(
        self, score_P: np.ndarray, same_P: np.ndarray, first_P: np.ndarray, second_P: np.ndarray
    ) -> None:
        """Take the pairs, and the subject of either side."""
        step_K = np.unique(-score_P[same_P])
        # Even cells lie between the genuine scores, odd ones hold what equals one of them.
        cell_P = np.searchsorted(step_K, -score_P, side="left")
        cell_P += np.searchsorted(step_K, -score_P, side="right")
        self._genuine, self._impostors = (
            PairBlocks(cell_P[kind], 2 * len(step_K) + 1, first_P[kind], second_P[kind])
            for kind in (same_P, ~same_P)
        )

    def rates(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return false and true accept rate at every vertex, (R, V) each, from (0, 0) to (1, 1).

        A draw without pairs of a kind gives NaN.
        """
        return _shares(self._impostors.sums(drawn_RS)), _shares(self._genuine.sums(drawn_RS))


def _shares(sums_RC: np.ndarray) -> np.ndarray:
    total_R1 = sums_RC.sum(1, keepdims=True)
    total_R1[total_R1 == 0] = np.nan
    share_RV = np.zeros((len(sums_RC), sums_RC.shape[1] + 1))
    np.cumsum(sums_RC, axis=1, out=share_RV[:, 1:])
    return share_RV / total_R1


def areas(far_RV: np.ndarray, tar_RV: np.ndarray) -> np.ndarray:
    """Return the area under each curve (R,)."""
    return np.trapezoid(tar_RV, far_RV, axis=1)


def equal_error_rates(far_RV: np.ndarray, tar_RV: np.ndarray) -> np.ndarray:
    """Return where false accepts and false rejects meet on each curve (R,)."""
    gap_RV = far_RV + tar_RV - 1
    row = np.arange(len(gap_RV))
    after = np.argmax(gap_RV >= 0, axis=1)
    before = np.maximum(after - 1, 0)
    rise = gap_RV[row, after] - gap_RV[row, before]
    share = np.divide(-gap_RV[row, before], rise, out=np.full(len(row), np.nan), where=rise > 0)
    return far_RV[row, before] + share * (far_RV[row, after] - far_RV[row, before])


def true_accept_rates(far_RV: np.ndarray, tar_RV: np.ndarray, far: float) -> np.ndarray:
    """Return the largest true accept rate of each curve whose false accept rate is at most `far` (R,)."""
    last = (far_RV <= far * (1 + 1e-12)).sum(1) - 1
    return tar_RV[np.arange(len(tar_RV)), last]
