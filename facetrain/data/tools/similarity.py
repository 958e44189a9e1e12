"""How alike images and identities are, from the unit embeddings of a model.

Embeddings may lie in a file that is mapped into memory: they are gone through a stretch at a time.
"""

# N images   K identities   D embedding

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from facetrain.errors import DataError

_AT_ONCE = 1 << 25
"""Numbers held at once, similarities or embeddings: 128 MiB."""


@dataclass(frozen=True)
class Centers:
    """The sums and the directions of the embeddings of each identity."""

    total_KD: np.ndarray
    unit_KD: np.ndarray
    count_K: np.ndarray
    spread: float
    """Median length of an identity's mean embedding, of those with two images or more: 1 if all are equal."""


def check_labeled(label_N: np.ndarray) -> None:
    """Refuse images without identities.

    Raises:
        DataError: a label is below 0.
    """
    if not len(label_N) or label_N.min() < 0:
        raise DataError("these images have no identities; give a dataset: records, or a folder per identity")


def find_centers(embedding_ND: np.ndarray, label_N: np.ndarray, num_classes: int) -> Centers:
    """Add up unit embeddings float32 (N, D) of each identity; one without images has a center of zeros.

    Rows with a label of −1 are left out.
    """
    total = np.zeros((num_classes, embedding_ND.shape[1]), np.float32)
    for part in _stretches(len(embedding_ND), embedding_ND.shape[1]):
        order = np.argsort(label_N[part], kind="stable")
        order = order[np.count_nonzero(label_N[part] < 0) :]
        if len(order):
            present, starts = np.unique(label_N[part][order], return_index=True)
            total[present] += np.add.reduceat(embedding_ND[part][order], starts, axis=0)
    count = np.bincount(label_N[label_N >= 0], minlength=num_classes)
    length = np.linalg.norm(total, axis=1)
    several = count > 1
    spread = float(np.median(length[several] / count[several])) if several.any() else 1.0
    return Centers(total, total / np.maximum(length, 1e-12)[:, None], count, spread)


def own_similarity(embedding_ND: np.ndarray, label_N: np.ndarray, centers: Centers) -> np.ndarray:
    """Compare each image with the center of the others of its identity: (N,), NaN where it is the only one."""
    cosine = np.empty(len(embedding_ND), np.float32)
    for part in _stretches(len(embedding_ND), embedding_ND.shape[1]):
        others = centers.total_KD[label_N[part]] - embedding_ND[part]
        length = np.maximum(np.linalg.norm(others, axis=1), 1e-12)
        cosine[part] = np.einsum("nd,nd->n", embedding_ND[part], others) / length
    return np.where(centers.count_K[label_N] > 1, cosine, np.nan)


def center_similarity(embedding_ND: np.ndarray, label_N: np.ndarray, unit_KD: np.ndarray) -> np.ndarray:
    """Compare each image with the center of its identity: (N,)."""
    cosine = np.empty(len(embedding_ND), np.float32)
    for part in _stretches(len(embedding_ND), embedding_ND.shape[1]):
        cosine[part] = np.einsum("nd,nd->n", embedding_ND[part], unit_KD[label_N[part]])
    return cosine


def best_other(
    embedding_ND: np.ndarray, label_N: np.ndarray, unit_KD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each row the most similar center that is not its own, and how similar: (N,) each.

    A label of −1 has no center of its own.
    """
    identity, cosine = np.empty(len(embedding_ND), np.int64), np.empty(len(embedding_ND), np.float32)
    for part in _stretches(len(embedding_ND), len(unit_KD)):
        similar = embedding_ND[part] @ unit_KD.T
        known = np.flatnonzero(label_N[part] >= 0)
        similar[known, label_N[part][known]] = -2
        identity[part] = similar.argmax(1)
        cosine[part] = similar.max(1)
    return identity, cosine


def telling_apart(own_N: np.ndarray, other_N: np.ndarray) -> float:
    """Find the similarity that best tells images' own identities from their most similar other ones."""
    grid = np.arange(0.05, 0.96, 0.005)
    own, other = np.sort(own_N[np.isfinite(own_N)]), np.sort(other_N)
    right = 1 - np.searchsorted(own, grid) / max(len(own), 1) + np.searchsorted(other, grid) / len(other)
    best = np.flatnonzero(right >= right.max() - 1e-9)
    return float(grid[best[len(best) // 2]])


def _stretches(rows: int, width: int) -> Iterator[slice]:
    """Part rows so that each part has `_AT_ONCE` numbers, `width` in a row."""
    step = max(_AT_ONCE // width, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)
