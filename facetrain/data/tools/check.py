"""Check of a dataset: reads and decodes every image, lists the faults, and writes a copy without them."""

# N images

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, image_landmarks
from facetrain.data.formats.landmark_file import landmarks_path
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.damaged_records import DamagedRecords, DataFault, is_record_file
from facetrain.data.tools.near_duplicates import HASH_WORDS, digest, equal_groups, near_pairs, perceptual_hash
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.selection import Selection
from facetrain.data.tools.writing import write_dataset
from facetrain.errors import DataError
from facetrain.progress import ProgressCallback, ignore_progress

FAULT_KINDS = {
    "index": "the index does not match the .rec file",
    "record": "damaged records",
    "label": "labels that are not whole numbers from 0 to 2^31 − 1",
    "image": "images that cannot be decoded",
    "dataset": "files of the dataset that contradict each other",
    "conflicting_labels": "equal images with different identities",
    "duplicate": "equal images of the same identity",
    "near_duplicate": "pairs of nearly equal images",
    "empty_identities": "identities without images",
}
DAMAGE = frozenset({"index", "record", "label", "image", "dataset"})
"""Kinds of faults that stop training, or make it learn wrong labels."""
_NUM_LABELS = 2**31
_MAX_LISTED_LABELS = 5


@dataclass(frozen=True)
class CheckReport:
    """Faults of a dataset, and the images without faults."""

    images: int
    """Images that can be decoded and have a valid label."""
    identities: int
    """Identities of these images."""
    faults: list[DataFault]
    good: int
    """Images that a clean copy has."""

    @property
    def damaged(self) -> bool:
        """Whether a fault stops training, or makes it learn wrong labels."""
        return any(fault.kind in DAMAGE for fault in self.faults)


