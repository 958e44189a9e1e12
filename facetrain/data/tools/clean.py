"""Label faults found by embeddings: mixed identities, duplicate identities, mislabeled images and outliers."""

# N images   K identities   D embedding

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset_card import ImageDigest, carry_cards
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.fault_calibration import (
    PRECISION,
    FaultThreshold,
    Separation,
    calibrate_mislabeled,
    calibrate_threshold,
    separate,
)
from facetrain.data.tools.identity_groups import find_duplicate_identities, find_mixed_identities
from facetrain.data.tools.rewrite import WrittenDataset, write_images
from facetrain.data.tools.similarity import (
    check_labeled,
    compute_centers,
    leave_one_out_similarity,
    nearest_other_center,
    nearest_own_image,
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
    OUTLIER_IMAGE: "images that do not show their identity, and not clearly another one",
}
_LOOKALIKES = 0.1
"""Share of the trusted images that are as similar to another identity as an image that may belong to it."""
_NEAREST_WEIGHT = 0.7
"""Similarity to a center that one similar image of the identity is worth: single images are more similar by chance."""
_LEAST_GENUINE = 0.05
"""Share of the images that are less similar to their identity than a moved image must be to its new one."""
_LEAST_LEAD = 0.1
"""Lead in similarity of a moved image's new identity over all others, divided by the median lead of correct labels."""


@dataclass(frozen=True)
class LabelFault:
    """Disagreement of a label and the embeddings, and the decision on it."""

    kind: str
    """A key of `FAULT_KINDS`."""
    identity: int
    """Identity in the dataset."""
    other: int
    """The other identity of a duplicate identity or a mislabeled image; else −1."""
    image: int
    """Number of the mislabeled or outlier image; for a mixed identity, one image of the smaller group; else −1."""
    similarity: float
    """Cosine of two identities or groups, of a mislabeled image and `other`, or of an outlier and its identity."""
    images: tuple[int, ...] = ()
    """Images of the smaller group of a mixed identity, or the mislabeled or outlier image."""
    target: int = -1
    """Label that `images` get, −1 to leave them out; for a duplicate identity, the label that both get."""


@dataclass(frozen=True)
class CleanReport:
    """Label faults of a dataset, and its corrected labels."""

    separation: Separation
    faults: list[LabelFault]
    label_N: np.ndarray
    """Corrected labels, int64; −1 for images to leave out."""
    thresholds: dict[str, FaultThreshold] = field(default_factory=dict)

    @property
    def expected_false(self) -> float:
        """Expected number of wrong decisions, without those on duplicate identities, for which no estimate holds."""
        return sum(one.expected_false for kind, one in self.thresholds.items() if kind != DUPLICATE_IDENTITY)


def find_label_faults(
    embedding_ND: np.ndarray, label_N: np.ndarray, *, precision: float = PRECISION, merge: bool = False
) -> CleanReport:
    """Compare each image with the centers of all identities, and each center with the other centers.

    First, identities whose images form two groups of different people are split. Then identities that show one person
    are reported, and merged with `merge`. Last, images that do not show their identity get the label of the one that
    they show, or −1. Each threshold is calibrated on the dataset, see `calibrate_threshold` and `calibrate_mislabeled`.
    If the model cannot separate the identities, nothing is reported.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels from 0, int64.
        precision: share of true faults among the reported ones to aim at.
        merge: whether the corrected labels merge duplicate identities. The threshold for these assumes that all pairs
            of people are equally easy to separate, so that it merges people whom the model confuses.

    Raises:
        DataError: the images have no labels.
    """
    check_labeled(label_N)
    label = label_N.astype(np.int64)
    genuine_N, separation = measure_separation(embedding_ND, label)
    if separation.useless:
        return CleanReport(separation, [], label)
    # Images far from their identity would spoil the centers of other images; the last step decides on them.
    clear_N = ~(genuine_N < separation.threshold)
    same_person = separation.threshold
    mixed, split_threshold = find_mixed_identities(
        embedding_ND, np.where(clear_N, label, -1), same_person, precision
    )
    faults = []
    for number, one in enumerate(mixed):
        target = int(label_N.max()) + 1 + number
        label[one.rows] = target
        rows = tuple(one.rows.tolist())
        faults.append(LabelFault(MIXED_IDENTITY, one.identity, -1, rows[0], one.similarity, rows, target))
    same, same_threshold = find_duplicate_identities(
        embedding_ND, np.where(clear_N, label, -1), same_person, precision
    )
    for pair in same:
        faults.append(LabelFault(DUPLICATE_IDENTITY, pair.one, pair.other, -1, pair.similarity, (), pair.one))
    label = apply_faults(label_N, applied_by_default(faults, merge=merge))
    images, image_thresholds, separation = _find_wrong_images(
        embedding_ND, label, {(pair.one, pair.other) for pair in same}, separation, precision
    )
    faults += [_in_dataset(one, label_N, label) for one in images]
    thresholds = {MIXED_IDENTITY: split_threshold, DUPLICATE_IDENTITY: same_threshold} | image_thresholds
    corrected = apply_faults(label_N, applied_by_default(faults, merge=merge))
    return CleanReport(separation, faults, corrected, thresholds)


