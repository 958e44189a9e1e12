"""Verification beside the usual ways: `python benchmarks/verification.py folds|templates|intervals|pairs-file`.

folds       the 10-fold search against the loop over folds and thresholds, same numbers
templates   embeddings of a set of IJB-C's size → templates → 15.7 million scores → exact ROC and its numbers
intervals   the same with draws of the bootstrap
pairs-file  reading a list of 15.7 million pairs
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from facetrain.verify.fold_accuracy import THRESHOLDS, FoldAccuracy, fold_accuracy
from facetrain.verify.ijb import read_pair_list
from facetrain.verify.scored_pairs import ScoredPairs, pair_result
from facetrain.verify.templates import pool_templates, score_pairs

# IJB-C: images, templates, enrolled templates, subjects, pairs and those of one person.
IMAGES, TEMPLATES, ENROLLED, SUBJECTS = 469_375, 23_124, 3_531, 3_531
PAIRS, GENUINE = 15_658_489, 19_557


def double_loop(distance: np.ndarray, same: np.ndarray) -> FoldAccuracy:
    """Search as published code does: every fold, every threshold, every pair."""
    accuracy, chosen = [], []
    for test in np.array_split(np.arange(len(same)), 10):
        train = np.setdiff1d(np.arange(len(same)), test)
        right = [np.mean((distance[train] < t) == same[train]) for t in THRESHOLDS]
        best = THRESHOLDS[int(np.argmax(right))]
        chosen.append(best)
        accuracy.append(np.mean((distance[test] < best) == same[test]))
    return FoldAccuracy(np.array(accuracy), np.array(chosen))


def seconds(work: Callable[[], object], rounds: int) -> float:
    took = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return float(np.median(took))


def folds(pairs: int, rounds: int) -> dict[str, float | bool]:
    random = np.random.default_rng(0)
    same = np.arange(pairs) % 600 < 300
    distance = np.where(same, random.normal(0.9, 0.25, pairs), random.normal(1.9, 0.2, pairs)).clip(0, 4)
    ours, usual = fold_accuracy(distance, same), double_loop(distance, same)
    ours_s = seconds(lambda: fold_accuracy(distance, same), 10 * rounds)
    usual_s = seconds(lambda: double_loop(distance, same), rounds)
    equal = np.array_equal(ours.accuracy_F, usual.accuracy_F) and np.array_equal(
        ours.threshold_F, usual.threshold_F
    )
    return {
        "pairs": pairs,
        "ours_ms": 1e3 * ours_s,
        "loop_ms": 1e3 * usual_s,
        "ratio": usual_s / ours_s,
        "equal": equal,
    }


def templates(replicates: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    embedding = random.standard_normal((IMAGES, 512), dtype=np.float32)
    template = np.append(np.arange(TEMPLATES), random.integers(0, TEMPLATES, IMAGES - TEMPLATES))
    medium, weight = random.integers(0, 40, IMAGES), random.random(IMAGES)
    subject = np.arange(TEMPLATES) % SUBJECTS
    first, second = random.integers(0, ENROLLED, PAIRS), random.integers(ENROLLED, TEMPLATES, PAIRS)
    same = subject[first] == subject[second]
    made = peak_gib()
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
        "numbers_s": end - scored,
        "all_s": end - start,
        "peak_gib": peak_gib(),
        "peak_before_gib": made,
    }


def pairs_file(pairs: int) -> dict[str, float]:
    random = np.random.default_rng(0)
    block = "".join(f"{a} {b} 0\n" for a, b in random.integers(0, 30_000, (pairs // 100, 2)).tolist())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "pairs.txt"
        with path.open("w") as file:
            for _ in range(100):
                file.write(block)
        start = time.perf_counter()
        found = read_pair_list(path)
        return {"pairs": len(found), "s": time.perf_counter() - start, "peak_gib": peak_gib()}


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["folds", "templates", "intervals", "pairs-file"])
    parser.add_argument("--pairs", type=int, default=6000, help="of the 10-fold search")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicates", type=int, default=100)
    given = parser.parse_args(argv)
    found = {
        "folds": lambda: folds(given.pairs, given.rounds),
        "templates": lambda: templates(0),
        "intervals": lambda: templates(given.replicates),
        "pairs-file": lambda: pairs_file(PAIRS),
    }[given.what]()
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
