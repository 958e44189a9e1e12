"""How well block shuffling (`data.shuffle: blocks`) mixes identities, beside a full shuffle."""

from __future__ import annotations

import numpy as np

from benchmarks.common import run
from facetrain.data.loading.sampler import GlobalSampler, SampleOrder


def measure_shuffle(
    images: int = 5_179_510, images_per_identity: int = 55, batch_size: int = 1024, steps: int = 200
) -> dict[str, dict[str, float]]:
    """Return statistics of batches, means over `steps` batches of one epoch. The defaults are the sizes of MS1MV3."""
    report = {}
    for mode in ("full", "blocks"):
        sampler = GlobalSampler(images, SampleOrder(seed=1, global_batch_size=batch_size, mode=mode))
        identities, pairs, shared = [], [], []
        for step in np.linspace(0, sampler.steps_per_epoch - 2, steps).astype(int).tolist():
            before = np.unique(sampler.batch(step)[0] // images_per_identity)
            identity, count = np.unique(sampler.batch(step + 1)[0] // images_per_identity, return_counts=True)
            identities.append(len(identity))
            pairs.append((count * (count - 1) // 2).sum())
            shared.append(len(np.intersect1d(before, identity)))
        report[mode] = {
            "identities_per_batch": float(np.mean(identities)),
            "same_identity_pairs_per_batch": float(np.mean(pairs)),
            "identities_shared_with_the_batch_before": float(np.mean(shared)),
        }
    return report


if __name__ == "__main__":
    run(measure_shuffle)