def applied_by_default(faults: list[LabelFault], *, merge: bool) -> list[LabelFault]:
    """Return the faults to apply: all with `merge`, otherwise all but duplicate identities."""
    return [one for one in faults if merge or one.kind != DUPLICATE_IDENTITY]


def measure_separation(embedding_ND: np.ndarray, label_N: np.ndarray) -> tuple[np.ndarray, Separation]:
    """Return each image's similarity to the other images of its identity, (N,), and the error of the model.

    NaN where an identity has one image. The error compares with one random other identity per image.
    """
    count = int(label_N.max()) + 1
    centers = compute_centers(embedding_ND, label_N, count)
    genuine_N = leave_one_out_similarity(embedding_ND, label_N, centers)
    impostor_N = similarity_to_center(embedding_ND, _other_labels(label_N), centers.unit_KD)
    return genuine_N, separate(genuine_N, impostor_N)


def apply_faults(label_N: np.ndarray, faults: list[LabelFault]) -> np.ndarray:
    """Return the labels after the decisions on faults: first groups, then single images, last merged identities."""
    label = label_N.astype(np.int64)
    for one in faults:
        if one.kind == MIXED_IDENTITY:
            label[list(one.images)] = one.target
    for one in faults:
        if one.kind in (MISLABELED_IMAGE, OUTLIER_IMAGE):
            label[list(one.images)] = one.target
    root_K = np.arange(max(int(label.max()), int(label_N.max())) + 1)
    for one in faults:
        if one.kind == DUPLICATE_IDENTITY:
            root, leaf = sorted((_root(root_K, one.identity), _root(root_K, one.other)))
            root_K[leaf] = root
    # A root has a smaller number than the identities that were merged with it, so one ascending pass finds the roots.
    for identity in range(len(root_K)):
        root_K[identity] = root_K[root_K[identity]]
    return np.where(label >= 0, root_K[label], -1)


