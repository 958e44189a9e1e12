"""Thresholds for label faults, calibrated on the dataset by planting faults in its embeddings."""

# N scores of a dataset   P scores of planted faults   B bins

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PRECISION = 0.95
"""Share of true faults among the reported ones that a threshold aims at."""
TAIL = 0.4
"""Share of the scores that the tail of the correct labels is fitted to; more faults than these are not expected."""
_LINEAR = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_QUADRATIC = (0.0, 0.1, 0.2, 0.3, 0.4, 0.55, 0.7)
"""Shapes of the tail in units of its initial rate: an exponential one has 1 and 0, a normal one 0.26 and 0.54."""
_LARGEST_SHARE = 0.25
"""Share of the scores that is reported, at most: with more faults, labels and model disagree in general."""
MIN_SCORES = 20
"""Scores that a threshold is calibrated on, at least; with fewer, nothing is reported."""
_SCORE_STEP = 0.01
_LARGEST_CHANCE = 0.5
"""Largest chance of a false report that an unreported image counts with; without it, one image could decide."""
_BINS = 32
_EM_ROUNDS = 50


@dataclass(frozen=True)
class FaultThreshold:
    """Score from which a fault is reported, with the number of false reports to expect."""

    threshold: float
    """Infinity if no threshold reaches the precision."""
    expected_false: float
    """Expected number of correct labels among the reported ones."""
    scores: int = 0
    """Number of scores that the threshold is calibrated on."""

    @property
    def too_few(self) -> bool:
        """Whether nothing is reported because there are fewer than `MIN_SCORES` scores."""
        return self.scores < MIN_SCORES


def calibrate_threshold(
    score_N: np.ndarray,
    planted: Sequence[np.ndarray],
    *,
    lowest: float,
    null_N: np.ndarray | None = None,
    trials: int | None = None,
    largest_share: float = _LARGEST_SHARE,
) -> FaultThreshold:
    """Return the lowest threshold whose reports are expected to be true with the precision `PRECISION`.

    The logarithm of the density of correct labels is taken to be a falling parabola above the 60 % quantile, as for an
    exponential or a normal tail. The tail starts with the density that the scores have there, and its shape is fitted
    together with the planted scores, so that true faults do not count as tail. The expected number of correct
    labels above the threshold, divided by the number of all scores above it, is at most 1 − `PRECISION` (Benjamini and
    Hochberg, J. R. Statist. Soc. B 57, 1995). A model that cannot separate planted faults from the other scores thus
    reports nothing.

    Args:
        score_N: a score per decision, larger for faults; NaN is ignored.
        planted: scores of planted faults, one array per kind.
        lowest: threshold below which nothing is reported.
        null_N: scores to fit the tail to; `score_N` if None.
        trials: number of decisions that can be false; the number of scores if None.
        largest_share: reported scores, at most, divided by the number of null scores: with more faults, labels and
            model disagree in general.
    """
    score = np.sort(score_N[np.isfinite(score_N)])
    null = score if null_N is None else np.sort(null_N[np.isfinite(null_N)])
    known = [scores[np.isfinite(scores)] for scores in planted]
    known = [scores for scores in known if len(scores)]
    nothing = FaultThreshold(np.inf, 0.0, len(null))
    if nothing.too_few or not len(score) or not known:
        return nothing
    tail = _fit_tail(null, float(np.quantile(null, 1 - TAIL)), known)
    candidates = np.unique(score[score >= max(tail.start, lowest)])
    reported = len(score) - np.searchsorted(score, candidates)
    false = tail.above(candidates) * (len(score) if trials is None else trials) / len(null)
    good = np.flatnonzero((false <= (1 - PRECISION) * reported) & (reported <= largest_share * len(null)))
    if not len(good):
        return nothing
    best = good[0]
    # Halfway to the next lower score: a rounding error of another processor does not change the decisions.
    below = score[score < candidates[best]]
    threshold = float(max((candidates[best] + below[-1]) / 2 if len(below) else candidates[best], lowest))
    return FaultThreshold(threshold, float(min(false[best], reported[best])), len(null))


