"""Read every image of a dataset, tell what is wrong, and write a copy without it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.decode import decode_rgb, encoded_image_size
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.damaged_images import Fault, Suspects, open_suspects
from facetrain.data.tools.near_duplicates import WORDS, digest, equal_groups, near_pairs, perceptual_hash
from facetrain.data.tools.parallel import Progress, counted, in_order, new_folder, silent
from facetrain.errors import DataError

KINDS = {
    "index": "the index does not belong to the file",
    "record": "a record is damaged",
    "label": "a label is no whole number from 0 to 2^31",
    "image": "an image cannot be decoded",
    "dataset": "the parts of the dataset contradict each other",
    "contradiction": "one image stands under several identities",
    "duplicate": "an image stands twice under one identity",
    "near": "two images are nearly the same",
    "gap": "identities have no image",
}
DAMAGE = frozenset({"index", "record", "label", "image", "dataset"})
"""What stops a training, or spoils it."""
_MOST_LABEL = 2**31


@dataclass(frozen=True)
class Examination:
    """What was found. `good` are the numbers and labels that a clean copy would have."""

    images: int
    identities: int
    faults: list[Fault]
    good: np.ndarray
    """int64 (images to keep, 2): number among the suspects, label."""

    @property
    def damaged(self) -> bool:
        """Whether training on it would stop, or learn wrong labels."""
        return any(fault.kind in DAMAGE for fault in self.faults)


@dataclass(frozen=True)
class _Seen:
    label: int
    digest: np.uint64
    bits: np.ndarray | None


def check(
    folder: Path,
    *,
    near: bool = False,
    repair: Path | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> Examination:
    """Read and decode every image; with `repair`, write a clean copy there.

    The copy has neither what is damaged nor the second of two equal images of an identity, and none
    of an image that stands under several identities, as nobody knows whose it is. Identities are
    numbered without gaps. Images that are nearly the same stay.

    Args:
        folder: the dataset.
        near: look for images that are nearly the same, too.
        repair: where to write the clean copy.
        workers: threads; one per core if None.
        progress: told after every image.

    Raises:
        DataError: there is no dataset, nothing of it is good, or the copy cannot be written.
    """
    suspects = open_suspects(folder)
    looked = in_order(lambda number: _look(suspects, number, near), range(suspects.count), workers)
    faults = list(suspects.faults)
    numbers, labels, digests, bits = _collected(
        counted(looked, suspects.count, progress), suspects.count, faults
    )
    keep = np.ones(len(numbers), bool)
    for group in equal_groups(digests):
        faults += _judge(suspects, numbers, labels, group, keep)
    if near:
        faults += _near(suspects, numbers, labels, digests, bits)
    faults += _gaps(labels) + _contradictions(folder, labels)
    if repair is not None:
        _repair(suspects, numbers[keep], labels[keep], repair, workers, folder)
    good = np.stack([numbers[keep], labels[keep]], 1)
    return Examination(len(numbers), len(np.unique(labels)), faults, good)


def _look(suspects: Suspects, number: int, near: bool) -> _Seen | Fault | None:
    try:
        suspect = suspects.read(number)
    except DataError as error:
        return Fault("record", str(error))
    if suspect is None:
        return None
    where = suspects.location(number)
    label = suspect.label
    if not (0 <= label < _MOST_LABEL and label == int(label)):
        return Fault("label", f"{where}: the label is {label}")
    try:
        image = decode_rgb(suspect.data, location=where)
    except DataError as error:
        return Fault("image", str(error))
    return _Seen(int(label), digest(suspect.data), perceptual_hash(image) if near else None)


def _collected(
    looked: Iterable[_Seen | Fault | None], count: int, faults: list[Fault]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return number, label, digest and bits of the images that are whole; the others become faults."""
    number, label = np.empty(count, np.int64), np.empty(count, np.int64)
    digests, bits = np.empty(count, np.uint64), np.empty((0, WORDS), np.uint32)
    whole = 0
    for place, seen in enumerate(looked):
        if isinstance(seen, Fault):
            faults.append(seen)
        elif seen is not None:
            number[whole], label[whole], digests[whole] = place, seen.label, seen.digest
            if seen.bits is not None:
                if not len(bits):
                    bits = np.empty((count, WORDS), np.uint32)
                bits[whole] = seen.bits
            whole += 1
    return number[:whole], label[:whole], digests[:whole], bits[:whole]


def _judge(
    suspects: Suspects, numbers: np.ndarray, labels: np.ndarray, group: np.ndarray, keep: np.ndarray
) -> list[Fault]:
    """Tell what is wrong with images (rows) that are equal, and mark those that a clean copy leaves out."""
    first = suspects.location(int(numbers[group[0]]))
    whose = np.unique(labels[group])
    if len(whose) > 1:
        keep[group] = False
        said = ", ".join(str(label) for label in whose[:5])
        return [Fault("contradiction", f"{first}: stands {len(group)} times, under the identities {said}")]
    keep[group[1:]] = False
    return [
        Fault("duplicate", f"{suspects.location(int(numbers[row]))}: the same image as {first}")
        for row in group[1:]
    ]


def _near(
    suspects: Suspects, numbers: np.ndarray, labels: np.ndarray, digests: np.ndarray, bits: np.ndarray
) -> list[Fault]:
    pairs = near_pairs(bits)
    pairs = pairs[digests[pairs[:, 0]] != digests[pairs[:, 1]]]
    return [
        Fault(
            "near",
            f"{suspects.location(int(numbers[other]))} (identity {labels[other]}): nearly the same as "
            f"{suspects.location(int(numbers[one]))} (identity {labels[one]})",
        )
        for one, other in pairs.tolist()
    ]


def _gaps(labels: np.ndarray) -> list[Fault]:
    present = np.unique(labels)
    if not len(present) or len(present) == present[-1] + 1:
        return []
    first = int(np.flatnonzero(present != np.arange(len(present)))[0])
    missing = int(present[-1]) + 1 - len(present)
    return [
        Fault("gap", f"{missing:,} of {present[-1] + 1:,} identities have no image; the first is {first}")
    ]


def _contradictions(folder: Path, labels: np.ndarray) -> list[Fault]:
    """Open the dataset as a training does, and compare the labels that it would see."""
    try:
        source = open_dataset(folder)
    except DataError as error:
        return [Fault("dataset", str(error))]
    seen, own = np.bincount(source.labels), np.bincount(labels)
    if len(seen) == len(own) and source.num_images == len(labels) and (seen != own).any():
        wrong = int(np.flatnonzero(seen != own)[0])
        said = f"has {own[wrong]:,} images by their own labels, {seen[wrong]:,} by the identity records"
        return [Fault("dataset", f"{folder}: identity {wrong} {said}")]
    return []


def _repair(
    suspects: Suspects,
    numbers: np.ndarray,
    labels: np.ndarray,
    output: Path,
    workers: int | None,
    folder: Path,
) -> None:
    if not len(numbers):
        raise DataError(f"{folder}: not one image is good; there is nothing to write")
    _, label = np.unique(labels, return_inverse=True)

    def again(row: int) -> tuple[int, bytes]:
        suspect = suspects.read(int(numbers[row]))
        if suspect is None:
            raise DataError(f"{suspects.location(int(numbers[row]))}: changed while it was read")
        return int(label[row]), suspect.data

    with new_folder(output) as scratch:
        size = encoded_image_size(again(0)[1])
        pictures = in_order(again, range(len(label)), workers)
        write_identities(scratch, np.bincount(label).tolist(), pictures, min(size) if size else 112)
