"""The dataset interface `FaceDataset`, and a subset of the identities of a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.shared_array import SharedArray
from facetrain.data.skipped_files import SkippedFile
from facetrain.distinct import distinct
from facetrain.errors import DataError


class FaceDataset:
    """Encoded images with one identity each, addressed by an index from 0.

    Datasets can be read from any number of threads, and pickled: the reading processes receive a copy. What a dataset
    may lack, such as names and landmarks, is here as that of a dataset without it.

    Attributes:
        num_images: number of images; their indices are 0 to num_images - 1.
        num_classes: number of identities; every label is below it.
        labels: identity of every image, int32 or int64 (num_images,).
        path: file or folder of the dataset; None if it consists of several datasets.
        files: files that the images are in, or the folder or list of images with a file each; none if unknown.
    """

    num_images: int
    num_classes: int
    labels: np.ndarray
    path: Path | None = None
    files: Sequence[Path] = ()

    def read(self, index: int) -> bytes:
        """Return the encoded image, in one of the formats of `images.header.FORMAT_SUFFIXES`.

        Raises:
            UnreadableError: if this image cannot be read.
            DataError: if it contradicts the rest of the dataset.
        """
        raise NotImplementedError

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read images `first` to `first + count - 1` in advance."""

    def forget(self, index: int) -> bool:
        """Have an image fetched again when it is read next; return whether it is in an object store."""
        return False

    def location(self, index: int) -> str:
        """Return the place of an image (file, key, byte offset) for error messages."""
        raise NotImplementedError

    def name(self, index: int) -> str | None:
        """Return the path of an image inside the dataset, or inside the one that was packed; None if it is unknown.

        Raises:
            DataError: the name is damaged.
        """
        return None

    def image_name(self, index: int) -> str:
        """Return the name of an image in list files: its path inside the dataset, or its index if it has no path."""
        return self.name(index) or str(index)

    def left_out_name(self, index: int) -> str:
        """Return the name of an image in a table of left-out files: `image_name`, or its index if that is damaged."""
        with contextlib.suppress(DataError):
            return self.image_name(index)
        return str(index)

    @cached_property
    def has_identity_names(self) -> bool:
        """Whether the identities have names, by which people are found again in another dataset."""
        # Not by comparison with the numbers: folders may be named 0, 1, 2, and 10 then comes before 2.
        return self.identity_names() is not None

    def identity_name(self, label: int) -> str:
        """Return the name of an identity: its folder, or its number if it has no name."""
        return str(label)

    def identity_names(self) -> Iterator[str] | None:
        """Return the names of the identities 0, 1, …, without a list of all; None if they have none."""
        return None

    def identity_number(self, label: int) -> int:
        """Return the number of an identity in the file or folder, of which this may be a part."""
        return label

    @property
    def landmarks(self) -> np.ndarray | None:
        """Landmarks of every image, float32 (num_images, 5, 2), see `formats/landmark_file.py`; None without any."""
        return None

    def landmark_reader(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return a function that returns the landmarks (B, 5, 2) of B images; None if the dataset has none.

        It reads a landmark file where it is mapped: a copy of 42 million landmarks would take 1.7 GB in each rank.
        """
        landmarks_N52 = self.landmarks
        return None if landmarks_N52 is None else landmarks_N52.__getitem__

    @property
    def photo_landmarks(self) -> np.ndarray | None:
        """Landmarks in pixels of images that are not aligned, float32 (num_images, 5, 2); None without any.

        Those of the other images are NaN, and infinite where a list says only that an image is not aligned.
        """
        return None

    def places(self, index: np.ndarray) -> np.ndarray | None:
        """Return first byte and number of bytes of B images in their files, int64 (B, 2); None if they are unknown."""
        return None

    def sizes(self, index: np.ndarray) -> np.ndarray | None:
        """Return the least and the largest number of bytes of B images, int64 (B, 2); None if no catalog has them."""
        return None

    @property
    def skipped(self) -> list[SkippedFile]:
        """Files and members that are not images of the dataset, and the reasons."""
        return []

    def digest_file_names(self) -> str | None:
        """Return a digest of the names of an image folder's files in the order of the images; None for other formats.

        The other formats have their images in files, or their order in a list: a user does not change it by chance.
        """
        return None


def evenly_spread(total: int, most: int) -> list[int]:
    """Return the numbers of `most` of `total` images at equal distances, ascending; of all images if they are fewer."""
    count = min(total, most)
    return [number * total // count for number in range(count)]


def consecutive_ranges(index: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of every run of consecutive numbers in int32 or int64 (N,)."""
    edges = np.flatnonzero(np.diff(index) != 1) + 1
    for run in np.split(index, edges):
        if len(run):
            yield int(run[0]), len(run)


class DatasetView(FaceDataset):
    """Images of other datasets; `_find` says where an image is. A pickled one has no labels."""

    def __getstate__(self) -> dict[str, Any]:
        # Reading processes get it so, and read images alone: labels of 42 million images would take 500 MB in each.
        return {name: value for name, value in self.__dict__.items() if name not in ("labels", "identities")}

    def _find(self, index: int) -> tuple[FaceDataset, int]:
        """Return the dataset of an image, and the image's index in it."""
        raise NotImplementedError

    @property
    def landmarks(self) -> np.ndarray | None:
        """Landmarks of all images; None if a dataset has none."""
        read = self.landmark_reader()
        return None if read is None else read(np.arange(self.num_images))

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        dataset, inner = self._find(index)
        return dataset.read(inner)

    def forget(self, index: int) -> bool:
        """Have the image fetched again; return whether it is in an object store."""
        dataset, inner = self._find(index)
        return dataset.forget(inner)

    def name(self, index: int) -> str | None:
        """Return the image's name in its dataset."""
        dataset, inner = self._find(index)
        return dataset.name(inner)

    def left_out_name(self, index: int) -> str:
        """Return the image's name in its dataset, for a table of left-out files."""
        dataset, inner = self._find(index)
        return dataset.left_out_name(inner)

    def location(self, index: int) -> str:
        """Return the image's place in its dataset."""
        dataset, inner = self._find(index)
        return dataset.location(inner)


class ImageSubset(DatasetView):
    """Selected images of another dataset; their identities are relabeled without gaps in their original order."""

    def __init__(self, dataset: FaceDataset, index: np.ndarray, identities: np.ndarray | None = None) -> None:
        """Select images by their indices, int64 (N,); `identities` None: the identities of the images."""
        self._dataset = dataset
        # Shared: a copy of 97 million indices in each of 16 reading processes a GPU would take 99 GB on a host.
        self._shared_index = SharedArray.of(index, "int32" if dataset.num_images <= 1 << 31 else "int64")
        labels = dataset.labels[index]
        self.identities = distinct(labels) if identities is None else identities
        self.labels = _places(labels, self.identities)
        self.num_images = len(index)
        self.num_classes = len(self.identities)
        self.path, self.files = dataset.path, dataset.files

    def prefetch(self, first: int, count: int) -> None:
        """Announce the matching index ranges to the other dataset."""
        for start, length in consecutive_ranges(self._index[first : first + count]):
            self._dataset.prefetch(start, length)

    def identity_name(self, label: int) -> str:
        """Return the identity's name in the other dataset; its number in this one if there are no names."""
        return (
            self._dataset.identity_name(int(self.identities[label]))
            if self.has_identity_names
            else str(label)
        )

    def identity_names(self) -> Iterator[str] | None:
        """Return the names that the identities have in the other dataset."""
        if (names := self._dataset.identity_names()) is None:
            return None
        is_selected = np.zeros(self._dataset.num_classes, bool)
        is_selected[self.identities] = True
        return compress(names, is_selected)

    def identity_number(self, label: int) -> int:
        """Return the number of an identity in the file or folder of the other dataset."""
        return self._dataset.identity_number(int(self.identities[label]))

    def places(self, index: np.ndarray) -> np.ndarray | None:
        """Return the places of images in the files of the other dataset, int64 (B, 2)."""
        return self._dataset.places(self._index[index])

    def sizes(self, index: np.ndarray) -> np.ndarray | None:
        """Return the ranges of the sizes of images, int64 (B, 2)."""
        return self._dataset.sizes(self._index[index])

    def landmark_reader(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return what reads the landmarks of selected images; None if the other dataset has none."""
        read = self._dataset.landmark_reader()
        return None if read is None else lambda index: read(self._index[index])

    @property
    def photo_landmarks(self) -> np.ndarray | None:
        """Those of the selected images."""
        points_N52 = self._dataset.photo_landmarks
        return None if points_N52 is None else points_N52[self._index]

    @property
    def skipped(self) -> list[SkippedFile]:
        """Files that the other dataset leaves out."""
        return self._dataset.skipped

    @property
    def _index(self) -> np.ndarray:
        """Index of each image in the other dataset, int32 or int64 (N,)."""
        return self._shared_index.array

    def _find(self, index: int) -> tuple[FaceDataset, int]:
        return self._dataset, int(self._index[index])


def _places(label_N: np.ndarray, identities: np.ndarray) -> np.ndarray:
    """Return the place of each label among ascending identities, which contain all of them: int32 (N,)."""
    size = int(identities[-1]) + 1 if len(identities) else 0
    if size > 2 * len(label_N):
        # A damaged label can be so large that a table of all labels below it fills the memory.
        return np.searchsorted(identities, label_N).astype(np.int32)
    # Not by a search: it takes 7 s for 10 million images that are not sorted by label, and a table 0.1 s.
    place_of = np.empty(size, np.int32)
    place_of[identities] = np.arange(len(identities), dtype=np.int32)
    return place_of[label_N]


class SubsetDataset(ImageSubset):
    """Selected identities of another dataset, relabeled without gaps in their original order."""

    def __init__(self, dataset: FaceDataset, identities: np.ndarray | Sequence[int]) -> None:
        selected = distinct(np.asarray(identities, np.int64))
        super().__init__(dataset, np.flatnonzero(np.isin(dataset.labels, selected)), selected)
