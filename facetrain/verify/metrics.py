"""Every number that a set of embedded pairs gives."""

# P pairs   D embedding

from __future__ import annotations

import numpy as np

from facetrain.verify.folds import fold_accuracy, squared_distances
from facetrain.verify.roc import FARS, auc, equal_error_rate, roc, tar_at_far


def verification_metrics(embedding: np.ndarray, same_P: np.ndarray, *, folds: int = 10) -> dict[str, float]:
    """Score embeddings (2P, D), rows 2i and 2i+1 of pair i.

    `accuracy` and `accuracy_std` follow the 10-fold protocol, `threshold` is the mean of the folds'
    on the squared distance. `auc`, `eer` and `tar@…` are exact, from sorted scores; what the pairs are
    too few for is left out. `pairs` says how many they are.
    """
    distance_P = squared_distances(np.asarray(embedding, dtype=np.float64))
    found = fold_accuracy(distance_P, same_P, folds=min(folds, len(same_P)))
    metrics = {
        "accuracy": found.mean,
        "accuracy_std": found.std,
        "threshold": float(found.threshold_F.mean()),
        "pairs": float(len(same_P)),
    }
    curve = roc(-distance_P, same_P)
    if curve is not None:
        metrics |= {"auc": auc(curve), "eer": equal_error_rate(curve)}
        rates = {f"tar@{far:.0e}": tar_at_far(curve, far) for far in FARS}
        metrics |= {name: rate for name, rate in rates.items() if rate is not None}
    return metrics