def write_cleaned(
    folder: Path,
    label_N: np.ndarray,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write the dataset of `folder` with corrected labels, renumbered without gaps; −1 leaves an image out.

    Raises:
        DataError: no image is left, or the output cannot be written.
    """
    source = open_dataset(folder)
    numbers = np.flatnonzero(label_N >= 0)
    if not len(numbers):
        raise DataError(f"{folder}: no image is left; check the report, and that the model fits this dataset")
    with new_folder(output) as scratch:
        digest = ImageDigest()
        written = write_images(source, numbers, label_N[numbers], scratch, workers, progress, digest)
        carry_cards([folder], output, scratch, written, digest)
    return WrittenDataset(str(output), *written)


def _root(root_K: np.ndarray, identity: int) -> int:
    while root_K[identity] != identity:
        identity = int(root_K[identity])
    return identity


def _other_labels(label_N: np.ndarray) -> np.ndarray:
    """Return a random other identity for each image, of those with images: (N,), −1 if there is none."""
    present, rank_N = np.unique(label_N, return_inverse=True)
    if len(present) < 2:
        return np.full(len(label_N), -1)
    shift_N = 1 + permute(np.arange(len(label_N)), len(label_N), key_of(0)) % (len(present) - 1)
    return present[(rank_N + shift_N) % len(present)]


def _find_wrong_images(
    embedding_ND: np.ndarray,
    label_N: np.ndarray,
    same: set[tuple[int, int]],
    before: Separation,
    precision: float,
) -> tuple[list[LabelFault], dict[str, FaultThreshold], Separation]:
    """Return images that do not show their identity, the calibrations, and the error of the model without them.

    An image shows its identity if it is similar to the center of the other images, or very similar to one of them:
    the center does not represent all images of a person with several looks or with few correct labels. An image may be
    as similar to the other identity of a pair in `same`, smaller number first.
    """
    centers = compute_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    genuine_N = np.fmax(
        leave_one_out_similarity(embedding_ND, label_N, centers),
        _NEAREST_WEIGHT * nearest_own_image(embedding_ND, label_N),
    )
    nearest_N, impostor_N = nearest_other_center(embedding_ND, label_N, centers.unit_KD)
    wrong_N, thresholds = _judge_images(
        genuine_N,
        impostor_N,
        # Each image under the label of a random other identity: a planted fault.
        similarity_to_center(embedding_ND, _other_labels(label_N), centers.unit_KD),
        before.threshold,
        precision,
    )
    kept_N = ~wrong_N & np.isfinite(genuine_N)
    least = float(np.quantile(genuine_N[kept_N], _LEAST_GENUINE)) if kept_N.any() else 1.0
    lead = _LEAST_LEAD * float(np.median((genuine_N - impostor_N)[kept_N])) if kept_N.any() else 0.0
    for row in np.flatnonzero(wrong_N).tolist():
        pair = sorted((int(label_N[row]), int(nearest_N[row])))
        wrong_N[row] = (pair[0], pair[1]) not in same
    wrong = np.flatnonzero(wrong_N)
    _, second = nearest_other_center(embedding_ND[wrong], nearest_N[wrong], centers.unit_KD)
    faults = []
    for row, next_best in zip(wrong.tolist(), second.tolist(), strict=True):
        moved = impostor_N[row] >= max(least, next_best + lead)
        kind, cosine = (MISLABELED_IMAGE, impostor_N[row]) if moved else (OUTLIER_IMAGE, genuine_N[row])
        other = int(nearest_N[row]) if moved else -1
        faults.append(LabelFault(kind, int(label_N[row]), other, row, float(cosine), (row,), other))
    faults.sort(key=lambda one: one.kind)
    _, separation = (
        measure_separation(embedding_ND[~wrong_N], label_N[~wrong_N]) if len(faults) else (0, before)
    )
    return faults, thresholds, separation


def _judge_images(
    genuine_N: np.ndarray, impostor_N: np.ndarray, planted_N: np.ndarray, floor: float, precision: float
) -> tuple[np.ndarray, dict[str, FaultThreshold]]:
    """Return whether each image is wrong, bool (N,), and the calibrations.

    Args:
        genuine_N: similarity to the image's identity; NaN is never wrong.
        impostor_N: similarity to the nearest other identity.
        planted_N: similarity to a random other identity.
        floor: least similarity of two images of one person.
        precision: share of true faults to aim at.
    """
    known = np.isfinite(genuine_N)
    if not known.any():
        return np.zeros(len(genuine_N), bool), {}
    inside = np.maximum(np.fmax(impostor_N, genuine_N), floor) - planted_N
    moved = calibrate_mislabeled(genuine_N, impostor_N, planted_N, lowest=floor, precision=precision)
    wrong_N = known & (impostor_N >= floor) & (impostor_N - genuine_N >= moved.threshold)
    # Images that are not similar to another identity are left out if they are too far from their own one.
    trusted = known & (genuine_N >= np.median(genuine_N[known]))
    strange_N = known & ~wrong_N & (impostor_N < np.quantile(impostor_N[trusted], 1 - _LOOKALIKES))
    score_N = np.maximum(impostor_N, floor) - genuine_N
    outside = np.maximum(impostor_N, floor) - planted_N
    left_out = calibrate_threshold(
        score_N[strange_N],
        [inside[known], outside[known]],
        lowest=0.0,
        null_N=score_N[known],
        trials=int(known.sum()),
        precision=precision,
    )
    wrong_N |= strange_N & (score_N >= left_out.threshold)
    return wrong_N, {MISLABELED_IMAGE: moved, OUTLIER_IMAGE: left_out}


def _in_dataset(fault: LabelFault, label_N: np.ndarray, corrected_N: np.ndarray) -> LabelFault:
    """Return a fault of an image with the identities of the dataset: splitting and merging changed the labels."""
    other = fault.other
    if other > int(label_N.max()):
        # The identity that the group of a mixed identity has in the dataset.
        other = int(np.bincount(label_N[corrected_N == other]).argmax())
    return LabelFault(
        fault.kind,
        int(label_N[fault.image]),
        other,
        fault.image,
        fault.similarity,
        fault.images,
        fault.target,
    )
