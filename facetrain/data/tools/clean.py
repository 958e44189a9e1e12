"""Label faults of a dataset, found by embeddings, and the labels without them."""

# N images   L different labels   D embedding

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from facetrain.data.tools.fault_calibration import FaultThreshold
from facetrain.data.tools.identity_groups import find_duplicate_identities, find_mixed_identities
from facetrain.data.tools.label_faults import (
    DUPLICATE_IDENTITY,
    MIXED_IDENTITY,
    LabelFault,
    apply_faults,
    certain_faults,
)
from facetrain.data.tools.similarity import Separation, check_labeled, measure_separation
from facetrain.data.tools.wrong_images import find_wrong_images


@dataclass(frozen=True)
class CleanReport:
    """Label faults of a dataset, and its corrected labels."""

    faults: list[LabelFault]
    label_N: np.ndarray
    """Labels after the decisions on `certain_faults`, int64; −1 for images to leave out."""
    separation: Separation
    """How far the model can be trusted."""
    thresholds: dict[str, FaultThreshold] = field(default_factory=dict)

    @property
    def expected_false(self) -> float:
        """Expected number of wrong decisions, without those on duplicate identities, for which no estimate holds."""
        return sum(one.expected_false for kind, one in self.thresholds.items() if kind != DUPLICATE_IDENTITY)


def find_label_faults(embedding_ND: np.ndarray, label_N: np.ndarray) -> CleanReport:
    """Compare each image with the centers of all identities, and each center with the other centers.

    First, identities whose images form two groups of different people are split. Then identities that show one person
    are reported; the corrected labels do not merge them, because the threshold assumes that all pairs of people are
    equally easy to separate. Last, images that do not show their identity get the label of the one that they show, or
    −1. Each threshold is calibrated on the dataset, see `calibrate_threshold` and `calibrate_mislabeled`. If the model
    cannot separate the identities, nothing is reported.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels from 0, int64.

    Raises:
        DataError: the images have no labels.
    """
    check_labeled(label_N)
    # A damaged label can be so large that the centers of all labels below it would fill the memory.
    present_L, row_N = np.unique(label_N, return_inverse=True)
    found = _find_label_faults(embedding_ND, row_N)
    groups = int(present_L[-1]) + 1 + np.arange(len(found.faults))
    label_of = np.concatenate([present_L.astype(np.int64), groups, [-1]])  # the last one for −1
    faults = [
        replace(
            fault,
            identity=int(label_of[fault.identity]),
            other=int(label_of[fault.other]),
            target=int(label_of[fault.target]),
        )
        for fault in found.faults
    ]
    return replace(found, faults=faults, label_N=label_of[found.label_N])


def _find_label_faults(embedding_ND: np.ndarray, label_N: np.ndarray) -> CleanReport:
    """Find the faults of labels without gaps; groups of mixed identities get the labels after them."""
    label_N = label_N.astype(np.int64)
    genuine_N, separation = measure_separation(embedding_ND, label_N)
    if separation.useless:
        return CleanReport([], label_N, separation)
    # Images far from their identity would spoil the centers of other images; the last step decides on them.
    clear_N = ~(genuine_N < separation.threshold)
    # Splits come first: the center of an identity with two people is similar to neither of them.
    mixed, split_threshold = find_mixed_identities(
        embedding_ND, np.where(clear_N, label_N, -1), separation.threshold
    )
    label = np.where(clear_N, apply_faults(label_N, mixed), -1)
    # With the labels after the splits, so that one half of an identity can belong to another identity.
    same, same_threshold = find_duplicate_identities(embedding_ND, label, separation.threshold)
    label = apply_faults(label_N, mixed)
    pairs = {frozenset((pair.identity, pair.other)) for pair in same}
    images, thresholds, separation = find_wrong_images(embedding_ND, label, pairs, separation)
    faults = mixed + same + [_in_dataset(fault, label_N, label) for fault in images]
    thresholds = {MIXED_IDENTITY: split_threshold, DUPLICATE_IDENTITY: same_threshold} | thresholds
    return CleanReport(faults, apply_faults(label_N, certain_faults(faults)), separation, thresholds)


def _in_dataset(fault: LabelFault, label_N: np.ndarray, corrected_N: np.ndarray) -> LabelFault:
    """Return a fault of an image with the identities of the dataset: splitting changed the labels."""
    other = fault.other
    if other > int(label_N.max()):
        # The identity that the group of a mixed identity has in the dataset.
        other = int(np.bincount(label_N[corrected_N == other]).argmax())
    return replace(fault, identity=int(label_N[fault.image]), other=other)
