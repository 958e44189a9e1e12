"""Scored pairs, and the metrics that their scores give: ROC, fold accuracy, histogram, hardest pairs."""

# P pairs   N images or templates   F folds   R draws of subjects

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from facetrain.data.pair_folds import FOLDS, fold_order
from facetrain.verify.metrics import bootstrap
from facetrain.verify.metrics.curve_metrics import CURVE_METRICS, CurveMetric
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.fold_accuracy import (
    THRESHOLDS,
    FoldAccuracy,
    FoldSearch,
    grid_roc,
    mean_over_folds,
)
from facetrain.verify.metrics.pair_blocks import every_subject_once
from facetrain.verify.metrics.result import HardPair, Histogram, Result
from facetrain.verify.metrics.roc import Roc, least_impostors, roc
from facetrain.verify.metrics.score_scale import COSINE, ScoreScale

_HARDEST = 50
_HISTOGRAM_BINS = 200
NO_SHARES = ("threshold", "xnorm")
"""Metrics that are a distance or a length: they can be 0 or 1, but not as a share of pairs."""
_FOLD_METRICS = ("accuracy", "accuracy_no_flip", "threshold")
"""Metrics of the folds that have an interval."""
NEEDS_BOTH_KINDS = "needs genuine and impostor pairs; all pairs are of one kind"
"""Reason for a missing curve, and a missing accuracy."""


@dataclass(frozen=True)
class ScoredPairs:
    """Pairs of images or templates with the score of one model and the subjects."""

    score_P: np.ndarray
    """Similarity score, float (P,): the cosine, or the score of another system."""
    same_P: np.ndarray
    """True for a genuine pair, bool (P,)."""
    first_P: np.ndarray
    second_P: np.ndarray
    """Indices of the two images or templates, int (P,)."""
    subject_N: np.ndarray
    """Subject id of each image or template, int (N,) from 0 without gaps; −1 if it is in no pair."""
    scale: ScoreScale = COSINE
    """Range of the scores."""

    @property
    def subjects(self) -> int:
        """Number of subjects."""
        return int(self.subject_N.max()) + 1 if len(self.subject_N) else 0

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """Subject ids of the first and the second side of each pair, int (P,) each."""
        return self.subject_N[self.first_P], self.subject_N[self.second_P]

    def count_subjects(self, pair: np.ndarray) -> int:
        """Return the number of subjects in some pairs, given by their indices or as bool (P,)."""
        # Marked, not sorted: IJB-C has 15 million impostor pairs.
        is_counted_S = np.zeros(self.subjects, bool)
        for side_P in (self.first_P, self.second_P):
            is_counted_S[self.subject_N[side_P[pair]]] = True
        return int(is_counted_S.sum())

    def in_fold_order(self) -> ScoredPairs:
        """Return the pairs in an order in which every fold has both kinds, see `fold_order`."""
        return self.take(fold_order(self.same_P))

    def take(self, pair: np.ndarray) -> ScoredPairs:
        """Return some pairs, given by their indices or as bool (P,), with the same subject ids."""
        score_P, same_P, first_P, second_P = (
            column_P[pair] for column_P in (self.score_P, self.same_P, self.first_P, self.second_P)
        )
        return replace(self, score_P=score_P, same_P=same_P, first_P=first_P, second_P=second_P)


def pair_result(pairs: ScoredPairs, *, protocol: str, draws: Draws) -> Result:
    """Return the `CURVE_METRICS` with their intervals, the ROC, the histogram and the hardest pairs."""
    curve = roc(pairs.score_P, pairs.same_P)
    genuine = int(pairs.same_P.sum())
    counts = {"pairs": len(pairs.same_P), "genuine": genuine, "impostors": len(pairs.same_P) - genuine}
    metrics: dict[str, float | None] = {name: float(count) for name, count in counts.items()}
    result = Result(protocol, metrics, subjects=pairs.subjects, scale=pairs.scale)
    result.histogram = histogram(pairs)
    result.hardest_genuine, result.hardest_impostors = hardest_pairs(pairs)
    if curve is None:
        result.metrics["auc"], result.needs["auc"] = None, NEEDS_BOTH_KINDS
        return result
    result.curves = {"": curve}
    for metric in CURVE_METRICS:
        _add_curve_metric(result, curve, metric)
    # A metric of both kinds of pairs is known no better than its rate of the kind that fewer subjects have.
    fewest = min(pairs.count_subjects(kind) for kind in (pairs.same_P, ~pairs.same_P))
    curve_metrics = (metric.name for metric in CURVE_METRICS)
    result.metric_subjects = dict.fromkeys((*curve_metrics, *_FOLD_METRICS), fewest)
    add_replicates(result, _bootstrap_curve(pairs, result, draws))
    return result


def add_fold_accuracy(result: Result, pairs: ScoredPairs, *, draws: Draws) -> None:
    """Add `accuracy` and `accuracy_std` by the 10-fold protocol, and the ROC on the published grid.

    For cosines, also add the published `threshold`, a squared distance. The folds are runs of consecutive pairs, as in
    the official lists, unless a fold would have pairs of one kind only, see `fold_order`. Pairs of one kind have no
    accuracy: a threshold that accepts, or refuses, all of them is always right.
    """
    if result.curve is None:
        result.metrics["accuracy"], result.needs["accuracy"] = None, NEEDS_BOTH_KINDS
        return
    pairs = pairs.in_fold_order()
    folds, replicate = bootstrap_fold_accuracy(pairs, draws=draws)
    result.folds = folds
    result.grid = grid_roc(pairs.scale.distance(pairs.score_P), pairs.same_P, folds=len(folds.accuracy_F))
    result.metrics |= {"accuracy": folds.mean, "accuracy_std": folds.std}
    result.threshold["accuracy"] = _score_threshold(pairs, float(folds.threshold_F.mean()))
    if pairs.scale == COSINE:
        result.metrics["threshold"] = float(folds.threshold_F.mean())
    else:
        replicate.pop("threshold", None)
    add_replicates(result, replicate)


