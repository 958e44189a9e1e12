"""Embeddings of identities that are easy to separate, and datasets written from others and compared."""

import numpy as np

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import selection
from facetrain.data.tools.writing import write_dataset, write_parts

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


def convert(data, output, to="recordio", **writing):
    return write_dataset(selection.select_all(data), output, to=to, **writing)


def merge(folders, output):
    return write_dataset(selection.select_merged(folders), output)


def split(data, output, *, validation, seed=0):
    return write_parts(selection.select_parts(data, validation=validation, seed=seed), output)


def write_cleaned(data, labels, output):
    return write_dataset(selection.select_relabeled(data, selection.select_all(data), labels), output)
