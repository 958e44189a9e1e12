"""Shuffle benchmark: how well block shuffling mixes a dataset whose images are sorted by identity."""

from __future__ import annotations

import numpy as np

from facetrain.data.sampler import GlobalSampler


def measure_shuffle(
    *, images: int, images_per_identity: int, batch_size: int, steps: int
) -> dict[str, dict[str, float]]:
    """Return the statistics of batches under `full` and `blocks`, means over `steps` batches of one epoch."""
    return {
        mode: _batch_statistics(images, images_per_identity, batch_size, mode, steps)
        for mode in ("full", "blocks")
    }


def _batch_statistics(
    images: int, images_per_identity: int, batch_size: int, mode: str, steps: int
) -> dict[str, float]:
    order = GlobalSampler(images, seed=1, global_batch_size=batch_size, mode=mode)
    identities, pairs, shared = [], [], []
    for step in np.linspace(0, order.steps_per_epoch - 2, steps).astype(int).tolist():
        before = np.unique(order.batch(step) // images_per_identity)
        identity, count = np.unique(order.batch(step + 1) // images_per_identity, return_counts=True)
        identities.append(len(identity))
        pairs.append((count * (count - 1) // 2).sum())
        shared.append(len(np.intersect1d(before, identity)))
    return {
        "identities_per_batch": float(np.mean(identities)),
        "same_identity_pairs_per_batch": float(np.mean(pairs)),
        "identities_shared_with_the_batch_before": float(np.mean(shared)),
    }
