"""The dataset interface `FaceDataset`, and a subset of the identities of a dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from facetrain.data.shared_array import SharedArray
from facetrain.data.skipped_files import SkippedFile
from facetrain.distinct import distinct
from facetrain.errors import DataError
from facetrain.text import printable


class FaceDataset(Protocol):
    """Encoded images with one identity each, addressed by an index from 0.

    Implementations can be read from any number of threads, and pickled: the reading processes receive a copy.

    A dataset may also have these, which the functions below read. `CatalogDataset` has all except `photo_landmarks`,
    which `ListDataset` adds:

        prefetch(first, count)   asks the operating system to read neighboring images in advance
        name(index)              path of an image inside the dataset; None if it is unknown
        identity_name(label)     name of an identity; its number if it has none
        has_identity_names       whether the identities have names, which may be numbers, too
        identity_names()         names of the identities 0, 1, …, as an iterator, if they have names
        forget(index)            has an image of an object store fetched again when it is read next
        files                    paths of the files that the images are in
        places(index)            first byte and size of images in their files, see `image_places`
        sizes(index)             least and largest size of images, see `image_sizes`
        landmarks                float32 (num_images, 5, 2), see `formats/landmark_file.py`; None without any
        landmark_reader()        what reads the landmarks of some images, see `landmark_reader`
        photo_landmarks          landmarks of images that are not aligned, see `photo_landmarks`; None without any
        skipped                  list of `SkippedFile`: files that are not images of the dataset
    """

    @property
    def num_images(self) -> int:
        """Number of images; their indices are 0 to num_images - 1."""

    @property
    def num_classes(self) -> int:
        """Number of identities; every label is below it."""

    @property
    def labels(self) -> np.ndarray:
        """Identity of every image: int32 or int64 (num_images,)."""

    def read(self, index: int) -> bytes:
        """Return the encoded image, in one of the formats of `images.header.FORMAT_SUFFIXES`.

        Raises:
            UnreadableError: if this image cannot be read.
            DataError: if it contradicts the rest of the dataset.
        """

    def location(self, index: int) -> str:
        """Return the place of an image (file, key, byte offset) for error messages."""


def prefetch_images(dataset: FaceDataset, first: int, count: int) -> None:
    """Announce a read of images `first` to `first + count - 1`; does nothing if the dataset cannot prefetch."""
    if (prefetch := getattr(dataset, "prefetch", None)) is not None:
        prefetch(first, count)


def read_afresh(dataset: FaceDataset, index: int) -> bytes | None:
    """Return an encoded image, fetched again from its object store; None if it is not in one.

    Raises:
        DataError: as `FaceDataset.read`.
    """
    return dataset.read(index) if _forget_image(dataset, index) else None


def _forget_image(dataset: FaceDataset, index: int) -> bool:
    forget = getattr(dataset, "forget", None)
    return forget is not None and bool(forget(index))


def image_name(dataset: FaceDataset, index: int) -> str:
    """Return the name of an image in list files: its path inside the dataset, or its index if it has no path."""
    return original_name(dataset, index) or str(index)


def damaged_image_name(dataset: FaceDataset, index: int) -> str:
    """Return the name of an image that cannot be read as `image_name` does, or its index if the name cannot, either."""
    with contextlib.suppress(DataError):
        return image_name(dataset, index)
    return str(index)


def original_name(dataset: FaceDataset, index: int) -> str | None:
    """Return the path of an image inside the dataset, or inside the one that was packed; None if it is unknown."""
    name_of = getattr(dataset, "name", None)
    name = None if name_of is None else name_of(index)
    return None if name is None else printable(name)


def identity_name(dataset: FaceDataset, label: int) -> str:
    """Return the name of an identity: its folder, or its number if it has no name."""
    return printable(getattr(dataset, "identity_name", str)(label))


def has_identity_names(dataset: FaceDataset) -> bool:
    """Return whether the identities have names, by which people are found again in another dataset."""
    # Not by comparison with the numbers: folders may be named 0, 1, 2, and 10 then comes before 2.
    return bool(getattr(dataset, "has_identity_names", False))


def identity_names(dataset: FaceDataset) -> Iterator[str] | None:
    """Return the names of the identities 0, 1, …; None if they have none."""
    names_of = getattr(dataset, "identity_names", None)
    return names_of() if names_of is not None and has_identity_names(dataset) else None


def evenly_spread(total: int, most: int) -> list[int]:
    """Return the numbers of `most` of `total` images at equal distances, ascending; of all images if they are fewer."""
    count = min(total, most)
    return [number * total // count for number in range(count)]


def image_landmarks(dataset: FaceDataset) -> np.ndarray | None:
    """Return the landmarks of every image, float32 (num_images, 5, 2); None if the dataset has none."""
    return getattr(dataset, "landmarks", None)


def landmark_reader(dataset: FaceDataset) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return a function that returns the landmarks (B, 5, 2) of B images; None if the dataset has none.

    It reads a landmark file where it is mapped: a copy of 42 million landmarks would take 1.7 GB in each rank.
    """
    reader_of = getattr(dataset, "landmark_reader", None)
    if reader_of is not None:
        return reader_of()
    landmarks_N52 = image_landmarks(dataset)
    return None if landmarks_N52 is None else landmarks_N52.__getitem__


