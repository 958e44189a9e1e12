"""Pairs that a model has scored, and all that their scores say."""

# P pairs   N images or templates   R draws of subjects

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.verify import bootstrap
from facetrain.verify.fold_accuracy import FoldAccuracy, FoldSearch, grid_roc
from facetrain.verify.pair_blocks import every_subject_once
from facetrain.verify.result import HardPair, Histogram, Result
from facetrain.verify.roc import (
    FARS,
    Roc,
    auc,
    eer_threshold,
    equal_error_rate,
    roc,
    tar_at_far,
    threshold_at,
)

REPLICATES = 1000
FOLDS = 10
_HARDEST = 50
_CELLS = 200


@dataclass(frozen=True)
class ScoredPairs:
    """What is compared with what, how alike the model finds it, and whose it is."""

    score_P: np.ndarray
    """Cosine similarity."""
    same_P: np.ndarray
    first_P: np.ndarray
    second_P: np.ndarray
    """The numbers of the two images or templates."""
    subject_N: np.ndarray
    """The subject of each image or template, numbered from 0 without gaps."""

    @property
    def subjects(self) -> int:
        """How many there are."""
        return int(self.subject_N.max()) + 1 if len(self.subject_N) else 0

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """The subject of either side of each pair."""
        return self.subject_N[self.first_P], self.subject_N[self.second_P]


def pair_result(pairs: ScoredPairs, *, protocol: str, replicates: int = REPLICATES, seed: int = 0) -> Result:
    """Return the curve and its numbers, with intervals over subjects, the histogram and the hardest pairs."""
    curve = roc(pairs.score_P, pairs.same_P)
    genuine = int(pairs.same_P.sum())
    counts = {"pairs": len(pairs.same_P), "genuine": genuine, "impostors": len(pairs.same_P) - genuine}
    result = Result(protocol, {name: float(count) for name, count in counts.items()}, subjects=pairs.subjects)
    result.histogram = histogram(pairs)
    result.hardest_genuine, result.hardest_impostors = hardest(pairs)
    if curve is None:
        result.needs["auc"] = "needs pairs of one person and pairs of two; all pairs are of one kind"
        return result
    result.curve = curve
    _add_rates(result, curve)
    add_replicates(result, _curve_replicates(pairs, result, replicates, seed))
    return result


def add_fold_accuracy(
    result: Result, pairs: ScoredPairs, *, replicates: int = REPLICATES, seed: int = 0
) -> None:
    """Add the accuracy by the 10-fold protocol and the published grid, where the order of the pairs makes folds."""
    found, replicate = bootstrap_fold_accuracy(pairs, replicates=replicates, seed=seed)
    distance_P = 2 - 2 * pairs.score_P
    result.folds = found
    result.grid = grid_roc(distance_P, pairs.same_P, folds=len(found.accuracy_F))
    result.metrics |= {
        "accuracy": found.mean,
        "accuracy_std": found.std,
        "threshold": float(found.threshold_F.mean()),
    }
    add_replicates(result, replicate)


def bootstrap_fold_accuracy(
    pairs: ScoredPairs, *, replicates: int = REPLICATES, seed: int = 0
) -> tuple[FoldAccuracy, dict[str, np.ndarray]]:
    """Return the accuracy of the folds, and accuracy, its spread and the threshold in every draw of subjects."""
    folds = min(FOLDS, len(pairs.same_P))
    search = FoldSearch(2 - 2 * pairs.score_P, pairs.same_P, folds, *pairs.sides)
    accuracy, threshold = search.accuracy(every_subject_once(pairs.subjects))
    drawn: list[tuple[np.ndarray, ...]] = []
    for drawn_RS in bootstrap.draw_subjects(pairs.subjects, replicates, pairs=len(pairs.same_P), seed=seed):
        accuracy_RF, threshold_RF = search.accuracy(drawn_RS)
        accuracy_RF = np.where(np.isnan(accuracy_RF).all(1, keepdims=True), 0, accuracy_RF)
        drawn.append((np.nanmean(accuracy_RF, 1), np.nanstd(accuracy_RF, 1), threshold_RF.mean(1)))
    names = ("accuracy", "accuracy_std", "threshold")
    replicate = {
        name: np.concatenate(part) for name, part in zip(names, zip(*drawn, strict=True), strict=False)
    }
    return FoldAccuracy(accuracy[0], threshold[0]), replicate


def add_replicates(result: Result, replicates: dict[str, np.ndarray]) -> None:
    """Keep every draw's numbers, and the interval that they span."""
    result.replicates |= replicates
    for name, replicate_R in replicates.items():
        found = bootstrap.interval(replicate_R, result.subjects)
        if found is not None:
            result.interval[name] = found


def _add_rates(result: Result, curve: Roc) -> None:
    result.metrics |= {"auc": auc(curve), "eer": equal_error_rate(curve)}
    result.threshold["eer"] = eer_threshold(curve)
    for far in FARS:
        name = f"tar@{far:.0e}"
        result.metrics[name] = tar_at_far(curve, far)
        if result.metrics[name] is None:
            result.needs[name] = f"needs {round(1 / far):,} impostor pairs; there are {curve.impostors:,}"
        else:
            result.threshold[f"{far:.0e}"] = threshold_at(curve, far)


def _curve_replicates(
    pairs: ScoredPairs, result: Result, replicates: int, seed: int
) -> dict[str, np.ndarray]:
    curve = bootstrap.WeightedCurve(pairs.score_P, pairs.same_P, *pairs.sides)
    told = [far for far in FARS if result.metrics[f"tar@{far:.0e}"] is not None]
    drawn: dict[str, list[np.ndarray]] = {}
    for drawn_RS in bootstrap.draw_subjects(pairs.subjects, replicates, pairs=len(pairs.same_P), seed=seed):
        far_RV, tar_RV = curve.rates(drawn_RS)
        drawn.setdefault("auc", []).append(bootstrap.areas(far_RV, tar_RV))
        drawn.setdefault("eer", []).append(bootstrap.equal_error_rates(far_RV, tar_RV))
        for far in told:
            found = bootstrap.true_accept_rates(far_RV, tar_RV, far)
            drawn.setdefault(f"tar@{far:.0e}", []).append(found)
    return {name: np.concatenate(part) for name, part in drawn.items()}


def histogram(pairs: ScoredPairs, cells: int = _CELLS) -> Histogram:
    """Count the pairs of either kind in equal ranges of the similarity from −1 to 1."""
    edge = np.linspace(-1, 1, cells + 1)
    score_P = np.clip(pairs.score_P, -1, 1)
    genuine, impostor = (np.histogram(score_P[kind], edge)[0] for kind in (pairs.same_P, ~pairs.same_P))
    return Histogram(edge, genuine, impostor)


def hardest(pairs: ScoredPairs, count: int = _HARDEST) -> tuple[list[HardPair], list[HardPair]]:
    """Return the genuine pairs that are least alike, and the impostor pairs that are most."""
    found = []
    for kind, sign in ((pairs.same_P, 1), (~pairs.same_P, -1)):
        number = np.flatnonzero(kind)
        score = sign * pairs.score_P[number]
        kept = np.argpartition(score, count)[:count] if len(number) > count else np.arange(len(number))
        kept = kept[np.argsort(score[kept], kind="stable")]
        found.append([_hard(pairs, int(pair)) for pair in number[kept]])
    return found[0], found[1]


def _hard(pairs: ScoredPairs, pair: int) -> HardPair:
    first, second = int(pairs.first_P[pair]), int(pairs.second_P[pair])
    return HardPair(pair, first, second, float(pairs.score_P[pair]))
