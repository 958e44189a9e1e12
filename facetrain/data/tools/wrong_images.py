"""Images that do not show their identity, found by their similarity to it and to the other identities."""

# N images   D embedding

from __future__ import annotations

import numpy as np

from facetrain.data.tools.fault_calibration import FaultThreshold, calibrate_mislabeled, calibrate_threshold
from facetrain.data.tools.label_faults import MISLABELED_IMAGE, OUTLIER_IMAGE, LabelFault
from facetrain.data.tools.similarity import (
    Separation,
    compute_centers,
    leave_one_out_similarity,
    measure_separation,
    nearest_image,
    nearest_other_center,
    random_other_labels,
    similarity_to_center,
)

_LOOKALIKES = 0.1
"""Share of the trusted images that are as similar to another identity as an image that may belong to it."""
_NEAREST_WEIGHT = 0.7
"""Similarity to a center that one similar image of the identity is worth: single images are more similar by chance."""
_NEAREST_SHARE = 0.25
"""Share of the most similar image in the similarity to an identity; the rest is the center's."""
_LEAST_GENUINE = 0.05
"""Share of the images that are less similar to their identity than a moved image must be to its new one."""
_LEAST_LEAD = 0.1
"""Lead in similarity of a moved image's new identity over all others, divided by the median lead of correct labels."""


def find_wrong_images(
    embedding_ND: np.ndarray,
    label_N: np.ndarray,
    same: set[frozenset[int]],
    before: Separation,
) -> tuple[list[LabelFault], dict[str, FaultThreshold], Separation]:
    """Return images that do not show their identity, the calibrations, and the error of the model without them.

    An image shows its identity if it is similar to the center of the other images, or very similar to one of them:
    the center does not represent all images of a person with several looks or with few correct labels. It is judged by
    its similarity to its own identity and to the one with the nearest center, and by planted faults, which have a
    random other identity. An image may be as similar to the other identity of a pair in `same`.
    """
    centers = compute_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    same_N = nearest_image(embedding_ND, label_N, label_N)
    genuine_N = np.fmax(leave_one_out_similarity(embedding_ND, label_N, centers), _NEAREST_WEIGHT * same_N)
    nearest_N, impostor_N = nearest_other_center(embedding_ND, label_N, centers.unit_KD)
    random_N = random_other_labels(label_N)
    planted_N = similarity_to_center(embedding_ND, random_N, centers.unit_KD)
    random_image_N = nearest_image(embedding_ND, label_N, random_N)
    wrong_N, thresholds = _judge_images(
        _similarity_to_identity(genuine_N, same_N),
        _similarity_to_identity(impostor_N, nearest_image(embedding_ND, label_N, nearest_N)),
        _similarity_to_identity(np.fmax(planted_N, _NEAREST_WEIGHT * random_image_N), random_image_N),
        before.threshold,
    )
    kept_N = ~wrong_N & np.isfinite(genuine_N)
    least = float(np.quantile(genuine_N[kept_N], _LEAST_GENUINE)) if kept_N.any() else 1.0
    lead = _LEAST_LEAD * float(np.median((genuine_N - impostor_N)[kept_N])) if kept_N.any() else 0.0
    for row in np.flatnonzero(wrong_N).tolist():
        wrong_N[row] = frozenset((int(label_N[row]), int(nearest_N[row]))) not in same
    wrong = np.flatnonzero(wrong_N)
    _, second = nearest_other_center(embedding_ND[wrong], nearest_N[wrong], centers.unit_KD)
    faults = []
    for row, next_best in zip(wrong.tolist(), second.tolist(), strict=True):
        moved = impostor_N[row] >= max(least, next_best + lead)
        kind, cosine = (MISLABELED_IMAGE, impostor_N[row]) if moved else (OUTLIER_IMAGE, genuine_N[row])
        other = int(nearest_N[row]) if moved else -1
        faults.append(LabelFault(kind, int(label_N[row]), other, float(cosine), (row,), other))
    faults.sort(key=lambda one: one.kind)
    _, separation = (
        measure_separation(embedding_ND[~wrong_N], label_N[~wrong_N]) if len(faults) else (0, before)
    )
    return faults, thresholds, separation


def _similarity_to_identity(center_N: np.ndarray, image_N: np.ndarray) -> np.ndarray:
    """Return the mean of the similarities to the center of an identity and to its most similar image: (N,)."""
    return (1 - _NEAREST_SHARE) * center_N + _NEAREST_SHARE * image_N


def _judge_images(
    genuine_N: np.ndarray, impostor_N: np.ndarray, planted_N: np.ndarray, floor: float
) -> tuple[np.ndarray, dict[str, FaultThreshold]]:
    """Return whether each image is wrong, bool (N,), and the calibrations.

    Args:
        genuine_N: similarity to the image's identity; NaN is never wrong.
        impostor_N: similarity to the nearest other identity.
        planted_N: similarity to a random other identity.
        floor: least similarity of two images of one person.
    """
    known = np.isfinite(genuine_N)
    if not known.any():
        return np.zeros(len(genuine_N), bool), {}
    inside = np.maximum(np.fmax(impostor_N, genuine_N), floor) - planted_N
    moved = calibrate_mislabeled(genuine_N, impostor_N, planted_N, lowest=floor)
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
    )
    wrong_N |= strange_N & (score_N >= left_out.threshold)
    return wrong_N, {MISLABELED_IMAGE: moved, OUTLIER_IMAGE: left_out}
