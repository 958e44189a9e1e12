"""Subject ids of images or templates, derived from equal keys or from genuine pairs."""

# N items that are compared (images or templates)   P pairs

from __future__ import annotations

import numpy as np


def connected_subjects(
    first_P: np.ndarray, second_P: np.ndarray, same_P: np.ndarray, count: int
) -> np.ndarray:
    """Return the subject id of each of `count` items, from 0 without gaps: int64 (N,).

    Subjects are the connected components of the graph of genuine pairs (`same_P`). A person whose images
    no chain of genuine pairs connects counts as several subjects; two people are never merged.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edge = first_P[same_P], second_P[same_P]
    graph = coo_array((np.ones(len(edge[0]), bool), edge), shape=(count, count))
    return connected_components(graph, directed=False)[1].astype(np.int64)


def items_of_pairs(first_P: np.ndarray, second_P: np.ndarray, count: int) -> np.ndarray:
    """Return which of `count` items are in a pair: bool (N,)."""
    used_N = np.zeros(count, bool)
    used_N[first_P] = used_N[second_P] = True
    return used_N


def subjects_of_items(subject_N: np.ndarray, used_N: np.ndarray) -> np.ndarray:
    """Return new ids from 0 without gaps for the subjects of the items in use, bool (N,); −1 for others: int64 (N,).

    The bootstrap draws as many subjects as there are ids: people who are in no comparison would narrow its intervals.
    """
    dense_N = np.full(len(subject_N), -1)
    dense_N[used_N] = np.unique(subject_N[used_N], return_inverse=True)[1]
    return dense_N
