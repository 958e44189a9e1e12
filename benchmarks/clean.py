"""How many planted label errors `facetrain data clean` finds.

Three kinds of errors are planted in a dataset with correct labels: images under another person's name,
people split into two identities, and pairs of people merged into one.
"""

# N images   K identities

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import run
from facetrain.data.tools.clean import CleanReport, find_label_faults
from facetrain.data.tools.label_faults import (
    DUPLICATE_IDENTITY,
    MISLABELED_IMAGE,
    MIXED_IDENTITY,
    OUTLIER_IMAGE,
    apply_faults,
)
from facetrain.embeddings.embed_images import embed_input
from facetrain.errors import UsageError


@dataclass(frozen=True)
class PlantedErrors:
    """Labels with errors, and where the errors are."""

    label_N: np.ndarray
    """int64."""
    wrong: set[int]
    """Images under another person's name."""
    split: set[tuple[int, int]]
    """Pairs of identities that are one person."""
    merged: set[int]
    """Identities that are two people."""


def measure_label_cleaning(
    model: Path, dataset: Path, wrong: int = 60, people: int = 15, seeds: int = 3
) -> list[dict[str, Any]]:
    """Return the faults found in the dataset as it is, then one report per seed. The dataset is not changed.

    Args:
        model: model that embeds the images.
        dataset: dataset with correct labels.
        wrong: images to put under another person's name.
        people: people to split, and pairs of people to merge.
        seeds: number of repetitions with other errors.
    """
    embedded = embed_input(model, dataset)
    identities = int(embedded.label.max()) + 1
    if identities < 3 * people + 2:
        raise UsageError(
            f"{dataset}: has {identities:,} identities, and --people {people} needs {3 * people + 2:,}; "
            "use a smaller --people or a larger dataset"
        )
    unchanged = find_label_faults(embedded.embedding, embedded.label)
    assert unchanged.separation is not None, "it was measured"
    reports = [{"faults_unchanged": len(unchanged.faults), "eer": unchanged.separation.eer}]
    for seed in range(seeds):
        planted = plant_errors(embedded.label, seed, wrong=wrong, people=people)
        report = find_label_faults(embedded.embedding, planted.label_N)
        reports.append(score_cleaning(planted, report, embedded.label))
    return reports


def plant_errors(person_N: np.ndarray, seed: int, *, wrong: int, people: int) -> PlantedErrors:
    """Return labels with `wrong` images under other names, `people` people split, and as many pairs merged."""
    rng = np.random.default_rng(seed)
    count, label = int(person_N.max()) + 1, person_N.copy()
    chosen = rng.permutation(count)
    to_split, first, second, others = np.split(chosen, np.arange(1, 4) * people)
    split = set()
    for new_identity, person in enumerate(to_split.tolist(), start=count):
        images = rng.permutation(np.flatnonzero(person_N == person))
        label[images[: len(images) // 2]] = new_identity
        split.add((person, new_identity))
    for kept, merged in zip(first.tolist(), second.tolist(), strict=True):
        label[person_N == merged] = kept
    moved = rng.choice(np.flatnonzero(np.isin(person_N, others)), wrong, replace=False)
    for image in moved.tolist():
        label[image] = rng.choice(others[others != person_N[image]])
    return PlantedErrors(label, set(moved.tolist()), split, set(first.tolist()))


def score_cleaning(planted: PlantedErrors, report: CleanReport, person_N: np.ndarray) -> dict[str, Any]:
    """Return, for each kind of error, [planted errors that were found, other faults], and label accuracies."""
    images = {fault.image for fault in report.faults if fault.kind in (MISLABELED_IMAGE, OUTLIER_IMAGE)}
    same = {(fault.identity, fault.other) for fault in report.faults if fault.kind == DUPLICATE_IDENTITY}
    mixed = {fault.identity for fault in report.faults if fault.kind == MIXED_IDENTITY}
    label_N = apply_faults(planted.label_N, report.faults)  # also merges pairs of identities
    return {
        "wrong": [len(images & planted.wrong), len(images - planted.wrong)],
        "split": [len(same & planted.split), len(same - planted.split)],
        "merged": [len(mixed & planted.merged), len(mixed - planted.merged)],
        "correct_before": _correct_share(planted.label_N, person_N),
        "correct_after": _correct_share(label_N, person_N),
        "left_out": float((label_N < 0).mean()),
    }


def _correct_share(label_N: np.ndarray, person_N: np.ndarray) -> float:
    """Return the share of kept images that show the person of whom their identity has the most images."""
    kept = label_N >= 0
    table = np.zeros((label_N.max() + 1, person_N.max() + 1), np.int64)
    np.add.at(table, (label_N[kept], person_N[kept]), 1)
    return float((table[label_N[kept]].argmax(1) == person_N[kept]).mean())


if __name__ == "__main__":
    run(measure_label_cleaning)
