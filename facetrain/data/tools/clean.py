"""Cleaning of a dataset: its label faults are found by embeddings, and it is written again with corrected labels."""

# N images   L different labels   D embedding

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.fault_calibration import PRECISION, FaultThreshold
from facetrain.data.tools.identity_groups import find_duplicate_identities, find_mixed_identities
from facetrain.data.tools.label_faults import (
    DUPLICATE_IDENTITY,
    MIXED_IDENTITY,
    LabelFault,
    applied_by_default,
    apply_faults,
)
from facetrain.data.tools.separation import Separation, measure_separation
from facetrain.data.tools.similarity import check_labeled
from facetrain.data.tools.writing import Selection, WrittenDataset, write_dataset
from facetrain.data.tools.wrong_images import find_wrong_images
from facetrain.errors import DataError
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class CleanReport:
    """Label faults of a dataset, and its corrected labels."""

    separation: Separation
    faults: list[LabelFault]
    label_N: np.ndarray
    """Corrected labels, int64; −1 for images to leave out."""
    thresholds: dict[str, FaultThreshold] = field(default_factory=dict)

    @property
    def expected_false(self) -> float:
        """Expected number of wrong decisions, without those on duplicate identities, for which no estimate holds."""
        return sum(one.expected_false for kind, one in self.thresholds.items() if kind != DUPLICATE_IDENTITY)


def find_label_faults(
    embedding_ND: np.ndarray, label_N: np.ndarray, *, precision: float = PRECISION, merge: bool = False
) -> CleanReport:
    """Compare each image with the centers of all identities, and each center with the other centers.

    First, identities whose images form two groups of different people are split. Then identities that show one person
    are reported, and merged with `merge`. Last, images that do not show their identity get the label of the one that
    they show, or −1. Each threshold is calibrated on the dataset, see `calibrate_threshold` and `calibrate_mislabeled`.
    If the model cannot separate the identities, nothing is reported.

    Args:
        embedding_ND: unit rows, float32.
        label_N: labels from 0, int64.
        precision: share of true faults among the reported ones to aim at.
        merge: whether the corrected labels merge duplicate identities. The threshold for these assumes that all pairs
            of people are equally easy to separate, so that it merges people whom the model confuses.

    Raises:
        DataError: the images have no labels.
    """
    check_labeled(label_N)
    # A damaged label can be so large that the centers of all labels below it would fill the memory.
    present_L, row_N = np.unique(label_N, return_inverse=True)
    report = _find_label_faults(embedding_ND, row_N, precision=precision, merge=merge)
    groups = int(present_L[-1]) + 1 + np.arange(len(report.faults))
    label_of = np.concatenate([present_L.astype(np.int64), groups, [-1]])  # the last one for −1
    faults = [
        replace(
            fault,
            identity=int(label_of[fault.identity]),
            other=int(label_of[fault.other]),
            target=int(label_of[fault.target]),
        )
        for fault in report.faults
    ]
    return replace(report, faults=faults, label_N=label_of[report.label_N])


def _find_label_faults(
    embedding_ND: np.ndarray, label_N: np.ndarray, *, precision: float, merge: bool
) -> CleanReport:
    """Find the faults of labels without gaps; groups of mixed identities get the labels after them."""
    label = label_N.astype(np.int64)
    genuine_N, separation = measure_separation(embedding_ND, label)
    if separation.useless:
        return CleanReport(separation, [], label)
    # Images far from their identity would spoil the centers of other images; the last step decides on them.
    clear_N = ~(genuine_N < separation.threshold)
    same_person = separation.threshold
    mixed, split_threshold = find_mixed_identities(
        embedding_ND, np.where(clear_N, label, -1), same_person, precision
    )
    faults = []
    for number, one in enumerate(mixed):
        target = int(label_N.max()) + 1 + number
        label[one.rows] = target
        rows = tuple(one.rows.tolist())
        faults.append(LabelFault(MIXED_IDENTITY, one.identity, -1, rows[0], one.similarity, rows, target))
    same, same_threshold = find_duplicate_identities(
        embedding_ND, np.where(clear_N, label, -1), same_person, precision
    )
    for pair in same:
        faults.append(LabelFault(DUPLICATE_IDENTITY, pair.one, pair.other, -1, pair.similarity, (), pair.one))
    label = apply_faults(label_N, applied_by_default(faults, merge=merge))
    images, image_thresholds, separation = find_wrong_images(
        embedding_ND, label, {(pair.one, pair.other) for pair in same}, separation, precision
    )
    faults += [_in_dataset(fault, label_N, label) for fault in images]
    thresholds = {MIXED_IDENTITY: split_threshold, DUPLICATE_IDENTITY: same_threshold} | image_thresholds
    corrected = apply_faults(label_N, applied_by_default(faults, merge=merge))
    return CleanReport(separation, faults, corrected, thresholds)


def _in_dataset(fault: LabelFault, label_N: np.ndarray, corrected_N: np.ndarray) -> LabelFault:
    """Return a fault of an image with the identities of the dataset: splitting and merging changed the labels."""
    other = fault.other
    if other > int(label_N.max()):
        # The identity that the group of a mixed identity has in the dataset.
        other = int(np.bincount(label_N[corrected_N == other]).argmax())
    return LabelFault(
        fault.kind,
        int(label_N[fault.image]),
        other,
        fault.image,
        fault.similarity,
        fault.images,
        fault.target,
    )


def write_cleaned(
    folder: Path,
    label_N: np.ndarray,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write the dataset of `folder` with corrected labels, renumbered without gaps; −1 leaves an image out.

    Raises:
        DataError: no image is left, or the output cannot be written.
    """
    source = open_dataset(folder)
    numbers = np.flatnonzero(label_N >= 0)
    if not len(numbers):
        raise DataError(f"{folder}: no image is left; check the report, and that the model fits this dataset")
    selection = Selection(source, numbers, label_N[numbers])
    return write_dataset(selection, output, [folder], workers=workers, progress=progress)
