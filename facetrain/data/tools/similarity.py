"""Cosine similarities between images and identity centers, and how well they separate the identities of a dataset.

The embeddings may be a memory-mapped file: the functions read them in blocks of 128 MiB.
"""

# N images   K identities   D embedding

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from facetrain.data.loading.sampler import sample_numbers
from facetrain.text import percent

_BLOCK_NUMBERS = 1 << 25
"""float32 numbers in memory at a time, embeddings or similarities: 128 MiB."""
WEAK_EER, USELESS_EER = 0.05, 0.2
"""Equal error rates from which a model is weak for a dataset, and from which it cannot separate its identities."""


class SelectedRows:
    """Rows of a mapped file, which are read in blocks: a copy of nearly all of them would fill the memory."""

    def __init__(self, embedding_ND: np.ndarray, rows: np.ndarray) -> None:
        self._embedding_ND, self._rows = embedding_ND, rows
        self.shape = (len(rows), embedding_ND.shape[1])

    def __getitem__(self, block: slice) -> np.ndarray:
        return self._embedding_ND[self._rows[block]]


UnitRows = np.ndarray | SelectedRows
"""Embeddings, float32 (N, D)."""


@dataclass(frozen=True)
class IdentityCenters:
    """Sum and direction of the embeddings of each identity."""

    total_KD: np.ndarray
    unit_KD: np.ndarray
    """Unit rows; zeros for an identity without images."""
    count_K: np.ndarray


def compute_centers(embedding_ND: UnitRows, label_N: np.ndarray, num_classes: int) -> IdentityCenters:
    """Compute the centers of all identities."""
    total = np.zeros((num_classes, embedding_ND.shape[1]), np.float32)
    for block in _blocks(*embedding_ND.shape):
        order = np.argsort(label_N[block], kind="stable")
        present, starts = np.unique(label_N[block][order], return_index=True)
        total[present] += np.add.reduceat(embedding_ND[block][order], starts, axis=0)
    count = np.bincount(label_N, minlength=num_classes)
    length = np.linalg.norm(total, axis=1)
    return IdentityCenters(total, total / np.maximum(length, 1e-12)[:, None], count)


def leave_one_out_similarity(
    embedding_ND: UnitRows, label_N: np.ndarray, centers: IdentityCenters
) -> np.ndarray:
    """Return each image's similarity to the center of the other images of its identity: (N,), NaN if there are none."""
    cosine = np.empty(len(label_N), np.float32)
    for block in _blocks(*embedding_ND.shape):
        embedding_BD = embedding_ND[block]
        others = centers.total_KD[label_N[block]] - embedding_BD
        length = np.maximum(np.linalg.norm(others, axis=1), 1e-12)
        cosine[block] = np.einsum("nd,nd->n", embedding_BD, others) / length
    return np.where(centers.count_K[label_N] > 1, cosine, np.nan)


def similarity_to_center(embedding_ND: UnitRows, label_N: np.ndarray, unit_KD: np.ndarray) -> np.ndarray:
    """Return each image's similarity to the center of its identity: (N,)."""
    cosine = np.empty(len(label_N), np.float32)
    for block in _blocks(*embedding_ND.shape):
        cosine[block] = np.einsum("nd,nd->n", embedding_ND[block], unit_KD[label_N[block]])
    return cosine


def nearest_image(embedding_ND: np.ndarray, label_N: np.ndarray, identity_N: np.ndarray) -> np.ndarray:
    """Return each image's similarity to the most similar other image of an identity: (N,), NaN if there is none.

    Args:
        embedding_ND: unit rows, float32.
        label_N: label of each image.
        identity_N: label of the images that each image is compared with.
    """
    cosine = np.full(len(embedding_ND), np.nan, np.float32)
    by_label, by_identity = np.argsort(label_N, kind="stable"), np.argsort(identity_N, kind="stable")
    sorted_label = label_N[by_label]
    for rows in np.split(by_identity, np.flatnonzero(np.diff(identity_N[by_identity])) + 1):
        first, end = np.searchsorted(sorted_label, [identity_N[rows[0]], identity_N[rows[0]] + 1])
        images = by_label[first:end]
        if not len(images):
            continue
        embedding = embedding_ND[images]
        for block in _blocks(len(rows), max(embedding.shape)):
            similar = embedding_ND[rows[block]] @ embedding.T
            similar[rows[block][:, None] == images] = np.nan
            cosine[rows[block]] = np.fmax.reduce(similar, axis=1)
    return cosine


