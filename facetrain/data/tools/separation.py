"""Separation of the identities of a dataset by a model: the error of its embeddings."""

# N images   D embedding

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.loading.sampler import permute
from facetrain.data.tools.similarity import compute_centers, leave_one_out_similarity, similarity_to_center

WEAK_EER, USELESS_EER = 0.05, 0.2
"""Equal error rates from which a model is weak for a dataset, and from which it cannot separate its identities."""


@dataclass(frozen=True)
class Separation:
    """Error of a model on a dataset, between an image's identity and another identity."""

    eer: float
    """Share of images below `threshold` to the center of their identity, and above it to the center of another one."""
    threshold: float
    """Cosine of an image and a center with equal shares of both errors."""

    @property
    def useless(self) -> bool:
        """Whether the model cannot separate the identities of the dataset."""
        return not self.eer < USELESS_EER

    def sentence(self) -> str:
        """Return the error and what follows from it."""
        line = f"this model separates the identities of this dataset with an EER of {self.eer:.2%}"
        if self.useless:
            return (
                f"{line}: it cannot separate them, or most labels are wrong; do not trust the faults, and use a "
                "stronger model"
            )
        if self.eer >= WEAK_EER:
            return (
                f"{line}: it is weak for this dataset, so only few faults are certain enough to be reported"
            )
        return f"{line}: one error in {round(1 / self.eer):,} comparisons" if self.eer > 0 else line


def measure_separation(embedding_ND: np.ndarray, label_N: np.ndarray) -> tuple[np.ndarray, Separation]:
    """Return each image's similarity to the other images of its identity, (N,), and the error of the model.

    NaN where an identity has one image. The error compares with one random other identity per image; it is 1 if there
    is nothing to compare.
    """
    count = int(label_N.max()) + 1
    centers = compute_centers(embedding_ND, label_N, count)
    genuine_N = leave_one_out_similarity(embedding_ND, label_N, centers)
    impostor_N = similarity_to_center(embedding_ND, random_other_labels(label_N), centers.unit_KD)
    genuine, impostor = (np.sort(cosine[np.isfinite(cosine)]) for cosine in (genuine_N, impostor_N))
    if not len(genuine) or not len(impostor):
        return genuine_N, Separation(1.0, 1.0)
    grid = np.linspace(-1, 1, 2001)
    rejected = np.searchsorted(genuine, grid) / len(genuine)
    accepted = 1 - np.searchsorted(impostor, grid) / len(impostor)
    # The larger error is smallest where they cross. The middle of a plateau has the same margin on both sides.
    error = np.maximum(rejected, accepted)
    best = np.flatnonzero(error <= error.min() + 1e-12)
    middle = best[len(best) // 2]
    return genuine_N, Separation(float((rejected[middle] + accepted[middle]) / 2), float(grid[middle]))


def random_other_labels(label_N: np.ndarray) -> np.ndarray:
    """Return a random other identity for each image, of those with images: (N,), −1 if there is none."""
    present, rank_N = np.unique(label_N, return_inverse=True)
    if len(present) < 2:
        return np.full(len(label_N), -1)
    shift_N = 1 + permute(np.arange(len(label_N)), len(label_N), key_of(0)) % (len(present) - 1)
    return present[(rank_N + shift_N) % len(present)]
