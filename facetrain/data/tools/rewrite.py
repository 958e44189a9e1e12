"""New datasets from existing ones: merge, split, shuffle, subset. Images keep their bytes, and datasets their cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, image_landmarks
from facetrain.data.dataset_card import ImageDigest, carry_cards
from facetrain.data.formats.landmark_file import LANDMARKS_FILE, write_landmarks
from facetrain.data.formats.record_names import write_names
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.images.header import encoded_image_size
from facetrain.data.loading.sampler import permute
from facetrain.data.mixture import MixtureDataset, read_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import DataError, ImageError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class WrittenDataset:
    """Folder and size of a dataset that was written."""

    folder: str
    identities: int
    images: int


@dataclass(frozen=True)
class MergedDataset(WrittenDataset):
    """Folder and size of a dataset that was merged."""

    without_landmarks: list[str]
    """Datasets whose lack of landmarks made the landmarks of the others be left out."""


def merge(
    folders: Sequence[Path],
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> MergedDataset:
    """Write several datasets as one. The labels of each dataset follow those of the one before it.

    Landmarks are written if all datasets have them.

    Raises:
        DataError: a dataset cannot be read, or the output cannot be written.
    """
    sources = [open_dataset(folder) for folder in folders]
    mixture = MixtureDataset(sources, [1.0] * len(sources))
    with new_folder(output) as scratch:
        digest = ImageDigest()
        written = write_images(
            mixture, np.arange(mixture.num_images), mixture.labels, scratch, workers, progress, digest
        )
        carry_cards(folders, output, scratch, written, digest)
    lacking = [
        str(folder)
        for folder, source in zip(folders, sources, strict=True)
        if image_landmarks(source) is None
    ]
    return MergedDataset(str(output), *written, lacking if len(lacking) < len(folders) else [])


def shuffle(
    folder: Path,
    output: Path,
    *,
    seed: int = 0,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write the images of a dataset in random order, for readers that read a file from start to end.

    Raises:
        DataError: the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    order = permute(np.arange(source.num_images), source.num_images, key_of(seed))
    with new_folder(output) as scratch:
        digest = ImageDigest()
        written = write_images(source, order, source.labels[order], scratch, workers, progress, digest)
        carry_cards([folder], output, scratch, written, digest)
    return WrittenDataset(str(output), *written)


def subset(
    folder: Path,
    output: Path,
    *,
    listed: Path | None = None,
    identities: int | None = None,
    min_images_per_identity: int = 1,
    max_images_per_identity: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write some identities of a dataset, renumbered without gaps in their old order.

    Args:
        folder: the dataset.
        output: the folder to write; it must not exist.
        listed: file with the identities to keep, one number per line; all if None.
        identities: number of identities to keep, selected by the seed; all if None.
        min_images_per_identity: identities with fewer images are left out.
        max_images_per_identity: number of images to keep of each identity, selected by the seed; all if None.
        seed: seed of both selections.
        workers: number of threads; one per usable core if None.
        progress: called after every image.

    Raises:
        DataError: no identity is left, the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    # Not bincount: a damaged label can be so large that the counts of all labels below it fill the memory.
    present, counts = np.unique(source.labels, return_counts=True)
    keep = counts >= min_images_per_identity
    if listed is not None:
        keep &= np.isin(present, read_identities(listed, source.num_classes))
    selected = present[keep]
    if identities is not None and identities < len(selected):
        selected = np.sort(selected[permute(np.arange(identities), len(selected), key_of(seed))])
    if not len(selected):
        raise DataError(
            f"{folder}: none of the {source.num_classes:,} identities matches the selection; check the list and the "
            "limits of images per identity"
        )
    numbers = np.flatnonzero(np.isin(source.labels, selected))
    if max_images_per_identity is not None:
        numbers = _limit_images(source.labels[numbers], numbers, max_images_per_identity, seed)
    with new_folder(output) as scratch:
        digest = ImageDigest()
        written = write_images(source, numbers, source.labels[numbers], scratch, workers, progress, digest)
        carry_cards([folder], output, scratch, written, digest)
    return WrittenDataset(str(output), *written)


def split(
    folder: Path,
    output: Path,
    *,
    validation: float,
    seed: int = 0,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[WrittenDataset, WrittenDataset]:
    """Write OUTPUT/train and OUTPUT/validation, which have no identity in common.

    Args:
        folder: the dataset.
        output: the folder to write; it must not exist.
        validation: fraction of the identities for validation, above 0 and below 1; at least one identity is selected.
        seed: seed of the selection.
        workers: number of threads; one per usable core if None.
        progress: called after every image.

    Raises:
        DataError: there are fewer than two identities, the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    present = np.unique(source.labels)
    if not 0 < validation < 1 or len(present) < 2:
        raise DataError(
            f"{folder}: {len(present):,} identities cannot be split with a validation fraction of {validation:g}; "
            "take at least two identities and a fraction between 0 and 1"
        )
    count = min(max(round(validation * len(present)), 1), len(present) - 1)
    held_out = np.isin(source.labels, present[permute(np.arange(count), len(present), key_of(seed))])
    written = []
    with new_folder(output) as scratch:
        for name, numbers in (
            ("train", np.flatnonzero(~held_out)),
            ("validation", np.flatnonzero(held_out)),
        ):
            place, digest = scratch / name, ImageDigest()
            size = write_images(source, numbers, source.labels[numbers], place, workers, progress, digest)
            carry_cards([folder], output / name, place, size, digest)
            written.append(WrittenDataset(str(output / name), *size))
    return written[0], written[1]


def write_images(
    source: FaceDataset,
    numbers: np.ndarray,
    label: np.ndarray,
    folder: Path,
    workers: int | None,
    progress: ProgressCallback,
    digest: ImageDigest | None = None,
) -> tuple[int, int]:
    """Write the images `numbers` (N,) in this order with labels (N,), renumbered without gaps.

    Names and landmarks are written with them.

    The images are added to the digest, if there is one.

    Returns the number of identities and of images.

    Raises:
        ImageError: an image is empty: a record without bytes is no image for the reader, and later ones would shift.
    """

    def labeled(row: int) -> tuple[int, bytes]:
        data = source.read(int(numbers[row]))
        if not data:
            raise ImageError(
                f"{source.location(int(numbers[row]))}: the image is empty; leave out such images with "
                "`facetrain data check DATASET --repair DIR`"
            )
        return int(label[row]), data

    _, label = np.unique(label, return_inverse=True)
    counts = np.bincount(label)
    size = encoded_image_size(source.read(int(numbers[0])))
    reported = report_progress(map_in_order(labeled, range(len(label)), workers), len(label), progress)
    write_identities(
        folder, counts.tolist(), digest.of(reported) if digest else reported, min(size) if size else 112
    )
    write_names(folder, source, numbers, label)
    if (landmarks_N52 := image_landmarks(source)) is not None:
        write_landmarks(folder / LANDMARKS_FILE, landmarks_N52[numbers])
    return len(counts), len(label)


def _limit_images(label: np.ndarray, numbers: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Select at most `limit` numbers of each label at random; return them in ascending order."""
    random_order = permute(np.arange(len(numbers)), len(numbers), key_of(seed, 1))
    by_label = np.lexsort((random_order, label))
    ordered = label[by_label]
    rank_in_label = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return np.sort(numbers[by_label[rank_in_label < limit]])
