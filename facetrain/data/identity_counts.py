"""Numbers of images of the identities of a dataset, and the choice of identities by them."""

# N images

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, SubsetDataset
from facetrain.errors import DataError

_CHUNK = 1 << 24


def count_images(source: FaceDataset) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels that have images, ascending, and the numbers of their images."""
    if source.num_classes > 2 * source.num_images:
        # A damaged label can be so large that the counts of all labels below it fill the memory.
        return np.unique(source.labels, return_counts=True)
    counts = np.zeros(source.num_classes, np.int64)
    # In chunks, because bincount converts to int64: 100 million labels take 800 MB.
    for start in range(0, source.num_images, _CHUNK):
        counts += np.bincount(source.labels[start : start + _CHUNK], minlength=source.num_classes)
    present = np.flatnonzero(counts)
    return present, counts[present]


def drop_small_identities(dataset: FaceDataset, path: Path, min_images_per_identity: int) -> FaceDataset:
    """Return the dataset without identities that have fewer than `min_images_per_identity` images.

    Raises:
        DataError: if no identity has enough images; the message names `path`.
    """
    if min_images_per_identity == 1:
        return dataset
    present, counts = count_images(dataset)
    enough = present[counts >= min_images_per_identity]
    if not len(enough):
        raise DataError(
            f"{path}: no identity has {min_images_per_identity} images or more; the most is {counts.max():,}"
        )
    return dataset if len(enough) == dataset.num_classes else SubsetDataset(dataset, enough)


def images_of_large_identities(dataset: FaceDataset, min_images_per_identity: int) -> np.ndarray:
    """Return the numbers of the images that `drop_small_identities` keeps, also of those in a mixture: int64 (N,)."""
    present, counts = count_images(dataset)
    return np.flatnonzero(np.isin(dataset.labels, present[counts >= min_images_per_identity]))
