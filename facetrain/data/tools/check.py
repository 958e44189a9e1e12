"""Check of a dataset: reads and decodes every image, lists the faults, and writes a copy without them."""

# N images

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, evenly_spread
from facetrain.data.dataset_card import read_cards
from facetrain.data.images.decode import decode_rgb
from facetrain.data.images.header import flat_blocks_in_zeros
from facetrain.data.open_dataset import open_aligned, open_dataset, require_aligned
from facetrain.data.skipped_files import SkippedFile
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.selection import Selection
from facetrain.data.tools.writing import write_dataset
from facetrain.distinct import distinct
from facetrain.errors import DataError, UnreadableError
from facetrain.progress import ProgressCallback, ignore_progress

FAULT_KINDS = {
    "image": "images that cannot be read or decoded",
    "dataset": "files beside the images that contradict them",
    "conflicting_labels": "equal images with different identities",
    "duplicate": "equal images of the same identity",
    "empty_identities": "identities without images",
    "one_identity": "datasets of one identity, which is no training set",
}
DAMAGE = frozenset({"image", "dataset", "one_identity"})
"""Kinds of faults that stop training."""
_MAX_LISTED_LABELS = 5
_NAMED_IMAGES = 100


@dataclass(frozen=True)
class DataFault:
    """Fault of a dataset."""

    kind: str
    """A key of `FAULT_KINDS`."""
    message: str
    """Location and description."""


@dataclass(frozen=True)
class CheckReport:
    """Faults of a dataset, and the images without faults."""

    images: int
    """Images that can be decoded."""
    identities: int
    """Identities of these images."""
    faults: list[DataFault]
    good: int
    """Images that a clean copy has."""
    skipped: list[SkippedFile]
    """Files that are no images of the dataset, and so not checked."""
    lost_identities: list[str]
    """Names of the identities of which the clean copy that was written has no image."""

    @property
    def damaged(self) -> bool:
        """Whether a fault stops training."""
        return any(fault.kind in DAMAGE for fault in self.faults)


