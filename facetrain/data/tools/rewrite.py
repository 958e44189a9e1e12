"""New datasets from existing ones: merge, split, shuffle, subset, convert. Images keep their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import image_landmarks
from facetrain.data.loading.sampler import permute
from facetrain.data.mixture import MixtureDataset, read_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.options import SubsetOptions
from facetrain.data.tools.writing import WrittenDataset, select, write_dataset, write_into
from facetrain.errors import DataError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress


def convert(
    folder: Path,
    output: Path,
    to: str,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write a dataset in another format, a key of `writing.FORMATS`. Labels are renumbered without gaps.

    Raises:
        UsageError: the output has the wrong suffix.
        DataError: the dataset cannot be read, or the output or a file beside it exists or cannot be written.
    """
    selection = select(open_dataset(folder))
    return write_dataset(selection, output, [folder], to=to, workers=workers, progress=progress)


def merge(
    folders: Sequence[Path],
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write several datasets as one. The labels of each dataset follow the labels before them.

    Landmarks are written if all datasets have them.

    Raises:
        DataError: a dataset cannot be read, or the output cannot be written.
    """
    sources = [open_dataset(folder) for folder in folders]
    mixture = MixtureDataset(sources, [1.0] * len(sources))
    written = write_dataset(select(mixture), output, folders, workers=workers, progress=progress)
    lacking = [
        str(folder)
        for folder, source in zip(folders, sources, strict=True)
        if image_landmarks(source) is None
    ]
    return replace(written, without_landmarks=lacking if len(lacking) < len(folders) else [])


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
    return write_dataset(select(source, order), output, [folder], workers=workers, progress=progress)


def subset(
    folder: Path,
    output: Path,
    options: SubsetOptions,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write some identities of a dataset, renumbered without gaps in their old order.

    Raises:
        DataError: no identity is left, the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    # Not bincount: a damaged label can be so large that the counts of all labels below it fill the memory.
    present, counts = np.unique(source.labels, return_counts=True)
    keep = counts >= options.min_images
    if options.listed is not None:
        keep &= np.isin(present, read_identities(options.listed, source.num_classes))
    selected = present[keep]
    if options.identities is not None and options.identities < len(selected):
        chosen = permute(np.arange(options.identities), len(selected), key_of(options.seed))
        selected = np.sort(selected[chosen])
    if not len(selected):
        raise DataError(
            f"{folder}: none of the {source.num_classes:,} identities matches the selection; check the list and the "
            "limits of images per identity"
        )
    numbers = np.flatnonzero(np.isin(source.labels, selected))
    if options.max_images is not None:
        numbers = _limit_images(source.labels[numbers], numbers, options.max_images, options.seed)
    return write_dataset(select(source, numbers), output, [folder], workers=workers, progress=progress)


def split(
    folder: Path,
    output: Path,
    *,
    validation: float,
    seed: int = 0,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> list[WrittenDataset]:
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
    with new_folder(output) as scratch:
        return [
            write_into(
                scratch / name, select(source, np.flatnonzero(is_in)), output / name, [folder],
                workers=workers, progress=progress,
            )
            for name, is_in in (("train", ~held_out), ("validation", held_out))
        ]  # fmt: skip


def _limit_images(label: np.ndarray, numbers: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """Select at most `limit` numbers of each label at random; return them in ascending order."""
    random_order = permute(np.arange(len(numbers)), len(numbers), key_of(seed, 1))
    by_label = np.lexsort((random_order, label))
    ordered = label[by_label]
    rank_in_label = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return np.sort(numbers[by_label[rank_in_label < limit]])
