"""Statistics of a dataset: identities, images per identity, image sizes and formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, identity_name, skipped_files
from facetrain.data.formats.bin import read_bin
from facetrain.data.images.header import encoded_image_size, read_header
from facetrain.data.loading.sampler import permute
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.writing import DatasetSize
from facetrain.errors import DataError

_HISTOGRAM_BOUNDS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True, kw_only=True)
class DatasetStatistics(DatasetSize):
    """Counts of a dataset, with the sizes and formats of a sample of its images."""

    identities_without_images: int
    fewest: int
    """Images of the identity with the fewest images, at least 1."""
    median: float
    """Median number of images per identity, of identities with images."""
    most: int
    """Images of the identity with the most images."""
    histogram: dict[str, int]
    """Number of identities for each range of images per identity, such as "5–9"."""
    sample: int
    """Number of images whose headers were read."""
    sizes: dict[str, int]
    """The five most frequent sizes in the sample, such as "112×112", with their counts."""
    formats: dict[str, int]
    """The image formats in the sample with their counts."""


@dataclass(frozen=True)
class PairStatistics:
    """Counts of a verification set, with the sizes and formats of all images."""

    file: str
    images: int
    pairs: int
    same: int
    """Pairs of one person."""
    sizes: dict[str, int]
    """The five most frequent sizes, such as "112×112", with their counts."""
    formats: dict[str, int]
    """The image formats with their counts."""


def inspect_pair_set(path: Path) -> PairStatistics:
    """Count the pairs of a .bin and the sizes and formats of its images.

    Raises:
        PairsError: the file is not a verification set.
    """
    images, same = read_bin(path)
    return PairStatistics(
        file=str(path),
        images=len(images),
        pairs=len(same),
        same=int(same.sum()),
        sizes=_most_frequent(map(_size, images)),
        formats=_most_frequent(map(_format, images)),
    )


def inspect(folder: Path, *, sample: int = 1000, seed: int = 0) -> DatasetStatistics:
    """Count the images and identities of a dataset, and read the headers of a random sample of its images.

    Raises:
        DataError: the dataset cannot be read.
    """
    source = open_dataset(folder)
    # Not bincount: a damaged label can be so large that the counts of all labels below it fill the memory.
    _, present = np.unique(source.labels, return_counts=True)
    numbers = permute(np.arange(min(sample, source.num_images)), source.num_images, key_of(seed))
    images = [source.read(int(number)) for number in numbers]
    return DatasetStatistics(
        folder=str(folder),
        images=source.num_images,
        identities=source.num_classes,
        identities_without_images=source.num_classes - len(present),
        fewest=int(present.min()),
        median=float(np.median(present)),
        most=int(present.max()),
        histogram=_histogram(present),
        sample=len(images),
        sizes=_most_frequent(_size(image) for image in images),
        formats=_most_frequent(_format(image) for image in images),
        skipped=skipped_files(source),
    )


def image_locations(folder: Path, identity: int) -> list[str]:
    """Return the location of each image of an identity: its path, or its file, key and byte.

    Raises:
        DataError: there is no such identity, or it has no image.
    """
    source = open_dataset(folder)
    return [source.location(number) for number in image_numbers(source, identity, folder).tolist()]


def find_identity(folder: Path, name: str) -> int:
    """Return the identity with a name; if there is none, and `name` is a number, this number.

    Raises:
        DataError: there is no such identity.
    """
    source = open_dataset(folder)
    named = [label for label in np.unique(source.labels).tolist() if identity_name(source, label) == name]
    # In a mixture, the name of one identity can be the number of another one, which has none.
    if named:
        return min(named, key=lambda label: name == str(label))
    if name.isascii() and name.isdigit():
        return int(name)
    raise DataError(f"{folder}: no identity is named {name!r}; give its folder name, or its number from 0")


def image_numbers(source: FaceDataset, identity: int, folder: Path) -> np.ndarray:
    """Return the numbers of an identity's images, int64, at least one.

    Raises:
        DataError: there is no such identity, or it has no image.
    """
    numbers = np.flatnonzero(source.labels == identity)
    if not len(numbers):
        raise DataError(
            f"{folder}: identity {identity} has no image; give an identity from 0 to {source.num_classes - 1:,}"
        )
    return numbers


def _histogram(counts: np.ndarray) -> dict[str, int]:
    edges = [bound for bound in _HISTOGRAM_BOUNDS if bound <= counts.max()]
    edges = edges[max(sum(edge <= counts.min() for edge in edges) - 1, 0) :]
    upper = [*edges[1:], int(counts.max()) + 1]
    names = [
        f"{low}" if high - low == 1 else f"{low}–{high - 1}" for low, high in zip(edges, upper, strict=True)
    ]
    return {
        name: int(((counts >= low) & (counts < high)).sum())
        for name, low, high in zip(names, edges, upper, strict=True)
    }


def _most_frequent(values: Iterable[str]) -> dict[str, int]:
    return dict(Counter(values).most_common(5))


def _size(image: bytes) -> str:
    size = encoded_image_size(image)
    return f"{size[0]}×{size[1]}" if size else "unreadable"


def _format(image: bytes) -> str:
    header = read_header(image)
    return "unknown" if header is None else header.format
