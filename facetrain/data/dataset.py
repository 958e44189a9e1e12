"""The small interface behind which every kind of dataset stands, and the part of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import numpy as np

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".bmp"})


class FaceDataset(Protocol):
    """Numbered images, each of one identity.

    Reading is safe from any number of threads; a source can be pickled, to be read in other processes.
    """

    @property
    def num_images(self) -> int:
        """How many images there are; they are numbered from 0."""

    @property
    def num_classes(self) -> int:
        """How many identities there are; labels are below it."""

    @property
    def labels(self) -> np.ndarray:
        """The identity of every image: int32 or int64 (num_images,)."""

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""

    def where(self, number: int) -> str:
        """Say where an image lies, for messages."""


@runtime_checkable
class Prefetching(Protocol):
    """A source that can have neighboring images fetched from a slow disk in one go."""

    def prefetch(self, first: int, count: int) -> None:
        """Say that images `first`, `first + 1`, … will be read soon."""


def prefetch_from(source: FaceDataset, first: int, count: int) -> None:
    """Have images fetched where the source can do that."""
    if isinstance(source, Prefetching):
        source.prefetch(first, count)


def runs(number: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of the runs of numbers that follow one another, int64 (N,)."""
    edges = np.flatnonzero(np.diff(number) != 1) + 1
    for part in np.split(number, edges):
        if len(part):
            yield int(part[0]), len(part)


@runtime_checkable
class Named(Protocol):
    """A source whose images have names of their own."""

    def name(self, number: int) -> str:
        """Return an image's path inside the dataset."""


def name_of(source: FaceDataset, number: int) -> str:
    """Return the name by which other files speak of an image: its path in the dataset, or else its number."""
    return source.name(number) if isinstance(source, Named) else str(number)


class SubsetDataset:
    """Some identities of another source, numbered anew without gaps and in their old order."""

    def __init__(self, source: FaceDataset, identities: Iterable[int]) -> None:
        self._source = source
        self.identities = np.unique(np.fromiter(identities, dtype=np.int64))
        kept = np.isin(source.labels, self.identities)
        self._numbers = np.flatnonzero(kept)
        self.labels = np.searchsorted(self.identities, source.labels[kept])
        self.num_images = len(self._numbers)
        self.num_classes = len(self.identities)

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        return self._source.read(int(self._numbers[number]))

    def prefetch(self, first: int, count: int) -> None:
        """Have images fetched by the other source, in the runs in which it has them."""
        for start, length in runs(self._numbers[first : first + count]):
            prefetch_from(self._source, start, length)

    def name(self, number: int) -> str:
        """Return the name that it has in the other source."""
        return name_of(self._source, int(self._numbers[number]))

    def where(self, number: int) -> str:
        """Say where the other source has it."""
        return self._source.where(int(self._numbers[number]))
