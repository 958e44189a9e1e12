"""Selections of images for a new dataset: all, merged, two parts, with new labels.

What refuses a dataset, such as a damaged card, does so when its images are selected, before hours of work on them.
"""

# N images

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import DatasetCard, read_cards
from facetrain.data.loading.sampler import permute
from facetrain.data.mixture import MixtureDataset
from facetrain.data.mixture_file import first_repeated
from facetrain.data.open_dataset import open_aligned
from facetrain.data.skipped_files import SkippedFile
from facetrain.distinct import distinct
from facetrain.errors import DataError, ImageError
from facetrain.text import count_text


@dataclass(frozen=True)
class Selection:
    """Images of a dataset in the order in which they are written, and their labels."""

    source: FaceDataset
    cards: Sequence[DatasetCard]
    """Cards of the datasets that the images come from."""
    numbers: np.ndarray
    """Numbers of the images in the dataset, int64 (N,)."""
    label: np.ndarray
    """Identities in the dataset, int64 (N,); the writer renumbers them without gaps."""
    landmarks: np.ndarray | None
    """Landmarks of all images of the dataset, complete when the last image was read; None: they have none."""
    read: Callable[[int], bytes] | None = None
    """Returns an image as it is written, by its number in the dataset; None: `source.read`."""
    skipped: Sequence[SkippedFile] | None = None
    """Files and images that are left out, for a table beside the images; None: those of the dataset."""
    without_landmarks: Sequence[str] = ()
    """Inputs without landmarks, if others have some: the output then has none."""
    keeps_labels: bool = True
    """Whether the images of a dataset that is copied whole keep their labels; of several, those of the first."""

    @cached_property
    def new_label(self) -> np.ndarray:
        """Labels without gaps, int64 (N,)."""
        return np.unique(self.label, return_inverse=True)[1]

    @cached_property
    def identities(self) -> list[int]:
        """Identity in the dataset of each new label."""
        return distinct(self.label).tolist()

    def read_image(self, row: int) -> bytes:
        """Return the image in a row as it is written.

        Raises:
            ImageError: it is empty: a record without bytes is no image for the reader, and later ones would shift.
        """
        number = int(self.numbers[row])
        data = (self.read or self.source.read)(number)
        if not data:
            raise ImageError(
                f"{self.source.location(number)}: the image is empty; leave out such images with "
                "`facetrain data check DATASET --repair DIR`"
            )
        return data

    def part(self, rows: np.ndarray) -> Selection:
        """Return the images in some rows, int64 (N,)."""
        return replace(self, numbers=self.numbers[rows], label=self.label[rows])


def select_all(folder: Path) -> Selection:
    """Select all images of a dataset.

    Raises:
        DataError: the dataset, its card or its landmarks cannot be read; so do the functions below.
    """
    source = open_aligned(folder)
    return _select_all(source, [folder], _has_no_gap(source))


def select_merged(folders: Sequence[Path]) -> Selection:
    """Select all images of several datasets. The labels of each dataset follow the labels before them."""
    sources = [open_aligned(folder) for folder in folders]
    if (repeated := first_repeated(sources)) is not None:
        raise DataError(
            f"{folders[repeated]}: is given twice with the same identities, which would have two classes each; give it "
            "once"
        )
    mixture = MixtureDataset(sources, [1.0] * len(sources))
    lacking = [
        str(folder)
        for folder, source in zip(folders, sources, strict=True)
        if source.landmark_reader() is None
    ]
    return replace(
        _select_all(mixture, folders, _has_no_gap(sources[0])),
        without_landmarks=lacking if len(lacking) < len(folders) else (),
    )


def select_parts(folder: Path, *, validation: float, seed: int) -> dict[str, Selection]:
    """Select a training set and a validation set, which have no identity in common, by their names.

    Args:
        folder: the dataset.
        validation: fraction of the identities for validation, above 0 and below 1; at least one identity is selected.
        seed: seed of the selection.

    Raises:
        DataError: there are fewer than two identities, or the dataset cannot be read.
    """
    selection = select_all(folder)
    present = distinct(selection.label)
    if not 0 < validation < 1 or len(present) < 2:
        raise DataError(
            f"{folder}: {count_text(len(present), 'identity', 'identities')} cannot be split with a validation "
            f"fraction of {validation:g}; take at least two identities and a fraction between 0 and 1"
        )
    count = min(max(round(validation * len(present)), 1), len(present) - 1)
    held_out = np.isin(selection.label, present[permute(np.arange(count), len(present), key_of(seed))])
    return {
        "train": selection.part(np.flatnonzero(~held_out)),
        "validation": selection.part(np.flatnonzero(held_out)),
    }


def select_relabeled(folder: Path, selection: Selection, label_N: np.ndarray) -> Selection:
    """Return all images of a dataset with other identities of it as labels, int64 (N,); −1 leaves an image out.

    Raises:
        DataError: no image is left.
    """
    numbers = np.flatnonzero(label_N >= 0)
    if not len(numbers):
        raise DataError(f"{folder}: no image is left; check the report, and that the model fits this dataset")
    return replace(selection, numbers=numbers, label=label_N[numbers])


def _select_all(source: FaceDataset, folders: Sequence[Path], keeps_labels: bool) -> Selection:
    cards = [card for folder in folders for card in read_cards(folder)]
    numbers = np.arange(source.num_images)
    return Selection(source, cards, numbers, source.labels, source.landmarks, keeps_labels=keeps_labels)


def _has_no_gap(source: FaceDataset) -> bool:
    """Return whether every identity has an image: without them, the labels are renumbered."""
    return len(distinct(source.labels)) == source.num_classes
