"""Check of a dataset: reads and decodes every image, lists the faults, and writes a copy without them."""

# N images

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.damaged_records import DamagedRecords, DataFault, is_record_file
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
    repair: Path | None = None,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> CheckReport:
    """Read and decode every image; with `repair`, write a clean copy.

    The copy has no damaged images. Of equal images of one identity it has the first. It has none of the equal images
    of several identities, because the right identity is unknown. Identities are renumbered without gaps. The copy
    has no landmarks: those of a damaged dataset may belong to other images.

    Args:
        folder: the dataset.
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
    # An array, not objects: 24 bytes per image.
    image_N = np.empty(count, [("number", np.int64), ("label", np.int64), ("digest", np.uint64)])
    decoded = 0
    checked = map_in_order(partial(_check_image, source), range(count), workers)
    for result in report_progress(checked, count, progress):
        if isinstance(result, DataFault):
            faults.append(result)
        elif result is not None:
            image_N[decoded] = result
            decoded += 1
    image_N = image_N[:decoded]  # without rows for images that have a fault
    keep = np.ones(decoded, bool)
    for rows in _equal_groups(image_N["digest"]):
        faults += _check_equal_images(source, image_N, rows, keep)
    faults += [*_empty_identities(image_N["label"]), *_contradictions(folder, image_N["label"])]
    if repair is not None:
        if not keep.any():
            raise DataError(f"{folder}: every image has a fault; there is nothing to write")
        good_N = image_N[keep]
        if isinstance(source, DamagedRecords):
            source.labels[good_N["number"]] = good_N["label"]
        copy = Selection(source, [folder], good_N["number"], good_N["label"])
        write_dataset(copy, repair, workers=workers)
    return CheckReport(decoded, len(np.unique(image_N["label"])), faults, int(keep.sum()))


def _check_image(
    source: FaceDataset | DamagedRecords, number: int
) -> tuple[int, int, np.uint64] | DataFault | None:
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
        decode_rgb(data, location=location)
    except DataError as error:
        return DataFault("image", str(error))
    return number, int(label), _digest(data)


def _digest(data: bytes) -> np.uint64:
    """Hash bytes to 64 bits (BLAKE2b). Among 42 million values, a collision has a probability of 5e-5."""
    return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)[0]


def _equal_groups(key: np.ndarray) -> list[np.ndarray]:
    """Return the ascending rows of each value that occurs more than once in (N,)."""
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    return [rows for rows in np.split(order, edges) if len(rows) > 1]


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
