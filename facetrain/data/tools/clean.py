"""Label faults found by embeddings: mixed identities, duplicate identities, mislabeled images and outliers."""

# N images   K identities   D embedding

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from facetrain.data.dataset_card import ImageDigest, carry_cards
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.rewrite import WrittenDataset, write_images
from facetrain.data.tools.similarity import (
    IdentityCenters,
    best_threshold,
    check_labeled,
    compute_centers,
    leave_one_out_similarity,
    nearest_other_center,
    similarity_to_center,
)
from facetrain.errors import DataError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress

MIXED_IDENTITY = "mixed_identity"
DUPLICATE_IDENTITY = "duplicate_identity"
MISLABELED_IMAGE = "mislabeled_image"
OUTLIER_IMAGE = "outlier_image"
FAULT_KINDS = {
    MIXED_IDENTITY: "identities with images of two people",
    DUPLICATE_IDENTITY: "pairs of identities that show one person",
    MISLABELED_IMAGE: "images of another identity",
    OUTLIER_IMAGE: "images that match no identity",
}
_ROUNDS = 3
_KMEANS_ROUNDS = 10
_MAX_SEED_CANDIDATES = 4096
"""Images of one identity, evenly spaced, among which the seeds of 2-means are searched: the search is quadratic."""
_MAX_CENTER_THRESHOLD = 0.95


@dataclass(frozen=True)
class LabelFault:
    """Disagreement of a label and the embeddings."""

    kind: str
    """A key of `FAULT_KINDS`."""
    identity: int
    """Identity in the dataset."""
    other: int
    """The other identity of a duplicate identity or a mislabeled image; else −1."""
    image: int
    """Number of the mislabeled or outlier image; for a mixed identity, one image of the smaller group; else −1."""
    similarity: float


@dataclass(frozen=True)
class CleanReport:
    """Label faults of a dataset, and its corrected labels."""

    threshold: float
    """Cosine of an image and an identity's center from which they show the same identity."""
    faults: list[LabelFault]
    label_N: np.ndarray
    """Corrected labels, int64; −1 for images to leave out."""
    confusion: float = 0.0
    """Model's own error on this dataset: share of the images that are closer to another identity than to their own."""

    @property
    def cut_images(self) -> int:
        """Number of images that are left out or moved to another identity."""
        return sum(fault.kind in (MISLABELED_IMAGE, OUTLIER_IMAGE) for fault in self.faults)

    def cut_identities(self, label_N: np.ndarray) -> int:
        """Return how many identities of `label_N`, (N,), have no images of their own afterwards."""
        kept = self.label_N >= 0
        left = min(len(np.unique(self.label_N[kept])), len(np.unique(label_N[kept])))
        return len(np.unique(label_N)) - left


def find_label_faults(
    embedding_ND: np.ndarray, label_N: np.ndarray, *, threshold: float | None = None
) -> CleanReport:
    """Compare each image with the centers of all identities, and each center with the other centers.

    First, identities whose images form two dissimilar groups are split. Then identities with similar centers are
    merged. Last, images that are not similar to their identity get the label of the most similar one, or −1 if no
    identity is similar. Centers are recomputed without the wrong images after each round of the last step.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels from 0, int64.
        threshold: cosine of an image and a center from which they show the same identity; `default_threshold` if None.

    Raises:
        DataError: the images have no labels.
    """
    check_labeled(label_N)
    label = label_N.astype(np.int64)
    num_classes = int(label.max()) + 1
    centers = compute_centers(embedding_ND, label, num_classes)
    genuine_N = leave_one_out_similarity(embedding_ND, label, centers)
    _, impostor_N = nearest_other_center(embedding_ND, label, centers.unit_KD)
    if threshold is None:
        threshold = best_threshold(genuine_N, impostor_N)
    several_N = np.isfinite(genuine_N)
    confusion = float((impostor_N > genuine_N)[several_N].mean()) if several_N.any() else 0.0
    label, mixed = _split_mixed_identities(embedding_ND, label, threshold)
    label, duplicates = _merge_duplicate_identities(embedding_ND, label, num_classes, threshold)
    before, (label, images) = label, _reassign_images(embedding_ND, label, threshold)
    images = [_with_identities_of(label_N, before, fault) for fault in images]
    return CleanReport(threshold, mixed + duplicates + images, label, confusion)


def _with_identities_of(label_N: np.ndarray, split_N: np.ndarray, fault: LabelFault) -> LabelFault:
    """Return a fault with the identities of the dataset: splitting and merging gave new numbers to groups."""
    other = fault.other
    if other >= 0:
        # The identity that most images of the group have in the dataset.
        other = int(np.bincount(label_N[split_N == other]).argmax())
    return replace(fault, identity=int(label_N[fault.image]), other=other)


