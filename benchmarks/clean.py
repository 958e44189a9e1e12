"""How many planted wrong labels `facetrain data clean` finds in a dataset with correct labels."""

# N images

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import run
from facetrain.data.tools.wrong_labels import find_wrong_labels
from facetrain.embeddings.embed_images import embed_input


def measure_label_cleaning(
    model: Path, dataset: Path, share: float = 0.05, seeds: int = 3
) -> list[dict[str, Any]]:
    """Return what is found in the dataset as it is, then one report per seed. The dataset is not changed.

    Args:
        model: model that embeds the images.
        dataset: dataset with correct labels.
        share: share of the images to put under another person's name.
        seeds: number of repetitions with other images.
    """
    embedded = embed_input(model, dataset)
    unchanged = find_wrong_labels(embedded.embedding, embedded.label)
    reports = [{"found_unchanged": len(unchanged.wrong), "eer": unchanged.separation.eer}]
    for seed in range(seeds):
        label_N, planted = plant_wrong_labels(embedded.label, seed, share)
        found = {one.image for one in find_wrong_labels(embedded.embedding, label_N).wrong}
        right = len(found & planted)
        reports.append({"precision": right / max(len(found), 1), "recall": right / max(len(planted), 1)})
    return reports


def plant_wrong_labels(label_N: np.ndarray, seed: int, share: float) -> tuple[np.ndarray, set[int]]:
    """Return labels with a share of random other ones, and the images that have them."""
    rng = np.random.default_rng(seed)
    count, label_N = int(label_N.max()) + 1, label_N.copy()
    planted = rng.choice(len(label_N), round(share * len(label_N)), replace=False)
    label_N[planted] = (label_N[planted] + rng.integers(1, count, len(planted))) % count
    return label_N, set(planted.tolist())


if __name__ == "__main__":
    run(measure_label_cleaning)
