"""Check of a dataset: reads and decodes every image, lists the faults, and writes a copy without them."""

# N images

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.damaged_images import DataFault, TolerantReader, open_tolerant
from facetrain.data.tools.near_duplicates import HASH_WORDS, digest, equal_groups, near_pairs, perceptual_hash
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.writing import Selection, write_dataset
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
    good: np.ndarray
    """Images that a clean copy has: int64 (N, 2), number of the record and label."""

    @property
    def damaged(self) -> bool:
        """Whether a fault stops training, or makes it learn wrong labels."""
        return any(fault.kind in DAMAGE for fault in self.faults)


@dataclass(frozen=True)
class _DecodedImage:
    label: int
    digest: np.uint64
    hash: np.ndarray | None
    """Perceptual hash, uint32 (8,); None if near-duplicates are not searched."""


@dataclass(frozen=True)
class _DecodedImages:
    number_N: np.ndarray
    """Numbers of the records, int64."""
    label_N: np.ndarray
    digest_N: np.ndarray
    hash_N8: np.ndarray
    """uint32; no rows if near-duplicates are not searched."""


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
    reader = open_tolerant(folder)
    checked = map_in_order(
        lambda number: _check_image(reader, number, near_duplicates), range(reader.count), workers
    )
    faults = list(reader.faults)
    images = _collect(report_progress(checked, reader.count, progress), reader.count, faults)
    keep = np.ones(len(images.number_N), bool)
    for rows in equal_groups(images.digest_N):
        faults += _check_equal_images(reader, images, rows, keep)
    if near_duplicates:
        faults += _near_duplicates(reader, images)
    faults += _empty_identities(images.label_N) + _contradictions(folder, images.label_N)
    good = np.stack([images.number_N[keep], images.label_N[keep]], 1)
    if repair is not None:
        if not len(good):
            raise DataError(f"{folder}: every image has a fault; there is nothing to write")
        landmarks_N52 = _landmarks(reader, folder, faults)
        copy = Selection(_StoredImages(reader, good), good[:, 0], good[:, 1], landmarks=landmarks_N52)
        write_dataset(copy, repair, [folder], workers=workers)
    return CheckReport(len(images.number_N), len(np.unique(images.label_N)), faults, good)


def _check_image(
    reader: TolerantReader, number: int, near_duplicates: bool
) -> _DecodedImage | DataFault | None:
    try:
        stored = reader.read(number)
    except DataError as error:
        return DataFault("record", str(error))
    if stored is None:
        return None
    location, label = reader.location(number), stored.label
    if not (0 <= label < _NUM_LABELS and label == int(label)):
        return DataFault("label", f"{location}: the label is {label}")
    try:
        image = decode_rgb(stored.data, location=location)
    except DataError as error:
        return DataFault("image", str(error))
    return _DecodedImage(int(label), digest(stored.data), perceptual_hash(image) if near_duplicates else None)


def _collect(
    checked: Iterable[_DecodedImage | DataFault | None], count: int, faults: list[DataFault]
) -> _DecodedImages:
    """Return the decoded images, and append the faults of the others to `faults`."""
    # Arrays, not objects: 20 bytes per image, and 32 more with perceptual hashes.
    number, label = np.empty(count, np.int64), np.empty(count, np.int64)
    digests, hashes = np.empty(count, np.uint64), np.empty((0, HASH_WORDS), np.uint32)
    decoded = 0
    for record, result in enumerate(checked):
        if isinstance(result, DataFault):
            faults.append(result)
        elif result is not None:
            number[decoded], label[decoded], digests[decoded] = record, result.label, result.digest
            if result.hash is not None:
                if not len(hashes):
                    hashes = np.empty((count, HASH_WORDS), np.uint32)
                hashes[decoded] = result.hash
            decoded += 1
    return _DecodedImages(number[:decoded], label[:decoded], digests[:decoded], hashes[:decoded])


