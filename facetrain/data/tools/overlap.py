"""Identities that a training set and a test set have in common, found by the similarity of embeddings."""

# N training images   M test images   K identities   D embedding

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.tools.fault_calibration import FaultThreshold, calibrate_threshold
from facetrain.data.tools.similarity import (
    Separation,
    check_labeled,
    compute_centers,
    measure_separation,
    nearest_other_center,
)

_LEAST_SIMILAR = 0.25
"""Share of the training images that are less similar to their identity than a test image must be to it."""


@dataclass(frozen=True)
class OverlappingIdentity:
    """Training identity that at least one test image is similar to."""

    identity: int
    similarity: float
    """Cosine of the most similar test image and the center of the identity."""
    image: int
    """Number of the training image of this identity that is most similar to `test_image`."""
    test_image: int
    """Number of the most similar test image."""
    test_images: int
    """Number of test images whose most similar identity is this one, at or above the threshold."""


@dataclass(frozen=True)
class OverlapReport:
    """Training identities that a test set also has."""

    separation: Separation
    overlapping: list[OverlappingIdentity]
    """Most similar first."""
    threshold: FaultThreshold


def find_overlap(embedding_ND: np.ndarray, label_N: np.ndarray, test_MD: np.ndarray) -> OverlapReport:
    """Return the training identities that the test set also has; none if the model cannot separate identities.

    The score of an identity is the largest cosine of its center and a test image. Scores of people outside the
    training set are taken from the training images and the centers of other identities, scores of people in it from
    the training images and the other images of their identity, see `calibrate_threshold`.

    Args:
        embedding_ND: unit rows of the training images, float32.
        label_N: training labels from 0, int64.
        test_MD: unit rows of the test images, float32.

    Raises:
        DataError: the training images have no labels.
    """
    check_labeled(label_N)
    # A damaged label can be so large that the centers of all labels below it would fill the memory.
    present_K, label_N = np.unique(label_N, return_inverse=True)
    genuine_N, separation = measure_separation(embedding_ND, label_N)
    if separation.useless:
        return OverlapReport(separation, [], FaultThreshold(np.inf, 0.0))
    clear_N = ~(genuine_N < separation.threshold)
    count = len(present_K)
    unit_KD = compute_centers(embedding_ND, np.where(clear_N, label_N, -1), count).unit_KD
    _, impostor_N = nearest_other_center(embedding_ND, label_N, unit_KD)
    identity_M, cosine_M = nearest_other_center(test_MD, np.full(len(test_MD), -1), unit_KD)
    best_K = np.full(count, -np.inf)
    np.maximum.at(best_K, identity_M, cosine_M)
    kept = genuine_N[clear_N & np.isfinite(genuine_N)]
    least = float(np.quantile(kept, _LEAST_SIMILAR)) if len(kept) else 1.0
    threshold = calibrate_threshold(
        best_K,
        [genuine_N],
        # Images of people whom the model confuses are similar, but not as similar as most images of one person.
        lowest=max(separation.threshold, least),
        # Images under a wrong label are similar to their person, which is another identity here.
        null_N=impostor_N[clear_N],
        trials=int(np.isfinite(best_K).sum()),
        largest_share=1.0,
    )
    matched_M = cosine_M >= threshold.threshold
    order_M = np.flatnonzero(matched_M)[np.argsort(identity_M[matched_M], kind="stable")]
    order_N = np.argsort(label_N, kind="stable")
    first_K = np.searchsorted(label_N[order_N], np.arange(count + 1))
    overlapping = []
    for rows in np.split(order_M, np.flatnonzero(np.diff(identity_M[order_M])) + 1) if len(order_M) else ():
        number = int(identity_M[rows[0]])
        test_image = int(rows[cosine_M[rows].argmax()])
        images = order_N[first_K[number] : first_K[number + 1]]
        image = int(images[(embedding_ND[images] @ test_MD[test_image]).argmax()])
        identity, cosine = int(present_K[number]), float(cosine_M[test_image])
        overlapping.append(OverlappingIdentity(identity, cosine, image, test_image, len(rows)))
    return OverlapReport(
        separation, sorted(overlapping, key=lambda identity: -identity.similarity), threshold
    )
