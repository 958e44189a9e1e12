"""Bootstrap over subjects: confidence intervals for metrics of pairs that share their people.

Pairs of one set share people, so they are not independent, and an interval from pairs that are drawn
independently is too narrow. Here subjects are drawn with replacement, as many as the set has. A subject
that is drawn w times contributes its genuine pairs w times; a pair of two subjects counts as often as the
product of their multiplicities: the vertex bootstrap of Fogliato, Patil and Perona, "Confidence intervals
for error rates in 1:1 matching tasks", 2023.
"""

# R draws   S subjects   P pairs   V points of a curve   B blocks

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.pair_blocks import PairBlocks

LEVEL = 0.95
"""Confidence level: the share of sets of other people whose interval contains the true value."""
LEAST_SUBJECTS = 5
"""Subjects without which there is no interval: most draws of fewer are the set itself, or lack a kind of pairs."""
FEW_SUBJECTS = 20
"""Subjects below which intervals, although widened, can be too narrow."""
_MAX_WEIGHTS = 1 << 23
"""Largest number of pairs × draws, or subjects × draws, in memory at once: 16 MiB of uint16."""


def draw_subjects(subjects: int, replicates: int, *, pairs: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield the multiplicity of each subject in each draw, uint16 (R, S), `replicates` rows in total.

    `pairs` bounds the rows that are yielded at a time, because the caller holds an array (R, P). Row r
    depends on `seed`, r and `subjects` only: two models are compared on the same draws.
    """
    step = max(1, _MAX_WEIGHTS // max(subjects, pairs, 1))
    for start in range(0, replicates, step):
        yield np.stack([_draw(subjects, seed, row) for row in range(start, min(start + step, replicates))])


def replicate(
    metrics: Callable[[np.ndarray], dict[str, np.ndarray]],
    subjects: int,
    draws: Draws,
    *,
    pairs: int,
) -> dict[str, np.ndarray]:
    """Return each metric in every draw, (R, …) by name; empty without draws.

    Args:
        metrics: computes the metrics of several draws at once, from their multiplicities uint16 (R, S).
        subjects: number of subjects.
        draws: number and seed of the draws.
        pairs: largest number of values per draw that `metrics` holds in memory.
    """
    chunks = [
        metrics(drawn_RS) for drawn_RS in draw_subjects(subjects, draws.number, pairs=pairs, seed=draws.seed)
    ]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]} if chunks else {}


def share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return part / whole, NaN where the whole is 0: a draw may have no pairs of a kind."""
    return np.divide(part, whole, out=np.full(np.shape(part), np.nan), where=whole > 0)


def _draw(subjects: int, seed: int, replicate: int) -> np.ndarray:
    # A generator for each draw: the draws do not depend on how many are computed at once.
    drawn = np.random.default_rng((seed, replicate)).integers(0, subjects, subjects)
    return np.bincount(drawn, minlength=subjects).astype(np.uint16)


def interval_quantiles(subjects: int) -> tuple[float, float]:
    """Return the shares of the replicates below the low and the high end of an interval.

    With few subjects, replicates vary less than the metric does over sets of other people: their variance is too small
    by the factor (S − 1) / S, and their quantiles follow a normal instead of a t distribution. The expanded
    percentile interval is wider by both (Hesterberg, "What teachers should know about the bootstrap", The American
    Statistician 69, 2015). For 20 subjects the shares are 1.6 % and 98.4 %, for 1,000 they are 2.5 % and 97.5 %.
    """
    # Imported here: a training run computes no intervals, and the import would delay its start.
    from scipy.special import ndtr, stdtrit

    freedom = subjects - 1
    tail = float(ndtr(-stdtrit(freedom, (1 + LEVEL) / 2) * math.sqrt((freedom + 1) / freedom)))
    return tail, 1 - tail


def excluded_level(share: float, subjects: int) -> float:
    """Return 1 − the confidence level of the expanded percentile interval whose low end is the quantile `share`.

    This is the inverse of `interval_quantiles`, for every level: `excluded_level(interval_quantiles(S)[0], S)` is
    1 − `LEVEL`. `share` is above 0; from 0.5 on, where the interval is empty, the result is 1.
    """
    from scipy.special import ndtri, stdtr

    freedom = subjects - 1
    quantile = ndtri(share) / math.sqrt((freedom + 1) / freedom)
    return min(1.0, 2 * float(stdtr(freedom, quantile)))


def interval(
    replicate_R: np.ndarray, subjects: int, estimate: float, *, is_share: bool = True
) -> tuple[float, float] | None:
    """Return the expanded percentile interval at `LEVEL` of a metric's replicates; NaN replicates are ignored.

    Its ends are the quantiles of `interval_quantiles`. Return None for fewer than `LEAST_SUBJECTS` subjects, or if all
    replicates are NaN.

    If both ends of a share (`is_share`), such as an error rate, are exactly 0, or both exactly 1, resampling shows no
    uncertainty. The open end is then the exact binomial limit for so many independent subjects (Clopper and Pearson,
    "The use of confidence or fiducial limits", 1934). For another number, such as a ratio of two rates, 0 and 1 are no
    limits: its ends stay.

    The interval always contains `estimate`, the metric of the set itself. On very small sets the replicates
    can be biased by more than they vary; the interval is then widened up to the estimate, which can only
    increase its coverage.
    """
    known = replicate_R[np.isfinite(replicate_R)]
    if subjects < LEAST_SUBJECTS or not len(known):
        return None
    low, high = (float(end) for end in np.quantile(known, interval_quantiles(subjects)))
    if is_share and low == high and low in (0.0, 1.0):
        reach = unseen_share(subjects)
        low, high = (0.0, reach) if low == 0 else (1 - reach, 1.0)
    return min(low, estimate), max(high, estimate)


def unseen_share(subjects: int) -> float:
    """Return the exact binomial limit, at `LEVEL`, of the share of people who are not among so many subjects."""
    return 1 - ((1 - LEVEL) / 2) ** (1 / subjects)


class WeightedCurve:
    """Exact ROC of one list of scores, for many draws of its subjects.

    The true accept rate changes at scores of genuine pairs only. Impostor pairs are therefore counted per
    range between neighboring genuine scores, and a draw costs two cumulative sums over these ranges, however
    many impostor pairs there are. The curve is the same polygon as with a point for every score.
    """

    def __init__(
        self, score_P: np.ndarray, same_P: np.ndarray, first_P: np.ndarray, second_P: np.ndarray
    ) -> None:
        """Sort scores float (P,), labels bool (P,) and the subject ids of both sides, int (P,), into blocks."""
        # Negative scores: the strictest threshold comes first, as in `roc`.
        step_K = np.unique(-score_P[same_P])
        # Even blocks are the open ranges between genuine scores, odd blocks hold the scores that equal one.
        block_P = np.searchsorted(step_K, -score_P, side="left")
        block_P += np.searchsorted(step_K, -score_P, side="right")
        self._genuine, self._impostors = (
            PairBlocks(block_P[kind], 2 * len(step_K) + 1, first_P[kind], second_P[kind])
            for kind in (same_P, ~same_P)
        )

    def rates(self, drawn_RS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return false and true accept rate at every point, float64 (R, V) each, from (0, 0) to (1, 1).

        A draw without genuine, or without impostor, pairs gives NaN.
        """
        return _cumulative_shares(self._impostors.counts(drawn_RS)), _cumulative_shares(
            self._genuine.counts(drawn_RS)
        )


def _cumulative_shares(count_RB: np.ndarray) -> np.ndarray:
    total_R1 = count_RB.sum(1, keepdims=True)
    total_R1[total_R1 == 0] = np.nan
    share_RV = np.zeros((len(count_RB), count_RB.shape[1] + 1))
    np.cumsum(count_RB, axis=1, out=share_RV[:, 1:])
    return share_RV / total_R1
