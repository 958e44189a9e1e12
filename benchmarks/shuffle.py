"""How much of a full shuffle block mode keeps, on a dataset whose images are sorted by identity."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import numpy as np

from facetrain.data.sampler import GlobalSampler


def measure(images: int, per_identity: int, batch_size: int, mode: str, steps: int) -> dict[str, float]:
    """Mean over batches: identities met, same-identity pairs, identities shared with the batch before."""
    order = GlobalSampler(images, seed=1, global_batch_size=batch_size, mode=mode)
    met, pairs, shared, before = [], [], [], None
    for step in np.linspace(0, order.steps_per_epoch - 2, steps).astype(int).tolist():
        before = np.unique(order.batch(step) // per_identity)
        identity, count = np.unique(order.batch(step + 1) // per_identity, return_counts=True)
        met.append(len(identity))
        pairs.append((count * (count - 1) // 2).sum())
        shared.append(len(np.intersect1d(before, identity)))
    return {
        "identities_in_a_batch": float(np.mean(met)),
        "pairs_of_one_identity_in_a_batch": float(np.mean(pairs)),
        "identities_shared_with_the_batch_before": float(np.mean(shared)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=5_179_510)
    parser.add_argument("--per-identity", type=int, default=55)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    given = vars(parser.parse_args(argv))
    print(json.dumps({mode: measure(mode=mode, **given) for mode in ("full", "blocks")}, indent=2))


if __name__ == "__main__":
    main()