def calibrate_mislabeled(
    genuine_N: np.ndarray,
    impostor_N: np.ndarray,
    planted_N: np.ndarray,
    *,
    lowest: float,
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
        lowest: similarity to another identity below which nothing is reported.
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
        below = np.searchsorted(trusted, np.maximum(threshold + at_risk, lowest))
        chance = np.minimum(1 - below / len(trusted), _LARGEST_CHANCE)
        return float((chance / (1 - chance)).sum())

    # The true identity of a planted fault is one of the others.
    others = np.maximum(impostor, genuine)
    score = np.where(impostor >= lowest, impostor - genuine, -np.inf)
    planted_score = np.where(others >= lowest, others - planted, -np.inf)
    for threshold in np.arange(0.0, max(float(score.max()), 0.0), _SCORE_STEP).tolist():
        reported, found = int((score >= threshold).sum()), float((planted_score >= threshold).mean())
        false = odds(genuine[score < threshold], threshold)
        if found:
            faults = max(reported - false, 0.0) / found
            false = max(
                false - faults * odds(planted[planted_score < threshold], threshold) / len(planted), 0.0
            )
        if false <= (1 - PRECISION) * reported and reported <= _LARGEST_SHARE * len(score):
            return FaultThreshold(threshold, min(false, reported), len(genuine))
    return nothing


@dataclass(frozen=True)
class _Tail:
    """Number of correct labels per unit of the score: density · exp(−linear · x − quadratic · x²), x from the start."""

    start: float
    density: float
    linear: float
    quadratic: float

    def above(self, score: np.ndarray) -> np.ndarray:
        """Return the expected number of correct labels above ascending scores, from `start`."""
        # Twelve units of the initial rate hold all but 1e-5 of an exponential tail.
        end = max(float(score[-1]) if len(score) else self.start, self.start) + 12 / max(self.linear, 1e-3)
        grid = np.linspace(self.start, min(end, self.start + 4), 4096)
        x = grid - self.start
        value = self.density * np.exp(-self.linear * x - self.quadratic * x * x)
        area = np.concatenate([[0.0], np.cumsum((value[1:] + value[:-1]) / 2) * (grid[1] - grid[0])])
        return np.interp(score, grid, area[-1] - area)


def _fit_tail(null: np.ndarray, start: float, planted: list[np.ndarray]) -> _Tail:
    """Return the tail of correct labels.

    Args:
        null: sorted scores, most of them of correct labels.
        start: score where the tail starts.
        planted: scores of each kind of planted faults.
    """
    scores = null[null >= start]
    end = max(float(scores[-1]), *(float(one.max()) for one in planted)) + 1e-6
    edges = np.linspace(start, end, _BINS + 1)
    count_B = np.histogram(scores, edges)[0]
    # Observed density around the start: from a fifth of a tail below to a fifth above.
    low, high = np.quantile(null, [1 - 1.2 * TAIL, 1 - 0.8 * TAIL])
    density = 0.4 * TAIL * len(null) / max(float(high - low), 1e-6)
    rate = density / len(scores)
    shapes = np.stack([np.histogram(one, edges)[0] / max(int((one >= start).sum()), 1) for one in planted])
    best, best_likelihood = _Tail(start, density, rate, 0.0), -np.inf
    for linear in _LINEAR:
        for quadratic in _QUADRATIC:
            tail = _Tail(start, density, linear * rate, quadratic * rate * rate)
            above = tail.above(edges)
            if above[0] > 1.02 * len(scores):  # more correct labels than scores
                continue
            likelihood = _likelihood(count_B, -np.diff(above), shapes, max(len(scores) - above[0], 0.0))
            if likelihood > best_likelihood:
                best, best_likelihood = tail, likelihood
    return best


def _likelihood(count_B: np.ndarray, null_B: np.ndarray, shape_KB: np.ndarray, faults: float) -> float:
    """Return the log likelihood of bins of tail scores, with `faults` faults divided among the planted kinds by EM."""
    weight = np.full(len(shape_KB), faults / len(shape_KB))
    for _ in range(_EM_ROUNDS):
        expected = null_B + weight @ shape_KB + 1e-9
        share = (weight[:, None] * shape_KB / expected * count_B).sum(1)
        weight = share * (faults / max(share.sum(), 1e-12))
    expected = null_B + weight @ shape_KB + 1e-9
    return float((count_B * np.log(expected) - expected).sum())
