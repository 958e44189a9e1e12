"""Speed of the verification metrics: fold accuracy, IJB-C templates, bootstrap intervals, and lists of pairs.

The embeddings are random, because the time does not depend on their values.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import memory_mib, run, seconds_in_turn
from facetrain.verify.metrics.draws import Draws
from facetrain.verify.metrics.fold_accuracy import THRESHOLDS, fold_accuracy
from facetrain.verify.metrics.scored_pairs import ScoredPairs, pair_result
from facetrain.verify.metrics.templates import pool_templates, score_pairs
from facetrain.verify.sets.ijb import read_pair_list

# Sizes of IJB-C's 1:1 protocol.
IMAGES, TEMPLATES, ENROLLED, SUBJECTS = 469_375, 23_124, 3_531, 3_531
PAIRS = 15_658_489
_PAIR_LIST_BLOCKS = 100


class Part(StrEnum):
    """What is measured."""

    folds = "folds"
    """Accuracy over 10 folds, beside the published loop over folds and thresholds."""
    templates = "templates"
    """Embeddings of IJB-C's size to templates, scores, exact ROC and metrics."""
    intervals = "intervals"
    """The same with samples of the bootstrap."""
    pair_list = "pair-list"
    """Reading a list of 15.7 million pairs."""


def measure_verification(
    part: Part, pairs: int = 6000, rounds: int = 5, replicates: int = 100
) -> dict[str, Any]:
    """Measure a part: `folds` with `pairs` pairs, `intervals` with `replicates` samples of the bootstrap."""
    if part is Part.folds:
        return _measure_folds(pairs, rounds)
    if part is Part.pair_list:
        return _measure_pair_list()
    return _measure_templates(replicates if part is Part.intervals else 0)


def _looped_fold_accuracy(distance_P: np.ndarray, same_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return accuracies and thresholds by the published algorithm: every fold, every threshold, every pair."""
    accuracy, thresholds = [], []
    for test in np.array_split(np.arange(len(same_P)), 10):
        train = np.setdiff1d(np.arange(len(same_P)), test)
        correct = [np.mean((distance_P[train] < t) == same_P[train]) for t in THRESHOLDS]
        best = THRESHOLDS[int(np.argmax(correct))]
        thresholds.append(best)
        accuracy.append(np.mean((distance_P[test] < best) == same_P[test]))
    return np.array(accuracy), np.array(thresholds)


def _measure_folds(pairs: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    # As in LFW: 10 folds of 300 pairs of one person, then 300 of two; distances of a good model.
    same = np.arange(pairs) % 600 < 300
    distance = np.where(same, random.normal(0.9, 0.25, pairs), random.normal(1.9, 0.2, pairs)).clip(0, 4)
    ours, looped = fold_accuracy(distance, same), _looped_fold_accuracy(distance, same)
    calls = {
        "facetrain": lambda: fold_accuracy(distance, same),
        "loop": lambda: _looped_fold_accuracy(distance, same),
    }
    median = {name: statistics.median(seconds) for name, seconds in seconds_in_turn(calls, rounds).items()}
    return {
        "pairs": pairs,
        "facetrain_ms": 1e3 * median["facetrain"],
        "loop_ms": 1e3 * median["loop"],
        "ratio": median["loop"] / median["facetrain"],
        "equal": all(map(np.array_equal, (ours.accuracy_F, ours.threshold_F), looped)),
    }


def _measure_templates(replicates: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    embedding = random.standard_normal((IMAGES, 512), dtype=np.float32)
    template = np.append(np.arange(TEMPLATES), random.integers(0, TEMPLATES, IMAGES - TEMPLATES))
    medium, weight = random.integers(0, 40, IMAGES), random.random(IMAGES)
    subject = np.arange(TEMPLATES) % SUBJECTS
    first, second = random.integers(0, ENROLLED, PAIRS), random.integers(ENROLLED, TEMPLATES, PAIRS)
    same = subject[first] == subject[second]
    peak_before = memory_mib()
    start = time.perf_counter()
    _, unit = pool_templates(embedding, template, medium, weight)
    pooled = time.perf_counter()
    score = score_pairs(unit, unit, first, second)
    scored = time.perf_counter()
    pairs = ScoredPairs(score, same, first, second, subject)
    pair_result(pairs, protocol="templates", draws=Draws(replicates))
    end = time.perf_counter()
    return {
        "pairs": PAIRS,
        "replicates": replicates,
        "pool_s": pooled - start,
        "score_s": scored - pooled,
        "metrics_s": end - scored,
        "all_s": end - start,
        "peak_mib": memory_mib(),
        "peak_before_mib": peak_before,
    }


def _measure_pair_list() -> dict[str, Any]:
    random = np.random.default_rng(0)
    numbers = random.integers(0, 30_000, (PAIRS // _PAIR_LIST_BLOCKS, 2)).tolist()
    block = "".join(f"{a} {b} 0\n" for a, b in numbers)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.txt"
        with path.open("w") as file:
            for _ in range(_PAIR_LIST_BLOCKS):
                file.write(block)
        start = time.perf_counter()
        pairs = read_pair_list(path)
        return {"pairs": len(pairs), "s": time.perf_counter() - start, "peak_mib": memory_mib()}


if __name__ == "__main__":
    run(measure_verification)