def check(
    folder: Path,
    *,
    repair: Path | None = None,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
    writing: ProgressCallback = ignore_progress,
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
        writing: called after every image of the copy.

    Raises:
        DataError: the dataset cannot be opened, a table of names is not its own, it has no image without faults, or
            the copy cannot be written; with `repair`, its card is damaged.
    """
    # A landmark file that does not fit is a fault of its own, see below.
    source = open_dataset(folder, with_landmarks=False)
    _read_names(source)  # now: the images can take hours
    if repair is not None:
        require_aligned(source, str(folder))
        cards = read_cards(folder)
    count, faults = source.num_images, list[DataFault]()
    # An array, not objects: 24 bytes per image.
    image_N = np.empty(count, [("number", np.int64), ("label", np.int64), ("digest", np.uint64)])
    decoded = 0
    checked = map_in_order(partial(_check_image, source), range(count), workers)
    for result in report_progress(checked, count, progress):
        if isinstance(result, DataFault):
            faults.append(result)
        else:
            image_N[decoded] = result
            decoded += 1
    image_N = image_N[:decoded]  # without rows for images that have a fault
    keep = np.ones(decoded, bool)
    for rows in _equal_groups(image_N["digest"]):
        faults += _check_equal_images(source, image_N, rows, keep)
    faults += _identities(image_N["label"], source.num_classes)
    try:
        open_aligned(folder)  # as training does, with the files beside the images
        read_cards(folder)
    except DataError as error:
        faults.append(DataFault("dataset", str(error)))
    lost = list[str]()
    if repair is not None:
        if not keep.any():
            raise DataError(f"{folder}: every image has a fault; there is nothing to write")
        good_N = image_N[keep]
        skipped = [*source.skipped, *_left_out(source, image_N["number"], keep, faults)]
        copy = Selection(source, cards, good_N["number"], good_N["label"], None, skipped=skipped)
        lost = write_dataset(copy, repair, workers=workers, progress=writing).lost_identities
    identities = len(distinct(image_N["label"]))
    return CheckReport(decoded, identities, faults, int(keep.sum()), source.skipped, lost)


def _read_names(source: FaceDataset) -> None:
    """Read the names of all identities and of some images.

    Raises:
        DataError: a table of names belongs to another dataset.
    """
    for _ in source.identity_names() or ():
        pass
    for number in evenly_spread(source.num_images, _NAMED_IMAGES):
        with suppress(UnreadableError):  # such as a part of a disk, with the image
            source.name(number)


def _check_image(source: FaceDataset, number: int) -> tuple[int, int, np.uint64] | DataFault:
    try:
        data = source.read(number)
        pixels = decode_rgb(data, location=source.location(number))
        if (least := flat_blocks_in_zeros(data)) and _flat_blocks(pixels) < least:
            return DataFault(
                "image", f"{source.location(number)}: a part of its bytes is zero; copy it again"
            )
    except DataError as error:
        return DataFault("image", str(error))
    # Among 42 million values of 64 bits, a collision has a probability of 5e-5.
    digest = np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), np.uint64)[0]
    return number, int(source.labels[number]), digest


def _flat_blocks(pixels: np.ndarray) -> int:
    """Return the number of blocks of 8 × 8 pixels of one color in an image."""
    height, width = pixels.shape[0] // 8 * 8, pixels.shape[1] // 8 * 8
    blocks = pixels[:height, :width].reshape(height // 8, 8, width // 8, 8, -1)
    return int((np.ptp(blocks, axis=(1, 3)) <= 1).all(-1).sum())


def _equal_groups(key: np.ndarray) -> list[np.ndarray]:
    """Return the ascending rows of each value that occurs more than once in (N,)."""
    order = np.argsort(key, kind="stable")
    edges = np.flatnonzero(np.diff(key[order])) + 1
    start, stop = np.append(0, edges), np.append(edges, len(order))
    # An array for each value would take gigabytes: nearly all occur once.
    repeated = stop - start > 1
    return [order[first:last] for first, last in zip(start[repeated], stop[repeated], strict=True)]


def _check_equal_images(
    source: FaceDataset, image_N: np.ndarray, rows: np.ndarray, keep: np.ndarray
) -> Iterator[DataFault]:
    """Yield the faults of equal images (rows), and clear `keep` for those that a clean copy leaves out."""
    _, place_of_label = np.unique(image_N["label"][rows], return_index=True)
    if len(place_of_label) > 1:
        keep[rows] = False
        one_of_each = rows[np.sort(place_of_label)[:_MAX_LISTED_LABELS]]
        first, *others = (
            f"{source.location(number)} of identity {source.identity_name(label)}"
            for number, label, _ in image_N[one_of_each].tolist()
        )
        more = f" and {len(rows) - len(one_of_each):,} more" if len(rows) > len(one_of_each) else ""
        yield DataFault("conflicting_labels", f"{first}: equal to {', '.join(others)}{more}")
        return
    keep[rows[1:]] = False
    first, *others = (source.location(number) for number in image_N["number"][rows].tolist())
    for other in others:
        yield DataFault("duplicate", f"{other}: equal to {first}")


def _left_out(
    source: FaceDataset, number_N: np.ndarray, keep_N: np.ndarray, faults: list[DataFault]
) -> Iterator[SkippedFile]:
    """Yield the images that a clean copy leaves out; `number_N` has those that can be decoded."""
    is_damaged = np.ones(source.num_images, bool)  # np.setdiff1d takes minutes for 10 million
    is_damaged[number_N] = False
    damaged = np.flatnonzero(is_damaged).tolist()
    messages = [fault.message for fault in faults if fault.kind == "image"]  # in the order of the images
    for number, message in zip(damaged, messages, strict=True):
        yield SkippedFile(source.left_out_name(number), "unreadable", message)
    for number in number_N[~keep_N].tolist():
        reason = f"{source.location(number)}: equal to another image"
        yield SkippedFile(source.left_out_name(number), "equal", reason)


def _identities(label_N: np.ndarray, announced: int) -> Iterator[DataFault]:
    """Yield the faults of the labels; `announced` is the number of identities that the dataset says it has."""
    present = distinct(label_N)
    if len(present) == 1:
        yield DataFault("one_identity", f"all {len(label_N):,} images are of one identity")
    if len(present) and len(present) < (count := max(int(present[-1]) + 1, announced)):
        gaps = np.flatnonzero(present != np.arange(len(present)))
        first = int(gaps[0]) if len(gaps) else len(present)
        yield DataFault(
            "empty_identities",
            f"{count - len(present):,} of {count:,} identities have no image; the first is {first}",
        )
