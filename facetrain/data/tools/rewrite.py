"""Datasets made of others: merged, split, shuffled, cut down. Images keep their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import encoded_image_size
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.mixture import MixtureDataset
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.parallel import Progress, counted, in_order, new_folder, silent
from facetrain.errors import DataError


@dataclass(frozen=True)
class Written:
    """A dataset that was written."""

    folder: str
    identities: int
    images: int


def merge(
    folders: Sequence[Path], output: Path, *, workers: int | None = None, progress: Progress = silent
) -> Written:
    """Write several datasets as one; the identities of the second are numbered behind the first's.

    Raises:
        DataError: one cannot be read, or the output not be written.
    """
    sources = [open_dataset(folder) for folder in folders]
    everything = MixtureDataset(sources, [1.0] * len(sources))
    with new_folder(output) as scratch:
        written = write_some(
            everything, np.arange(everything.num_images), everything.labels, scratch, workers, progress
        )
    return Written(str(output), *written)


def shuffle(
    folder: Path, output: Path, *, seed: int = 0, workers: int | None = None, progress: Progress = silent
) -> Written:
    """Write a dataset with all its images mixed, for readers that read one after the other.

    Raises:
        DataError: it cannot be read, or the output not be written.
    """
    source = open_dataset(folder)
    mixed = permute(np.arange(source.num_images), source.num_images, key_of(seed))
    with new_folder(output) as scratch:
        written = write_some(source, mixed, source.labels[mixed], scratch, workers, progress)
    return Written(str(output), *written)


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
    progress: Progress = silent,
) -> Written:
    """Write some identities of a dataset, and no more than some images of each, numbered anew without gaps.

    Args:
        folder: the dataset.
        output: where to.
        listed: a file of identities to keep, one number a line; all if None.
        identities: keep as many of them, chosen by the seed.
        min_images_per_identity: leave out identities with fewer.
        max_images_per_identity: keep as many images of each, chosen by the seed.
        seed: another one chooses otherwise.
        workers: threads; one per core if None.
        progress: told after every image.

    Raises:
        DataError: nothing is left, it cannot be read, or the output not be written.
    """
    source = open_dataset(folder)
    counts = np.bincount(source.labels, minlength=source.num_classes)
    keep = (counts > 0) & (counts >= min_images_per_identity)
    if listed is not None:
        keep &= np.isin(np.arange(source.num_classes), _numbers(listed, source.num_classes))
    chosen = np.flatnonzero(keep)
    if identities is not None and identities < len(chosen):
        chosen = np.sort(chosen[permute(np.arange(identities), len(chosen), key_of(seed))])
    if not len(chosen):
        raise DataError(
            f"{folder}: none of the {source.num_classes:,} identities is left by what was asked for"
        )
    numbers = np.flatnonzero(np.isin(source.labels, chosen))
    if max_images_per_identity is not None:
        numbers = _at_most(source.labels[numbers], numbers, max_images_per_identity, seed)
    with new_folder(output) as scratch:
        written = write_some(source, numbers, source.labels[numbers], scratch, workers, progress)
    return Written(str(output), *written)


def split(
    folder: Path,
    output: Path,
    *,
    validation: float,
    seed: int = 0,
    workers: int | None = None,
    progress: Progress = silent,
) -> tuple[Written, Written]:
    """Write OUTPUT/train and OUTPUT/validation, which have no identity in common.

    Args:
        folder: the dataset.
        output: where to.
        validation: the part of the identities, above 0 and below 1, that goes to validation; at least one does.
        seed: another one chooses otherwise.
        workers: threads; one per core if None.
        progress: told after every image.

    Raises:
        DataError: there are fewer than two identities, it cannot be read, or the output not be written.
    """
    source = open_dataset(folder)
    present = np.unique(source.labels)
    if not 0 < validation < 1 or len(present) < 2:
        raise DataError(
            f"{folder}: {len(present):,} identities cannot be split with a part of {validation:g} for validation"
        )
    count = min(max(round(validation * len(present)), 1), len(present) - 1)
    held_out = np.isin(source.labels, present[permute(np.arange(count), len(present), key_of(seed))])
    written = []
    with new_folder(output) as scratch:
        for name, numbers in (
            ("train", np.flatnonzero(~held_out)),
            ("validation", np.flatnonzero(held_out)),
        ):
            found = write_some(source, numbers, source.labels[numbers], scratch / name, workers, progress)
            written.append(Written(str(output / name), *found))
    return written[0], written[1]


def write_some(
    source: FaceDataset,
    numbers: np.ndarray,
    label: np.ndarray,
    folder: Path,
    workers: int | None,
    progress: Progress,
) -> tuple[int, int]:
    """Write images (N,) of a source in this order under labels (N,), numbered anew; return how many of both."""
    _, label = np.unique(label, return_inverse=True)
    counts = np.bincount(label)
    size = encoded_image_size(source.read(int(numbers[0])))
    pictures = in_order(
        lambda row: (int(label[row]), source.read(int(numbers[row]))), range(len(label)), workers
    )
    write_identities(
        folder, counts.tolist(), counted(pictures, len(label), progress), min(size) if size else 112
    )
    return len(counts), len(label)


def _at_most(label: np.ndarray, numbers: np.ndarray, most: int, seed: int) -> np.ndarray:
    """Keep up to `most` of the numbers of each label, in their order."""
    drawn = permute(np.arange(len(numbers)), len(numbers), key_of(seed, 1))
    by_label = np.lexsort((drawn, label))
    ordered = label[by_label]
    place = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return np.sort(numbers[by_label[place < most]])


def _numbers(path: Path, below: int) -> np.ndarray:
    try:
        numbers = np.array(path.read_text(encoding="utf-8").split(), dtype=np.int64)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path}: not a list of identities, one whole number a line ({error})") from error
    outside = numbers[(numbers < 0) | (numbers >= below)]
    if len(outside):
        raise DataError(f"{path}: there is no identity {outside[0]}; they go from 0 to {below - 1:,}")
    return numbers
