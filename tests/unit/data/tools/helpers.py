"""Embeddings of identities that are easy to separate, and datasets compared without labels and order."""

import numpy as np

from facetrain.data.open_dataset import open_dataset

IDENTITIES, EACH, SIZE = 40, 8, 64


def unit(x):
    """Return unit rows, float32."""
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def grouped_images(folder):
    """Return the images of each identity of a dataset, independent of labels and order."""
    source = open_dataset(folder)
    groups = {label: set() for label in source.labels.tolist()}
    for number, label in enumerate(source.labels.tolist()):
        groups[label].add(source.read(number))
    return {frozenset(group) for group in groups.values()}
