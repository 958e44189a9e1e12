"""Identities that a training set and a test set have in common, found by the similarity of embeddings."""

# N training images   M test images   K identities   D embedding

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.tools.similarity import (
    check_labeled,
    compute_centers,
    default_threshold,
    nearest_other_center,
)


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


def find_overlap(
    embedding_ND: np.ndarray, label_N: np.ndarray, test_MD: np.ndarray, *, threshold: float | None = None
) -> tuple[float, list[OverlappingIdentity]]:
    """Return the threshold, and the training identities that the test set also has, most similar first.

    Args:
        embedding_ND: unit rows of the training images, float32.
        label_N: training labels from 0, int64.
        test_MD: unit rows of the test images, float32.
        threshold: cosine of an image and an identity's center from which they show the same identity;
            `default_threshold` of the training images if None.

    Raises:
        DataError: the training images have no labels.
    """
    check_labeled(label_N)
    centers = compute_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    if threshold is None:
        threshold = default_threshold(embedding_ND, label_N, centers)
    identity, cosine = nearest_other_center(test_MD, np.full(len(test_MD), -1), centers.unit_KD)
    matched = cosine >= threshold
    found = []
    for number in np.unique(identity[matched]).tolist():
        test_images = np.flatnonzero(matched & (identity == number))
        test_image = int(test_images[cosine[test_images].argmax()])
        images = np.flatnonzero(label_N == number)
        image = int(images[(embedding_ND[images] @ test_MD[test_image]).argmax()])
        found.append(
            OverlappingIdentity(number, float(cosine[test_image]), image, test_image, len(test_images))
        )
    return threshold, sorted(found, key=lambda one: -one.similarity)