def _check_equal_images(
    reader: TolerantReader, images: _DecodedImages, rows: np.ndarray, keep: np.ndarray
) -> list[DataFault]:
    """Return the faults of equal images (rows), and clear `keep` for those that a clean copy leaves out."""
    first = reader.location(int(images.number_N[rows[0]]))
    labels = np.unique(images.label_N[rows])
    if len(labels) > 1:
        keep[rows] = False
        listed = ", ".join(reader.identity_name(int(label)) for label in labels[:_MAX_LISTED_LABELS])
        return [
            DataFault("conflicting_labels", f"{first}: {len(rows)} equal images have the identities {listed}")
        ]
    keep[rows[1:]] = False
    return [
        DataFault("duplicate", f"{reader.location(int(images.number_N[row]))}: equal to {first}")
        for row in rows[1:]
    ]


def _near_duplicates(reader: TolerantReader, images: _DecodedImages) -> list[DataFault]:
    pairs = near_pairs(images.hash_N8)
    # Equal images are reported as duplicates or conflicting labels.
    pairs = pairs[images.digest_N[pairs[:, 0]] != images.digest_N[pairs[:, 1]]]

    def described(row: int) -> str:
        identity = reader.identity_name(int(images.label_N[row]))
        return f"{reader.location(int(images.number_N[row]))} (identity {identity})"

    return [
        DataFault("near_duplicate", f"{described(other)}: nearly equal to {described(one)}")
        for one, other in pairs.tolist()
    ]


def _empty_identities(label_N: np.ndarray) -> list[DataFault]:
    present = np.unique(label_N)
    if not len(present) or len(present) == present[-1] + 1:
        return []
    first = int(np.flatnonzero(present != np.arange(len(present)))[0])
    count = int(present[-1]) + 1
    return [
        DataFault(
            "empty_identities",
            f"{count - len(present):,} of {count:,} identities have no image; the first is {first}",
        )
    ]


def _contradictions(folder: Path, label_N: np.ndarray) -> list[DataFault]:
    """Open the dataset as training does, and compare the labels that training would use with the stored ones."""
    try:
        source = open_dataset(folder)
    except DataError as error:
        return [DataFault("dataset", str(error))]
    # Sorted, not counted: a damaged label can be so large that the counts of all labels below it fill the memory.
    used, stored = np.sort(source.labels), np.sort(label_N)
    if len(used) == len(stored) and len(used) and used[-1] == stored[-1] and (used != stored).any():
        first = int(np.argmax(used != stored))
        wrong = min(int(used[first]), int(stored[first]))
        return [
            DataFault(
                "dataset",
                f"{folder}: identity {wrong} has {np.count_nonzero(stored == wrong):,} images by the labels of the "
                f"images, and {np.count_nonzero(used == wrong):,} by the identity records",
            )
        ]
    return []


def _landmarks(reader: TolerantReader, folder: Path, faults: list[DataFault]) -> np.ndarray | None:
    """Return the landmarks of all records, (count, 5, 2); None, perhaps with a fault, without any."""
    try:
        return reader.landmarks()
    except DataError as error:
        faults.append(
            DataFault(
                "dataset",
                f"{folder}: its landmarks are not in the clean copy, because they cannot be assigned to its images; "
                f"find the landmarks of the copy with `facetrain data landmarks` ({error})",
            )
        )
        return None


class _StoredImages:
    """Records of a damaged dataset as a dataset of the images that can be read."""

    def __init__(self, reader: TolerantReader, good: np.ndarray) -> None:
        self._reader = reader
        self.num_images = reader.count
        self.labels = np.zeros(reader.count, np.int64)
        self.labels[good[:, 0]] = good[:, 1]
        self.num_classes = int(self.labels.max()) + 1
        self.location, self.name, self.identity_name = reader.location, reader.name, reader.identity_name

    def read(self, index: int) -> bytes:
        """Return the image of a record again."""
        stored = self._reader.read(index)
        if stored is None:
            raise DataError(f"{self.location(index)}: the record changed during the check; run it again")
        return stored.data