def write_cleaned(
    folder: Path,
    report: CleanReport,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write the dataset of `folder` with the corrected labels of a report, renumbered without gaps.

    Raises:
        DataError: no image is left, or the output cannot be written.
    """
    source = open_dataset(folder)
    numbers = np.flatnonzero(report.label_N >= 0)
    if not len(numbers):
        raise DataError(f"{folder}: no image matches its identity; check that the model fits this dataset")
    with new_folder(output) as scratch:
        digest = ImageDigest()
        written = write_images(source, numbers, report.label_N[numbers], scratch, workers, progress, digest)
        carry_cards([folder], output, scratch, written, digest)
    return WrittenDataset(str(output), *written)


def _split_mixed_identities(
    embedding_ND: np.ndarray, label: np.ndarray, threshold: float
) -> tuple[np.ndarray, list[LabelFault]]:
    """Give a new label to the smaller group of each identity that consists of two dissimilar groups."""
    faults, label = [], label.copy()
    order = np.argsort(label, kind="stable")
    _, starts = np.unique(label[order], return_index=True)
    new_label = int(label.max()) + 1
    for rows in np.split(order, starts[1:]):
        if len(rows) < 4:  # two groups of at least two images: a single image is an outlier, not a person
            continue
        in_second, cosine = _two_means(embedding_ND[rows])
        if min(in_second.sum(), (~in_second).sum()) < 2 or cosine >= threshold:
            continue
        smaller = rows[in_second if in_second.sum() * 2 <= len(rows) else ~in_second]
        faults.append(LabelFault(MIXED_IDENTITY, int(label[rows[0]]), -1, int(smaller[0]), cosine))
        label[smaller] = new_label
        new_label += 1
    return label, faults


def _two_means(embedding_ND: np.ndarray) -> tuple[np.ndarray, float]:
    """Split rows by spherical 2-means, seeded with the two least similar rows.

    Returns membership in the second group, bool (N,), and the cosine of the two group centers.
    """
    candidates = embedding_ND[:: -(-len(embedding_ND) // _MAX_SEED_CANDIDATES)]
    similar = candidates @ candidates.T
    seeds = np.unravel_index(similar.argmin(), similar.shape)
    center = candidates[list(seeds)]
    in_second = np.zeros(len(embedding_ND), bool)
    for _ in range(_KMEANS_ROUNDS):
        now = embedding_ND @ center[1] > embedding_ND @ center[0]
        if not now.any() or now.all():
            return np.zeros(len(now), bool), 1.0
        center = np.stack([embedding_ND[~now].sum(0), embedding_ND[now].sum(0)])
        center /= np.maximum(np.linalg.norm(center, axis=1, keepdims=True), 1e-12)
        if (now == in_second).all():
            break
        in_second = now
    return in_second, float(center[0] @ center[1])


def _merge_duplicate_identities(
    embedding_ND: np.ndarray, label: np.ndarray, num_classes: int, threshold: float
) -> tuple[np.ndarray, list[LabelFault]]:
    """Give identities with similar centers the smallest of their labels."""
    centers = compute_centers(embedding_ND, label, int(label.max()) + 1)
    # Averaging removes the noise of single images: two centers of one person have a larger cosine than an image and
    # a center, by the inverse of the mean embedding's length.
    center_threshold = min(threshold / max(centers.mean_length, 1e-6), _MAX_CENTER_THRESHOLD)
    parent = np.arange(len(centers.count_K))
    faults = []
    for cosine, one, other in _similar_centers(centers, center_threshold):
        root, leaf = sorted((_root(parent, one), _root(parent, other)))
        parent[leaf] = root
        if max(one, other) < num_classes:  # the groups of mixed identities are reported already
            faults.append(LabelFault(DUPLICATE_IDENTITY, one, other, -1, cosine))
    # A parent has a smaller number than its children, so one ascending pass finds the roots.
    for identity in range(len(parent)):
        parent[identity] = parent[parent[identity]]
    return parent[label], faults


def _similar_centers(centers: IdentityCenters, threshold: float) -> list[tuple[float, int, int]]:
    """Return (cosine, one, other) for identities and their nearest other one, at or above the threshold, best first."""
    present = np.flatnonzero(centers.count_K)
    unit = centers.unit_KD[present]
    other, cosine = (
        nearest_other_center(unit, np.arange(len(present)), unit)
        if len(present) > 1
        else (present[:0], present[:0])
    )
    # A set: two identities that are each other's nearest one are one pair.
    found = {
        (float(cosine[row]), int(present[min(row, mate)]), int(present[max(row, mate)]))
        for row, mate in enumerate(other.tolist())
        if cosine[row] >= threshold
    }
    return sorted(found, reverse=True)


def _root(parent: np.ndarray, identity: int) -> int:
    while parent[identity] != identity:
        identity = int(parent[identity])
    return identity


def _reassign_images(
    embedding_ND: np.ndarray, label: np.ndarray, threshold: float
) -> tuple[np.ndarray, list[LabelFault]]:
    """Give images that are not similar to their identity the label of the most similar one, or −1."""
    count = int(label.max()) + 1
    wrong = np.zeros(len(label), bool)
    for _ in range(_ROUNDS):
        centers = compute_centers(embedding_ND, np.where(wrong, -1, label), count)
        before = wrong
        # A wrong image is not part of its identity's center, so nothing is to be left out for it.
        genuine = np.where(
            before,
            similarity_to_center(embedding_ND, label, centers.unit_KD),
            leave_one_out_similarity(embedding_ND, label, centers),
        )
        nearest, cosine = nearest_other_center(embedding_ND, label, centers.unit_KD)
        alone = np.isnan(genuine) | (centers.count_K[label] == 0)
        wrong = ~alone & (genuine < threshold)
        if (wrong == before).all():
            break
    mislabeled = wrong & (cosine >= threshold)
    faults = [
        LabelFault(MISLABELED_IMAGE, int(label[row]), int(nearest[row]), int(row), float(cosine[row]))
        for row in np.flatnonzero(mislabeled)
    ] + [
        LabelFault(OUTLIER_IMAGE, int(label[row]), -1, int(row), float(genuine[row]))
        for row in np.flatnonzero(wrong & ~mislabeled)
    ]
    return np.where(mislabeled, nearest, np.where(wrong, -1, label)), faults
