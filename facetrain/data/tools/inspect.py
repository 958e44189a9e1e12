"""What a dataset holds: counts, sizes, formats."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.counter import key_of
from facetrain.data.dataset import open_source
from facetrain.data.decode import picture_size
from facetrain.data.order import permute
from facetrain.data.source import FaceSource
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
    """Count a dataset, and look at the headers of a sample of its pictures.

    Raises:
        DataError: it cannot be read.
    """
    source = open_source(folder)
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
        sizes=_commonest(_size(picture) for picture in pictures),
        formats=_commonest(_format(picture) for picture in pictures),
    )


def pictures_of(folder: Path, identity: int) -> list[str]:
    """Return where each picture of an identity lies.

    Raises:
        DataError: there is no such identity, or it has no picture.
    """
    source = open_source(folder)
    return [source.where(number) for number in numbers_of(source, identity, folder).tolist()]


def numbers_of(source: FaceSource, identity: int, folder: Path) -> np.ndarray:
    """Return the numbers of an identity's pictures, int64, at least one.

    Raises:
        DataError: there is no such identity, or it has no picture.
    """
    numbers = np.flatnonzero(source.labels == identity)
    if not len(numbers):
        raise DataError(
            f"{folder}: identity {identity} has no picture; identities go from 0 to {source.num_classes - 1:,}"
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


def _size(picture: bytes) -> str:
    size = picture_size(picture)
    return f"{size[0]}×{size[1]}" if size else "unreadable"


def _format(picture: bytes) -> str:
    known = {b"\xff\xd8": "JPEG", b"\x89P": "PNG", b"BM": "BMP"}
    return known.get(picture[:2], "unknown")
