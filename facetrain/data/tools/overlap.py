"""Who of a training set also stands in a test set, by what a model sees."""

# N pictures to train on   M pictures of the test set   K identities   D embedding

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.tools.likeness import (
    best_other,
    check_labelled,
    find_centres,
    own_similarity,
    telling_apart,
)
from facetrain.data.tools.sheet import write_png


@dataclass(frozen=True)
class Shared:
    """An identity of the training set that a picture of the test set is like."""

    identity: int
    similarity: float
    """Of the test picture and the identity's centre."""
    picture: int
    """The identity's picture that is most like it."""
    test_picture: int
    test_pictures: int
    """How many pictures of the test set are most like this identity, and alike enough."""


def overlap(
    embedding_ND: np.ndarray, label_N: np.ndarray, test_MD: np.ndarray, *, threshold: float | None = None
) -> tuple[float, list[Shared]]:
    """Return the threshold and the identities that the test set has too, most alike first.

    Args:
        embedding_ND: unit rows, float32.
        label_N: int64, from 0.
        test_MD: unit rows, float32.
        threshold: similarity of a picture and a centre from which on they are of one person. If None, the one
            that best tells the training pictures' own identities from their most similar other ones.
    """
    check_labelled(label_N)
    centres = find_centres(embedding_ND, label_N, int(label_N.max()) + 1)
    if threshold is None:
        _, other = best_other(embedding_ND, label_N, centres.unit_KD)
        threshold = telling_apart(own_similarity(embedding_ND, label_N, centres), other)
    identity, cosine = best_other(test_MD, np.full(len(test_MD), -1), centres.unit_KD)
    alike = cosine >= threshold
    found = []
    for shared in np.unique(identity[alike]).tolist():
        tested = np.flatnonzero(alike & (identity == shared))
        closest = int(tested[cosine[tested].argmax()])
        pictures = np.flatnonzero(label_N == shared)
        nearest = int(pictures[(embedding_ND[pictures] @ test_MD[closest]).argmax()])
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
    """Write a PNG with the two pictures of each pair side by side.

    Raises:
        DataError: a picture cannot be decoded, or the PNG not be written.
    """
    gap = size // 8
    rows = -(-len(pairs) // columns)
    sheet = np.full((max(rows, 1) * (size + gap), columns * (2 * size + gap), 3), 255, np.uint8)
    for number, (left, right) in enumerate(pairs):
        top, start = number // columns * (size + gap), number % columns * (2 * size + gap)
        for place, data in ((start, read_left(left)), (start + size, read_right(right))):
            image = decode_rgb(data, where=f"{output}: pair {number}")
            sheet[top : top + size, place : place + size] = resize_square(image, size)
    write_png(sheet, output)
