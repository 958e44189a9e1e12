"""Who of a training set also stands in a test set, by what a model sees."""

# N images to train on   M images of the test set   K identities   D embedding

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.tools.contact_sheet import write_png
from facetrain.data.tools.similarity import (
    best_other,
    check_labeled,
    find_centers,
    own_similarity,
    telling_apart,
)


@dataclass(frozen=True)
class Shared:
    """An identity of the training set that an image of the test set is like."""

    identity: int
    similarity: float
    """Of the test image and the identity's center."""
    image: int
    """The identity's image that is most like it."""
    test_image: int
    test_images: int
    """How many images of the test set are most like this identity, and alike enough."""


def overlap(
    embedding_ND: np.ndarray, label_N: np.ndarray, test_MD: np.ndarray, *, threshold: float | None = None
) -> tuple[float, list[Shared]]:
    """Return the threshold and the identities that the test set has too, most alike first.

    Args:
        embedding_ND: unit rows, float32.
        label_N: int64, from 0.
        test_MD: unit rows, float32.
        threshold: similarity of an image and a center from which on they are of one person. If None, the one
            that best tells the training images' own identities from their most similar other ones.
    """
    check_labeled(label_N)
    centers = find_centers(embedding_ND, label_N, int(label_N.max()) + 1)
    if threshold is None:
        _, other = best_other(embedding_ND, label_N, centers.unit_KD)
        threshold = telling_apart(own_similarity(embedding_ND, label_N, centers), other)
    identity, cosine = best_other(test_MD, np.full(len(test_MD), -1), centers.unit_KD)
    alike = cosine >= threshold
    found = []
    for shared in np.unique(identity[alike]).tolist():
        tested = np.flatnonzero(alike & (identity == shared))
        closest = int(tested[cosine[tested].argmax()])
        images = np.flatnonzero(label_N == shared)
        nearest = int(images[(embedding_ND[images] @ test_MD[closest]).argmax()])
        found.append(Shared(shared, float(cosine[closest]), nearest, closest, len(tested)))
    return threshold, sorted(found, key=lambda one: -one.similarity)


def draw_pairs(
    pairs: Sequence[tuple[int, int]],
    read_left: Callable[[int], bytes],
    read_right: Callable[[int], bytes],
    output: Path,
    *,
    columns: int = 4,
    size: int = 112,
) -> None:
    """Write a PNG with the two images of each pair side by side.

    Raises:
        DataError: an image cannot be decoded, or the PNG not be written.
    """
    gap = size // 8
    rows = -(-len(pairs) // columns)
    sheet = np.full((max(rows, 1) * (size + gap), columns * (2 * size + gap), 3), 255, np.uint8)
    for number, (left, right) in enumerate(pairs):
        top, start = number // columns * (size + gap), number % columns * (2 * size + gap)
        for place, data in ((start, read_left(left)), (start + size, read_right(right))):
            image = decode_rgb(data, location=f"{output}: pair {number}")
            sheet[top : top + size, place : place + size] = resize_square(image, size)
    write_png(sheet, output)