def photo_landmarks(dataset: FaceDataset) -> np.ndarray | None:
    """Return the landmarks in pixels of images that are not aligned, float32 (num_images, 5, 2); None without any.

    Those of the other images are NaN. They are infinite where a list says that an image is not aligned, and no more.
    """
    return getattr(dataset, "photo_landmarks", None)


def image_places(dataset: FaceDataset, index: np.ndarray) -> np.ndarray | None:
    """Return first byte and number of bytes of B images in their files, int64 (B, 2); None if they are unknown."""
    places = getattr(dataset, "places", None)
    return None if places is None else places(index)


def image_sizes(dataset: FaceDataset, index: np.ndarray) -> np.ndarray | None:
    """Return the least and the largest number of bytes of B images, int64 (B, 2); None if no catalog has them."""
    sizes = getattr(dataset, "sizes", None)
    return None if sizes is None else sizes(index)


def image_files(dataset: FaceDataset) -> list[Path]:
    """Return the files that the images of a dataset are in, or the folder or list of images with a file each.

    None if they are unknown.
    """
    return list(getattr(dataset, "files", ()))


def skipped_files(dataset: FaceDataset) -> list[SkippedFile]:
    """Return the files that a dataset leaves out."""
    return getattr(dataset, "skipped", [])


def consecutive_ranges(index: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of every run of consecutive numbers in int32 or int64 (N,)."""
    edges = np.flatnonzero(np.diff(index) != 1) + 1
    for run in np.split(index, edges):
        if len(run):
            yield int(run[0]), len(run)


class DatasetView:
    """Images of other datasets; `_find` says where an image is. A pickled one has no labels."""

    num_images: int

    def __getstate__(self) -> dict[str, Any]:
        # Reading processes get it so, and read images alone: labels of 42 million images would take 500 MB in each.
        return {name: value for name, value in self.__dict__.items() if name not in ("labels", "identities")}

    def _find(self, index: int) -> tuple[FaceDataset, int]:
        """Return the dataset of an image, and the image's index in it."""
        raise NotImplementedError

    def landmark_reader(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """As `landmark_reader` of the module."""
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
        return _forget_image(*self._find(index))

    def name(self, index: int) -> str | None:
        """Return the image's name in its dataset."""
        return original_name(*self._find(index))

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

    def prefetch(self, first: int, count: int) -> None:
        """Announce the matching index ranges to the other dataset."""
        for start, length in consecutive_ranges(self._index[first : first + count]):
            prefetch_images(self._dataset, start, length)

    def identity_name(self, label: int) -> str:
        """Return the identity's name in the other dataset; its number in this one if there are no names."""
        return (
            identity_name(self._dataset, int(self.identities[label]))
            if self.has_identity_names
            else str(label)
        )

    def identity_names(self) -> Iterator[str]:
        """Yield the names that the identities have in the other dataset."""
        is_selected = np.zeros(self._dataset.num_classes, bool)
        is_selected[self.identities] = True
        return compress(identity_names(self._dataset) or (), is_selected)

    def places(self, index: np.ndarray) -> np.ndarray | None:
        """Return the places of images in the files of the other dataset, int64 (B, 2)."""
        return image_places(self._dataset, self._index[index])

    def sizes(self, index: np.ndarray) -> np.ndarray | None:
        """Return the ranges of the sizes of images, int64 (B, 2)."""
        return image_sizes(self._dataset, self._index[index])

    def landmark_reader(self) -> Callable[[np.ndarray], np.ndarray] | None:
        """Return what reads the landmarks of selected images; None if the other dataset has none."""
        read = landmark_reader(self._dataset)
        return None if read is None else lambda index: read(self._index[index])

    @property
    def photo_landmarks(self) -> np.ndarray | None:
        """As `photo_landmarks` of the module, of the selected images."""
        points_N52 = photo_landmarks(self._dataset)
        return None if points_N52 is None else points_N52[self._index]

    @property
    def files(self) -> list[Path]:
        """Files of the other dataset."""
        return image_files(self._dataset)

    @property
    def skipped(self) -> list[SkippedFile]:
        """Files that the other dataset leaves out."""
        return skipped_files(self._dataset)

    @property
    def _index(self) -> np.ndarray:
        """Index of each image in the other dataset, int32 or int64 (N,)."""
        return self._shared_index.array

    def _find(self, index: int) -> tuple[FaceDataset, int]:
        return self._dataset, int(self._index[index])

    @cached_property
    def has_identity_names(self) -> bool:
        """Whether the identities of the other dataset have names."""
        return has_identity_names(self._dataset)


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
