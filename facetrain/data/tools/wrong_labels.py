"""Images with wrong labels, found by their embeddings, and the labels without them."""

# N images   L different labels   D embedding

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from facetrain.data.tools.fault_threshold import NOTHING, FaultThreshold, calibrate_threshold
from facetrain.data.tools.similarity import (
    SelectedRows,
    Separation,
    compute_centers,
    leave_one_out_similarity,
    measure_separation,
    nearest_image,
    nearest_other_center,
    random_other_labels,
    similarity_to_center,
)
from facetrain.distinct import distinct
from facetrain.errors import DataError

_NEAREST_WEIGHT = 0.7
"""Similarity to a center that one similar image of the identity is worth: single images are more similar by chance."""
_NEAREST_SHARE = 0.25
"""Share of the most similar image in the similarity to an identity; the rest is the center's."""
_LEAST_GENUINE = 0.05
"""Share of the images that are less similar to their identity than a moved image must be to its new one."""
_LEAST_LEAD = 0.1
"""Lead in similarity of a moved image's new identity over all others, divided by the median lead of correct labels."""


@dataclass(frozen=True)
class WrongLabel:
    """Image that does not show its identity, and the decision on it."""

    image: int
    identity: int
    """Identity in the dataset."""
    target: int
    """Identity that the image shows, which becomes its label; −1: none clearly, and the image is left out."""
    similarity: float
    """Similarity of the image to `target`, or to its own identity if there is none."""


@dataclass(frozen=True)
class CleanReport:
    """Images with wrong labels, and how far the decisions can be trusted."""

    wrong: list[WrongLabel]
    """Those to move first, then those to leave out."""
    separation: Separation
    threshold: FaultThreshold


def find_wrong_labels(embedding_ND: np.ndarray, label_N: np.ndarray) -> CleanReport:
    """Compare each image with its identity and with the identity of the nearest other center.

    An image has a wrong label if the similarity to the other identity exceeds the one to its own by a threshold that is
    calibrated on the dataset, see `calibrate_threshold`. The similarity to an identity is three quarters of that to its
    center and one quarter of that to its most similar image; the center of the own identity is without the image
    itself, and counts as at least 70 % of the most similar image: a center does not represent a person with several
    looks or few correct labels. If the model cannot separate the identities, nothing is reported.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels from 0, int64.

    Raises:
        DataError: the images have no labels.
    """
    if not len(label_N) or label_N.min() < 0:
        raise DataError("these images have no identities; give a dataset: records, or a folder per identity")
    # A damaged label can be so large that the centers of all labels below it would fill the memory.
    present_L, row_N = np.unique(label_N, return_inverse=True)
    separation = measure_separation(embedding_ND, row_N)
    if separation.useless:
        return CleanReport([], separation, NOTHING)
    centers = compute_centers(embedding_ND, row_N, len(present_L))
    same_N = nearest_image(embedding_ND, row_N, row_N)
    center_N = np.fmax(leave_one_out_similarity(embedding_ND, row_N, centers), _NEAREST_WEIGHT * same_N)
    nearest_N, other_N = nearest_other_center(embedding_ND, row_N, centers.unit_KD)
    genuine_N = _similarity(center_N, same_N)
    impostor_N = _similarity(other_N, nearest_image(embedding_ND, row_N, nearest_N))
    planted_N = _planted(embedding_ND, row_N, centers.unit_KD)
    threshold = calibrate_threshold(genuine_N, impostor_N, planted_N)
    wrong_N = impostor_N - genuine_N >= threshold.threshold
    kept_N = ~wrong_N & np.isfinite(genuine_N)
    rows = np.flatnonzero(wrong_N)
    _, third = nearest_other_center(embedding_ND[rows], nearest_N[rows], centers.unit_KD)
    if kept_N.any() and len(rows):
        least = float(np.quantile(center_N[kept_N], _LEAST_GENUINE))
        lead = _LEAST_LEAD * float(np.median((center_N - other_N)[kept_N]))
        moved = other_N[rows] >= np.maximum(least, third + lead)
        right = np.flatnonzero(~wrong_N)
        separation = measure_separation(SelectedRows(embedding_ND, right), row_N[right])
    else:
        moved = np.zeros(len(rows), bool)
    wrong = [
        WrongLabel(row, int(label_N[row]), int(present_L[nearest_N[row]]), float(other_N[row]))
        if moves
        else WrongLabel(row, int(label_N[row]), -1, float(center_N[row]))
        for row, moves in zip(rows.tolist(), moved.tolist(), strict=True)
    ]
    return CleanReport(sorted(wrong, key=lambda one: one.target < 0), separation, threshold)


def _planted(embedding_ND: np.ndarray, row_N: np.ndarray, unit_KD: np.ndarray) -> np.ndarray:
    """Return the similarity of each image to a random other identity, as if that was its label: (N,)."""
    random_N = random_other_labels(row_N)
    image_N = nearest_image(embedding_ND, row_N, random_N)
    center_N = np.fmax(similarity_to_center(embedding_ND, random_N, unit_KD), _NEAREST_WEIGHT * image_N)
    return _similarity(center_N, image_N)


def _similarity(center_N: np.ndarray, image_N: np.ndarray) -> np.ndarray:
    return (1 - _NEAREST_SHARE) * center_N + _NEAREST_SHARE * image_N


def corrected_labels(label_N: np.ndarray, wrong: Iterable[WrongLabel]) -> np.ndarray:
    """Return the labels after the decisions, int64 (N,); −1 for images to leave out."""
    corrected_N = label_N.astype(np.int64)
    for one in wrong:
        corrected_N[one.image] = one.target
    return corrected_N


def count_changes(label_N: np.ndarray, corrected_N: np.ndarray) -> tuple[int, int]:
    """Return the numbers of images whose label changes, and of identities that keep none of their images."""
    kept_N = label_N == corrected_N
    disappearing = len(distinct(label_N)) - len(distinct(label_N[kept_N]))
    return int((~kept_N).sum()), disappearing
