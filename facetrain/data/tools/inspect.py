"""What a dataset holds: counts, sizes, formats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import encoded_image_size
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.errors import DataError

_BOUNDS = (1, 2, 3, 5, 10, 20, 50, 100, 200, 500)


@dataclass(frozen=True)
class Inspection:
    """A dataset in numbers. Sizes and formats are those of a sample."""

    folder: str
    images: int
    identities: int
    identities_without_images: int
    fewest: int
    median: float
    most: int
    histogram: dict[str, int]
    sample: int
    sizes: dict[str, int]
    formats: dict[str, int]


def inspect(folder: Path, *, sample: int = 1000, seed: int = 0) -> Inspection:
    """Count a dataset, and look at the headers of a sample of its images.

    Raises:
        DataError: it cannot be read.
    """
    source = open_dataset(folder)
    counts = np.bincount(source.labels, minlength=source.num_classes)
    there = counts[counts > 0]
    numbers = permute(np.arange(min(sample, source.num_images)), source.num_images, key_of(seed))
    pictures = [source.read(int(number)) for number in numbers]
    return Inspection(
        folder=str(folder),
        images=source.num_images,
        identities=source.num_classes,
        identities_without_images=int((counts == 0).sum()),
        fewest=int(there.min()),
        median=float(np.median(there)),
        most=int(there.max()),
        histogram=_histogram(there),
        sample=len(pictures),
        sizes=_commonest(_size(image) for image in pictures),
        formats=_commonest(_format(image) for image in pictures),
    )


def images_of(folder: Path, identity: int) -> list[str]:
    """Return where each image of an identity lies.

    Raises:
        DataError: there is no such identity, or it has no image.
    """
    source = open_dataset(folder)
    return [source.location(number) for number in numbers_of(source, identity, folder).tolist()]


def numbers_of(source: FaceDataset, identity: int, folder: Path) -> np.ndarray:
    """Return the numbers of an identity's images, int64, at least one.

    Raises:
        DataError: there is no such identity, or it has no image.
    """
    numbers = np.flatnonzero(source.labels == identity)
    if not len(numbers):
        raise DataError(
            f"{folder}: identity {identity} has no image; identities go from 0 to {source.num_classes - 1:,}"
        )
    return numbers


def _histogram(counts: np.ndarray) -> dict[str, int]:
    edges = [bound for bound in _BOUNDS if bound <= counts.max()]
    edges = edges[max(sum(edge <= counts.min() for edge in edges) - 1, 0) :]
    upper = [*edges[1:], int(counts.max()) + 1]
    names = [
        f"{low}" if high - low == 1 else f"{low}–{high - 1}" for low, high in zip(edges, upper, strict=True)
    ]
    return {
        name: int(((counts >= low) & (counts < high)).sum())
        for name, low, high in zip(names, edges, upper, strict=True)
    }


def _commonest(values: object) -> dict[str, int]:
    return dict(Counter(values).most_common(5))  # type: ignore[call-overload]


def _size(image: bytes) -> str:
    size = encoded_image_size(image)
    return f"{size[0]}×{size[1]}" if size else "unreadable"


def _format(image: bytes) -> str:
    known = {b"\xff\xd8": "JPEG", b"\x89P": "PNG", b"BM": "BMP"}
    return known.get(image[:2], "unknown")