def _score_threshold(pairs: ScoredPairs, distance: float) -> float:
    """Return the score from which pairs are accepted whose distance is below a limit."""
    threshold = pairs.scale.score(distance)
    is_accepted_P = pairs.scale.distance(pairs.score_P) < distance
    # The limit itself is rejected there and would be accepted here, and the conversion rounds.
    if (rejected_P := pairs.score_P[~is_accepted_P]).size:
        threshold = max(threshold, float(np.nextafter(rejected_P.max(), np.inf)))
    if (accepted_P := pairs.score_P[is_accepted_P]).size:
        threshold = min(threshold, float(accepted_P.min()))
    return threshold


def bootstrap_fold_accuracy(
    pairs: ScoredPairs, *, draws: Draws
) -> tuple[FoldAccuracy, dict[str, np.ndarray]]:
    """Return the fold accuracy of pairs in fold order, and `accuracy` and `threshold` in every draw, (R,) each.

    Every draw repeats the search for the thresholds; a draw without pairs gives NaN. `accuracy_std` has no replicates:
    a draw holds about 63 % of the subjects, so its folds have fewer distinct pairs and differ more than the folds of
    the set. Its standard deviation over the folds is therefore biased upward, often by more than it varies.
    """
    folds = min(FOLDS, len(pairs.same_P))
    search = FoldSearch(pairs.scale.distance(pairs.score_P), pairs.same_P, folds, *pairs.sides)
    accuracy, threshold = search.accuracy(every_subject_once(pairs.subjects))

    def metrics(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        accuracy_RF, threshold_RF = search.accuracy(drawn_RS)
        mean_R = mean_over_folds(accuracy_RF)
        return {"accuracy": mean_R, "threshold": np.where(np.isnan(mean_R), np.nan, threshold_RF.mean(1))}

    held = max(len(pairs.same_P), folds * (len(THRESHOLDS) + 1))
    replicate = bootstrap.replicate(metrics, pairs.subjects, draws, pairs=held)
    return FoldAccuracy(accuracy[0], threshold[0]), replicate


def add_replicates(result: Result, replicates: dict[str, np.ndarray]) -> None:
    """Store each metric's values in the bootstrap draws, (R,), and its interval."""
    result.replicates |= replicates
    for name, replicate_R in replicates.items():
        value = result.metrics[name]
        assert value is not None, "only metrics that the set is large enough for have replicates"
        is_share = name not in NO_SHARES
        interval = bootstrap.interval(replicate_R, result.subjects_of(name), value, is_share=is_share)
        if interval is not None:
            result.interval[name] = interval


def _add_curve_metric(result: Result, curve: Roc, metric: CurveMetric) -> None:
    value = result.metrics[metric.name] = metric.of(curve)
    if value is None:
        result.needs[metric.name] = needed_impostors(curve, metric.far)
    elif metric.threshold is not None:
        result.threshold[metric.name.removeprefix("tar@")] = metric.threshold(curve)


def needed_impostors(curve: Roc, far: float) -> str:
    """Return why a set of pairs has no true accept rate at a false accept rate."""
    return f"needs {least_impostors(far):,} impostor pairs; there are {curve.impostors:,}"


def _bootstrap_curve(pairs: ScoredPairs, result: Result, draws: Draws) -> dict[str, np.ndarray]:
    # Sorted once for all draws.
    curve = bootstrap.WeightedCurve(pairs.score_P, pairs.same_P, *pairs.sides)
    measured = [metric for metric in CURVE_METRICS if result.metrics[metric.name] is not None]

    def metrics(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        rates = curve.rates(drawn_RS)
        return {metric.name: metric.formula(*rates) for metric in measured}

    return bootstrap.replicate(metrics, pairs.subjects, draws, pairs=len(pairs.same_P))


def histogram(pairs: ScoredPairs) -> Histogram:
    """Count the pairs of either kind in equal bins of the scores' range, for cosines from −1 to 1."""
    low, high = pairs.scale.low, pairs.scale.high
    edge = np.linspace(low, high, _HISTOGRAM_BINS + 1)
    # Rounding can bring a cosine slightly outside of [−1, 1], where np.histogram would drop it.
    score_P = np.clip(pairs.score_P, low, high)
    genuine, impostor = (np.histogram(score_P[kind], edge)[0] for kind in (pairs.same_P, ~pairs.same_P))
    return Histogram(edge, genuine, impostor)


def hardest_pairs(pairs: ScoredPairs) -> tuple[list[HardPair], list[HardPair]]:
    """Return the genuine pairs with the lowest scores and the impostor pairs with the highest, hardest first."""
    hardest = []
    for kind, sign in ((pairs.same_P, 1), (~pairs.same_P, -1)):
        index = np.flatnonzero(kind)
        score = sign * pairs.score_P[index]
        # A partition: IJB-C has 15 million impostor pairs, and a full sort would take seconds.
        kept = np.argpartition(score, _HARDEST)[:_HARDEST] if len(index) > _HARDEST else np.arange(len(index))
        kept = kept[np.argsort(score[kept], kind="stable")]
        hardest.append(
            [
                HardPair(
                    int(pair), int(pairs.first_P[pair]), int(pairs.second_P[pair]), float(pairs.score_P[pair])
                )
                for pair in index[kept]
            ]
        )
    return hardest[0], hardest[1]