def check(
    folder: Path,
    *,
    near_duplicates: bool = False,
    repair: Path | None = None,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> CheckReport:
    """Read and decode every image; with `repair`, write a clean copy.

    The copy has no damaged images. Of equal images of one identity it has the first. It has none of the equal images
    of several identities, because the right identity is unknown. Near-duplicates stay. Identities are renumbered
    without gaps. The images keep their landmarks; if these cannot be assigned to images, a fault says so.

    Args:
        folder: the dataset.
        near_duplicates: search for near-duplicates as well.
        repair: folder for the clean copy; it must not exist.
        workers: number of threads; one per usable core if None.
        progress: called after every image.

    Raises:
        DataError: there is no dataset, it has no image without faults, or the copy cannot be written.
    """
    is_records = is_record_file(folder)
    # A landmark file that does not fit is a separate fault: `_contradictions` opens the dataset as training does.
    source = DamagedRecords(folder) if is_records else open_dataset(folder, with_landmarks=False)
    count = source.num_images
    faults = list(source.faults) if isinstance(source, DamagedRecords) else []
    # An array, not objects: 24 bytes per image, and 32 more with perceptual hashes.
    columns: list[Any] = [("number", np.int64), ("label", np.int64), ("digest", np.uint64)]
    image_N = np.empty(count, columns + [("hash", np.uint32, HASH_WORDS)] * near_duplicates)
    decoded = 0
    checked = map_in_order(
        lambda number: _check_image(source, number, near_duplicates), range(count), workers
    )
    for result in report_progress(checked, count, progress):
        if isinstance(result, DataFault):
            faults.append(result)
        elif result is not None:
            image_N[decoded] = result
            decoded += 1
    image_N = image_N[:decoded]  # without rows for images that have a fault
    keep = np.ones(decoded, bool)
    for rows in equal_groups(image_N["digest"]):
        faults += _check_equal_images(source, image_N, rows, keep)
    if near_duplicates:
        faults += _near_duplicates(source, image_N)
    faults += [*_empty_identities(image_N["label"]), *_contradictions(folder, image_N["label"])]
    if repair is not None:
        if not keep.any():
            raise DataError(f"{folder}: every image has a fault; there is nothing to write")
        good_N = image_N[keep]
        if isinstance(source, DamagedRecords):
            source.labels[good_N["number"]] = good_N["label"]
        landmarks_N52 = _landmarks(source, folder, faults)
        copy = Selection(source, [folder], good_N["number"], good_N["label"], landmarks=landmarks_N52)
        write_dataset(copy, repair, workers=workers)
    return CheckReport(decoded, len(np.unique(image_N["label"])), faults, int(keep.sum()))


def _check_image(
    source: FaceDataset | DamagedRecords, number: int, near_duplicates: bool
) -> tuple[Any, ...] | DataFault | None:
    """Return a row of the table of images, a fault, or None for a record that describes other records."""
    try:
        if isinstance(source, DamagedRecords):
            stored = source.stored(number)
            if stored is None:
                return None
            label, data = stored
        else:
            label, data = float(source.labels[number]), source.read(number)
    except DataError as error:
        return DataFault("record", str(error))
    location = source.location(number)
    if not (0 <= label < _NUM_LABELS and label == int(label)):
        return DataFault("label", f"{location}: the label is {label}")
    try:
        image = decode_rgb(data, location=location)
    except DataError as error:
        return DataFault("image", str(error))
    hashes = [perceptual_hash(image)] if near_duplicates else []
    return number, int(label), digest(data), *hashes


def _check_equal_images(
    source: FaceDataset, image_N: np.ndarray, rows: np.ndarray, keep: np.ndarray
) -> Iterator[DataFault]:
    """Yield the faults of equal images (rows), and clear `keep` for those that a clean copy leaves out."""
    first, *others = (source.location(number) for number in image_N["number"][rows].tolist())
    labels = np.unique(image_N["label"][rows]).tolist()
    if len(labels) > 1:
        keep[rows] = False
        listed = ", ".join(identity_name(source, label) for label in labels[:_MAX_LISTED_LABELS])
        yield DataFault(
            "conflicting_labels", f"{first}: {len(rows)} equal images have the identities {listed}"
        )
        return
    keep[rows[1:]] = False
    for other in others:
        yield DataFault("duplicate", f"{other}: equal to {first}")


def _near_duplicates(source: FaceDataset, image_N: np.ndarray) -> Iterator[DataFault]:
    def described(row: int) -> str:
        number, label = int(image_N["number"][row]), int(image_N["label"][row])
        return f"{source.location(number)} (identity {identity_name(source, label)})"

    for one, other in near_pairs(image_N["hash"]).tolist():
        # Equal images are reported as duplicates or conflicting labels.
        if image_N["digest"][one] != image_N["digest"][other]:
            yield DataFault("near_duplicate", f"{described(other)}: nearly equal to {described(one)}")


def _empty_identities(label_N: np.ndarray) -> Iterator[DataFault]:
    present = np.unique(label_N)
    if len(present) and len(present) <= present[-1]:
        first = int(np.flatnonzero(present != np.arange(len(present)))[0])
        count = int(present[-1]) + 1
        yield DataFault(
            "empty_identities",
            f"{count - len(present):,} of {count:,} identities have no image; the first is {first}",
        )


def _contradictions(folder: Path, label_N: np.ndarray) -> Iterator[DataFault]:
    """Open the dataset as training does, and compare the labels that training would use with the stored ones."""
    try:
        source = open_dataset(folder)
    except DataError as error:
        yield DataFault("dataset", str(error))
        return
    # Sorted, not counted: a damaged label can be so large that the counts of all labels below it fill the memory.
    used, stored = np.sort(source.labels), np.sort(label_N)
    if len(used) == len(stored) and len(used) and used[-1] == stored[-1] and (used != stored).any():
        wrong = np.count_nonzero(used != stored)
        yield DataFault(
            "dataset", f"{folder}: the identity records contradict the labels of {wrong:,} images"
        )


def _landmarks(source: FaceDataset, folder: Path, faults: list[DataFault]) -> np.ndarray | None:
    """Return the landmarks of all images or records, (count, 5, 2); None, perhaps with a fault, without any."""
    if isinstance(source, DamagedRecords) and not landmarks_path(folder).is_file():
        return None
    try:
        landmarks_N52 = image_landmarks(open_dataset(folder))
        if landmarks_N52 is not None and isinstance(source, DamagedRecords):
            return source.in_file_order(landmarks_N52)
        return landmarks_N52
    except DataError as error:
        faults.append(
            DataFault(
                "dataset",
                f"{folder}: its landmarks are not in the clean copy, because they cannot be assigned to its images; "
                f"find the landmarks of the copy with `facetrain data landmarks` ({error})",
            )
        )
        return None
