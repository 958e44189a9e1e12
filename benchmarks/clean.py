"""What `facetrain data clean` finds of faults planted into right labels: `python -m benchmarks.clean MODEL DATASET`.

For each seed: images under another's name, people cut into two identities, pairs of people under one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.tools.clean import (
    DUPLICATE_IDENTITY,
    MISLABELED_IMAGE,
    MIXED_IDENTITY,
    OUTLIER_IMAGE,
    CleanReport,
    find_label_faults,
)
from facetrain.verify.image_embeddings import embed_input


@dataclass(frozen=True)
class Planted:
    """Labels with faults, and which."""

    label_N: np.ndarray
    wrong: set[int]
    """Images under another's name."""
    cut: set[tuple[int, int]]
    """Identities that are one person."""
    joined: set[int]
    """Identities that are two people."""


def plant(person_N: np.ndarray, seed: int, *, wrong: int, people: int) -> Planted:
    """Plant `wrong` images under other names, cut `people` people in two, and join as many pairs."""
    rng = np.random.default_rng(seed)
    count, label = int(person_N.max()) + 1, person_N.copy()
    chosen = rng.permutation(count)
    halved, first, second, others = np.split(chosen, np.arange(1, 4) * people)
    cut = set()
    for fresh, person in enumerate(halved.tolist(), start=count):
        images = rng.permutation(np.flatnonzero(person_N == person))
        label[images[: len(images) // 2]] = fresh
        cut.add((person, fresh))
    for one, other in zip(first.tolist(), second.tolist(), strict=True):
        label[person_N == other] = one
    moved = rng.choice(np.flatnonzero(np.isin(person_N, others)), wrong, replace=False)
    for image in moved.tolist():
        label[image] = rng.choice(others[others != person_N[image]])
    return Planted(label, set(moved.tolist()), cut, set(first.tolist()))


def judge(planted: Planted, report: CleanReport, person_N: np.ndarray) -> dict[str, Any]:
    """Count what was found of what was planted, and what was found beside it."""
    images = {one.image for one in report.faults if one.kind in (MISLABELED_IMAGE, OUTLIER_IMAGE)}
    same = {(one.identity, one.other) for one in report.faults if one.kind == DUPLICATE_IDENTITY}
    mixed = {one.identity for one in report.faults if one.kind == MIXED_IDENTITY}
    return {
        "wrong": [len(images & planted.wrong), len(images - planted.wrong)],
        "cut": [len(same & planted.cut), len(same - planted.cut)],
        "joined": [len(mixed & planted.joined), len(mixed - planted.joined)],
        "right_before": _right(planted.label_N, person_N),
        "right_after": _right(report.label_N, person_N),
        "left_out": float((report.label_N < 0).mean()),
    }


def _right(label_N: np.ndarray, person_N: np.ndarray) -> float:
    """Return the share of images, of those kept, that are of the person of whom their identity has most."""
    kept = label_N >= 0
    table = np.zeros((label_N.max() + 1, person_N.max() + 1), np.int64)
    np.add.at(table, (label_N[kept], person_N[kept]), 1)
    return float((table[label_N[kept]].argmax(1) == person_N[kept]).mean())


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("dataset", type=Path, help="with right labels")
    parser.add_argument("--wrong", type=int, default=60, help="images under another's name")
    parser.add_argument("--people", type=int, default=15, help="people cut in two, and pairs joined")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(argv)
    found = embed_input(options.model, options.dataset)
    as_it_is = find_label_faults(found.embedding, found.label)
    print(json.dumps({"as it is": len(as_it_is.faults), "threshold": as_it_is.threshold}))
    for seed in range(options.seeds):
        planted = plant(found.label, seed, wrong=options.wrong, people=options.people)
        print(json.dumps(judge(planted, find_label_faults(found.embedding, planted.label_N), found.label)))


if __name__ == "__main__":
    main()
