"""Several datasets as one, their identities kept apart, each seen as often as its weight says.

datasets:
  - path: faces_emore          # relative to this file
  - path: glint360k
    weight: 0.5                # half of its images in every epoch, the other half in the next; 1 if left out
    identities: keep.txt       # only these identities, one number a line; `without:` leaves some out
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from facetrain.data.dataset import FaceDataset, SubsetDataset, prefetch_images
from facetrain.errors import DataError

MIXTURE_SUFFIXES = (".yaml", ".yml")
_KEYS = {"path", "weight", "identities", "without"}


class MixtureDataset:
    """Datasets one after the other: images and identities of the second are numbered behind the first's."""

    def __init__(self, sources: Sequence[FaceDataset], weights: Sequence[float]) -> None:
        self.sources, self.weights = list(sources), list(weights)
        self.counts = [source.num_images for source in sources]
        self._ends = np.cumsum(self.counts)
        offsets = np.cumsum([0, *(source.num_classes for source in sources)])
        self.labels = np.concatenate(
            [
                source.labels.astype(np.int32) + np.int32(o)
                for source, o in zip(sources, offsets, strict=False)
            ]
        )
        self.num_images = len(self.labels)
        self.num_classes = int(offsets[-1])

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        source, inside = self._find(number)
        return source.read(inside)

    def prefetch(self, first: int, count: int) -> None:
        """Have images fetched by the datasets that they lie in."""
        last = first + count
        while first < last:
            source, inside = self._find(first)
            length = min(last - first, source.num_images - inside)
            prefetch_images(source, inside, length)
            first += length

    def location(self, number: int) -> str:
        """Say where the dataset that it comes from has it."""
        source, inside = self._find(number)
        return source.location(inside)

    def _find(self, number: int) -> tuple[FaceDataset, int]:
        part = int(np.searchsorted(self._ends, number, side="right"))
        return self.sources[part], int(number - self._ends[part] + self.counts[part])


def open_mixture(
    path: Path,
    open_part: Callable[[Path], FaceDataset],
    drop_small_identities: Callable[[FaceDataset, Path], FaceDataset],
) -> MixtureDataset:
    """Open what a YAML file names; `drop_small_identities` leaves out identities with too few images.

    It comes last: the numbers that `identities:` and `without:` list are the dataset's own.

    Raises:
        DataError: the file is not as described above, or one of its datasets cannot be opened.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from error
    parts = content.get("datasets") if isinstance(content, dict) else None
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise DataError(f"{path}: needs a list `datasets:` of entries with a `path:`")
    sources, weights = [], []
    for part in parts:
        unknown = part.keys() - _KEYS
        if unknown or not isinstance(part.get("path"), str):
            raise DataError(
                f"{path}: an entry has {sorted(map(str, part))}; it may have {sorted(_KEYS)}, and needs path"
            )
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1000:
            raise DataError(f"{path}: weight of {part['path']} is {weight!r}, not a number above 0")
        where = path.parent / part["path"]
        if where.suffix in MIXTURE_SUFFIXES:
            raise DataError(f"{path}: {part['path']} is a mixture itself; name its datasets here")
        sources.append(drop_small_identities(_part(open_part(where), part, path), where))
        weights.append(float(weight))
    return MixtureDataset(sources, weights)


def _part(source: FaceDataset, part: dict[str, Any], path: Path) -> FaceDataset:
    kept = np.arange(source.num_classes)
    if "identities" in part:
        kept = np.intersect1d(kept, _listed(path.parent / str(part["identities"])))
    if "without" in part:
        kept = np.setdiff1d(kept, _listed(path.parent / str(part["without"])))
    if len(kept) == source.num_classes:
        return source
    if not np.isin(kept, source.labels).any():
        raise DataError(f"{path}: of {part['path']}, no identity is left")
    return SubsetDataset(source, kept)


def _listed(path: Path) -> np.ndarray:
    try:
        return np.array(path.read_text(encoding="ascii").split(), dtype=np.int64)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a list of identities, one whole number a line ({error})") from error
