"""Mixtures: several datasets as one, with separate identities and a weight each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from facetrain.data.beside_dataset import TRAINING_SET
from facetrain.data.dataset import DatasetView, FaceDataset
from facetrain.data.formats.labels import MAX_LABEL
from facetrain.data.formats.shard_names import split_of
from facetrain.data.remote_dataset import with_addresses
from facetrain.data.skipped_files import SkippedFile
from facetrain.text import printable


@dataclass(frozen=True)
class DatasetHead:
    """Head of one dataset of a mixture with `heads: separate`."""

    margin: dict[str, Any]
    """Keys of the config's section `head.margin` that have other values for this dataset."""
    loss_weight: float
    """Factor on the loss of the dataset's images."""


class MixtureDataset(DatasetView):
    """Concatenation of datasets: the images and identities of each dataset follow those before."""

    def __init__(
        self,
        datasets: Sequence[FaceDataset],
        weights: Sequence[float],
        heads: Sequence[DatasetHead] | None = None,
        entries: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Take the datasets, their images per epoch in units of all images, and their heads (None: one for all).

        `entries` describes how each dataset was chosen, as JSON; a checkpoint records it.
        """
        self.datasets, self.weights, self.entries = list(datasets), list(weights), list(entries)
        self.heads = None if heads is None else tuple(heads)
        self.counts = [dataset.num_images for dataset in datasets]
        self._ends = np.cumsum(self.counts)
        self._first_label = first_label = np.cumsum([0, *(dataset.num_classes for dataset in datasets)])
        # int32 if it holds them, in memory: 42 million labels of int64 would take 340 MB in every process.
        dtype = np.int32 if first_label[-1] <= MAX_LABEL else np.int64
        parts = zip(datasets, first_label[:-1].astype(dtype), strict=True)
        self.labels = np.concatenate([dataset.labels.astype(dtype) + first for dataset, first in parts])
        self.num_images = len(self.labels)
        self.num_classes = int(first_label[-1])
        self.files = [path for dataset in datasets for path in dataset.files]

    def prefetch(self, first: int, count: int) -> None:
        """Announce the range to the datasets that it covers."""
        end = first + count
        while first < end:
            dataset, inner = self._find(first)
            length = min(end - first, dataset.num_images - inner)
            dataset.prefetch(inner, length)
            first += length

    def identity_name(self, label: int) -> str:
        """Return the identity's name in its dataset; without names, the dataset and the number in it: `faces_2`."""
        number = int(np.searchsorted(self._first_label, label, side="right")) - 1
        dataset, inner = self.datasets[number], int(label - self._first_label[number])
        return dataset.identity_name(inner) if dataset.has_identity_names else self._numbered(number, inner)

    def identity_names(self) -> Iterator[str]:
        """Return the names of the identities of all datasets."""
        for number, dataset in enumerate(self.datasets):
            names = dataset.identity_names()
            yield from names or (self._numbered(number, label) for label in range(dataset.num_classes))

    def _numbered(self, number: int, label: int) -> str:
        # Not by the label in the mixture: it is that of another person when a dataset before this one has grown.
        return f"{self._short_names[number]}_{self.datasets[number].identity_number(label)}"

    def places(self, index: np.ndarray) -> np.ndarray | None:
        """Return the places of images in the files of their datasets, int64 (B, 2); None if a dataset has none."""
        place_B2 = np.empty((len(index), 2), np.int64)
        for dataset, (is_inside_B, inner) in zip(self.datasets, self._split(index), strict=True):
            inner_B2 = dataset.places(inner)
            if inner_B2 is None:
                return None
            place_B2[is_inside_B] = inner_B2
        return place_B2

    def landmark_reader(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return what reads the landmarks of images; None if a dataset has none."""
        readers = [reader for dataset in self.datasets if (reader := dataset.landmark_reader()) is not None]
        if len(readers) < len(self.datasets):
            return None

        def read(index: np.ndarray) -> np.ndarray:
            landmark_B52 = np.empty((len(index), 5, 2), np.float32)
            for reader, (is_inside_B, inner) in zip(readers, self._split(index), strict=True):
                landmark_B52[is_inside_B] = reader(inner)
            return landmark_B52

        return read

    @property
    def photo_landmarks(self) -> np.ndarray | None:
        """Those of all images."""
        parts = [dataset.photo_landmarks for dataset in self.datasets]
        if all(part is None for part in parts):
            return None
        missing = (np.full((count, 5, 2), np.nan, np.float32) for count in self.counts)
        return np.concatenate(
            [none if part is None else part for part, none in zip(parts, missing, strict=True)]
        )

    @property
    def skipped(self) -> list[SkippedFile]:
        """Files that the datasets leave out, with the dataset: two of them may have files of the same name."""
        # A dataset may be there several times, with other identities or heads.
        different = {dataset.path or number: number for number, dataset in enumerate(self.datasets)}
        return [
            file._replace(name=f"{self._folders[number]}{file.name}")
            for number in different.values()
            for file in self.datasets[number].skipped
        ]

    def left_out_name(self, index: int) -> str:
        """Return the image's name as in `skipped`."""
        return f"{self._folders[self._number_of(index)]}{super().left_out_name(index)}"

    @cached_property
    def _folders(self) -> list[str]:
        """Path or address of each dataset with a slash behind it; empty for a mixture."""
        paths = [dataset.path for dataset in self.datasets]
        return [f"{printable(with_addresses(str(path)))}/" if path else "" for path in paths]

    @cached_property
    def _short_names(self) -> list[str]:
        """Last part of the path or address of each dataset, with the part before if that is a split: casia_train."""
        paths = (os.path.abspath(path).removesuffix(f"/{TRAINING_SET}") for path in self._folders)
        return [_short_name(*os.path.split(path)) for path in paths]

    def _split(self, index: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield for each dataset which of B images are in it, bool (B,), and their indices there."""
        number_B = np.searchsorted(self._ends, index, side="right")
        for number, end in enumerate(self._ends):
            is_inside_B = number_B == number
            yield is_inside_B, index[is_inside_B] - end + self.counts[number]

    def _number_of(self, index: int) -> int:
        """Return the number of the dataset of an image."""
        return int(np.searchsorted(self._ends, index, side="right"))

    def _find(self, index: int) -> tuple[FaceDataset, int]:
        number = self._number_of(index)
        return self.datasets[number], int(index - self._ends[number] + self.counts[number])


def _short_name(folder: str, name: str) -> str:
    split = split_of(name)
    return f"{os.path.basename(folder)}_{name}" if split and name.lower().startswith(split) else name


def images_per_epoch(counts: Sequence[int], weights: Sequence[float]) -> np.ndarray:
    """Return the number of images that an epoch shows of each dataset: int64 (datasets,)."""
    return np.rint(np.array(counts) * np.array(weights)).astype(np.int64)


def parts_of(source: FaceDataset, name: str) -> list[tuple[str, FaceDataset]]:
    """Return the datasets of a mixture with their names, or the dataset itself: an error may be in one of them."""
    if isinstance(source, MixtureDataset):
        return [(f"{name}, dataset {number}", part) for number, part in enumerate(source.datasets, start=1)]
    return [(name, source)]