def nearest_other_center(
    embedding_ND: np.ndarray, label_N: np.ndarray, unit_KD: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most similar center of another identity for each row, and the similarity: (N,) each."""
    identity, cosine = np.empty(len(embedding_ND), np.int64), np.empty(len(embedding_ND), np.float32)
    for block in _blocks(len(embedding_ND), len(unit_KD)):
        similar = embedding_ND[block] @ unit_KD.T
        similar[np.arange(len(similar)), label_N[block]] = -2  # below every cosine
        identity[block] = similar.argmax(1)
        cosine[block] = similar.max(1)
    return identity, cosine


@dataclass(frozen=True)
class Separation:
    """Error of a model on a dataset, between an image's identity and another identity."""

    eer: float | None
    """Share of images below a cosine to the center of their identity, and above it to the center of another one, at the
    cosine where both shares are equal. None without two identities, or without two images of one."""

    @property
    def useless(self) -> bool:
        """Whether the model cannot separate the identities of the dataset, or there is nothing to compare."""
        return self.eer is None or self.eer >= USELESS_EER

    def sentence(self) -> str:
        """Return the error and what follows from it."""
        if self.eer is None:
            return "no label can be compared: that needs two identities, and two images of one of them"
        line = f"this model separates the identities of this dataset with an EER of {percent(self.eer)}"
        if self.useless:
            return f"{line}: it cannot separate them, or most labels are wrong; use a stronger model"
        if self.eer >= WEAK_EER:
            return f"{line}: it is weak for this dataset, so only few wrong labels are certain enough to be reported"
        return f"{line}: one error in {round(1 / self.eer):,} comparisons" if self.eer > 0 else line


def measure_separation(embedding_ND: UnitRows, label_N: np.ndarray) -> Separation:
    """Return the error of the model between an image's identity and one random other identity per image."""
    other_N = random_other_labels(label_N)
    if (other_N < 0).any():  # one identity
        return Separation(None)
    centers = compute_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    genuine_N = leave_one_out_similarity(embedding_ND, label_N, centers)
    impostor_N = similarity_to_center(embedding_ND, other_N, centers.unit_KD)
    genuine, impostor = (np.sort(cosine[np.isfinite(cosine)]) for cosine in (genuine_N, impostor_N))
    if not len(genuine) or not len(impostor):
        return Separation(None)
    grid = np.linspace(-1, 1, 2001)
    rejected = np.searchsorted(genuine, grid) / len(genuine)
    accepted = 1 - np.searchsorted(impostor, grid) / len(impostor)
    # The larger error is smallest where they cross. The middle of a plateau has the same margin on both sides.
    error = np.maximum(rejected, accepted)
    best = np.flatnonzero(error <= error.min() + 1e-12)
    middle = best[len(best) // 2]
    return Separation(float((rejected[middle] + accepted[middle]) / 2))


def random_other_labels(label_N: np.ndarray) -> np.ndarray:
    """Return a random other identity for each image, of those with images: (N,), −1 if there is none."""
    present, rank_N = np.unique(label_N, return_inverse=True)
    if len(present) < 2:
        return np.full(len(label_N), -1)
    shift_N = 1 + sample_numbers(len(label_N), len(label_N)) % (len(present) - 1)
    return present[(rank_N + shift_N) % len(present)]


def _blocks(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows, each with `_BLOCK_NUMBERS` numbers at `width` numbers per row."""
    step = max(_BLOCK_NUMBERS // width, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)
