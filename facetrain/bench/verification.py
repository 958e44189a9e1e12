"""Verification benchmarks: fold accuracy, IJB-C templates, bootstrap intervals, and lists of pairs."""

# N images   P pairs

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from facetrain.telemetry.memory import peak_gib
from facetrain.verify.metrics.fold_accuracy import THRESHOLDS, FoldAccuracy, fold_accuracy
from facetrain.verify.metrics.scored_pairs import ScoredPairs, pair_result
from facetrain.verify.metrics.templates import pool_templates, score_pairs
from facetrain.verify.sets.ijb import read_pair_list

PARTS = ("folds", "templates", "intervals", "pair-list")
# Sizes of IJB-C's 1:1 protocol.
IMAGES, TEMPLATES, ENROLLED, SUBJECTS = 469_375, 23_124, 3_531, 3_531
PAIRS = 15_658_489
_PAIR_LIST_BLOCKS = 100
_CPU = torch.device("cpu")


def measure_verification(part: str, *, pairs: int, rounds: int, replicates: int) -> dict[str, Any]:
    """Measure one of PARTS.

    - `folds`: accuracy over 10 folds, beside the published loop over folds and thresholds.
    - `templates`: embeddings of IJB-C's size to templates, scores, exact ROC and metrics.
    - `intervals`: the same with `replicates` samples of the bootstrap.
    - `pair-list`: reading a list of 15.7 million pairs.

    Args:
        part: name from PARTS.
        pairs: pairs of `folds`.
        rounds: repetitions of `folds`; the report has the medians.
        replicates: bootstrap samples of `intervals`.
    """
    measure: dict[str, Callable[[], dict[str, Any]]] = {
        "folds": lambda: _measure_folds(pairs, rounds),
        "templates": lambda: _measure_templates(0),
        "intervals": lambda: _measure_templates(replicates),
        "pair-list": lambda: _measure_pair_list(PAIRS),
    }
    return measure[part]()


def _looped_fold_accuracy(distance_P: np.ndarray, same_P: np.ndarray) -> FoldAccuracy:
    """Return fold accuracies by the published algorithm: every fold, every threshold, every pair."""
    accuracy, thresholds = [], []
    for test in np.array_split(np.arange(len(same_P)), 10):
        train = np.setdiff1d(np.arange(len(same_P)), test)
        correct = [np.mean((distance_P[train] < t) == same_P[train]) for t in THRESHOLDS]
        best = THRESHOLDS[int(np.argmax(correct))]
        thresholds.append(best)
        accuracy.append(np.mean((distance_P[test] < best) == same_P[test]))
    return FoldAccuracy(np.array(accuracy), np.array(thresholds))


def _median_seconds(work: Callable[[], object], rounds: int) -> float:
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _measure_folds(pairs: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    # As in LFW: 10 folds of 300 pairs of one person, then 300 of two; distances of a good model.
    same = np.arange(pairs) % 600 < 300
    distance = np.where(same, random.normal(0.9, 0.25, pairs), random.normal(1.9, 0.2, pairs)).clip(0, 4)
    ours, looped = fold_accuracy(distance, same), _looped_fold_accuracy(distance, same)
    facetrain_s = _median_seconds(lambda: fold_accuracy(distance, same), 10 * rounds)
    loop_s = _median_seconds(lambda: _looped_fold_accuracy(distance, same), rounds)
    equal = np.array_equal(ours.accuracy_F, looped.accuracy_F) and np.array_equal(
        ours.threshold_F, looped.threshold_F
    )
    return {
        "pairs": pairs,
        "facetrain_ms": 1e3 * facetrain_s,
        "loop_ms": 1e3 * loop_s,
        "ratio": loop_s / facetrain_s,
        "equal": equal,
    }


def _measure_templates(replicates: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    embedding = random.standard_normal((IMAGES, 512), dtype=np.float32)
    template = np.append(np.arange(TEMPLATES), random.integers(0, TEMPLATES, IMAGES - TEMPLATES))
    medium, weight = random.integers(0, 40, IMAGES), random.random(IMAGES)
    subject = np.arange(TEMPLATES) % SUBJECTS
    first, second = random.integers(0, ENROLLED, PAIRS), random.integers(ENROLLED, TEMPLATES, PAIRS)
    same = subject[first] == subject[second]
    peak_before = peak_gib(_CPU)
    start = time.perf_counter()
    _, unit = pool_templates(embedding, template, medium, weight)
    pooled = time.perf_counter()
    score = score_pairs(unit, first, second)
    scored = time.perf_counter()
    pairs = ScoredPairs(score, same, first, second, subject)
    pair_result(pairs, protocol="templates", replicates=replicates)
    end = time.perf_counter()
    return {
        "pairs": PAIRS,
        "replicates": replicates,
        "pool_s": pooled - start,
        "score_s": scored - pooled,
        "metrics_s": end - scored,
        "all_s": end - start,
        "peak_gib": peak_gib(_CPU),
        "peak_before_gib": peak_before,
    }


def _measure_pair_list(pairs: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    numbers = random.integers(0, 30_000, (pairs // _PAIR_LIST_BLOCKS, 2)).tolist()
    block = "".join(f"{a} {b} 0\n" for a, b in numbers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.txt"
        with path.open("w") as file:
            for _ in range(_PAIR_LIST_BLOCKS):
                file.write(block)
        start = time.perf_counter()
        found = read_pair_list(path)
        return {"pairs": len(found), "s": time.perf_counter() - start, "peak_gib": peak_gib(_CPU)}
