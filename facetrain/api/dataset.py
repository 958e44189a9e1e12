"""Datasets of any format as a sequence of decoded images."""

# H, W height and width   N images

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import SupportsIndex, overload

import numpy as np

from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.remote.download import local_path
from facetrain.text import images_text

PathLike = str | os.PathLike[str]


class Dataset(Sequence[tuple[np.ndarray, int]]):
    """Dataset of any format, as a sequence of (image, label).

    Examples:
        >>> dataset = facetrain.Dataset("faces")
        >>> len(dataset), dataset.num_identities
        (12000, 1000)
        >>> image, label = dataset[0]      # uint8 (H, W, 3) in RGB, and an int
    """

    def __init__(self, path: PathLike) -> None:
        """Open a folder, a list file, a `.rec` file or the YAML file of a mixture.

        Raises:
            DataError: there is no dataset at the path.
        """
        self.path = local_path(path)
        self._source = open_dataset(self.path)
        self.labels = np.asarray(self._source.labels, np.int64)
        """Label of every image: int64 (N,), from 0 to `num_identities` - 1."""
        self.num_identities = self._source.num_classes

    def __len__(self) -> int:
        return self._source.num_images

    @overload
    def __getitem__(self, index: SupportsIndex) -> tuple[np.ndarray, int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[tuple[np.ndarray, int]]: ...

    def __getitem__(
        self, index: SupportsIndex | slice
    ) -> tuple[np.ndarray, int] | list[tuple[np.ndarray, int]]:
        """Return the image, uint8 (H, W, 3) in RGB, and its label; for a slice a list of them.

        Raises:
            DataError: the image cannot be read.
        """
        number = range(len(self))[index]
        if isinstance(number, range):
            return [self[each] for each in number]
        image = decode_rgb(self._source.read(number), location=self._source.location(number))
        return image, int(self.labels[number])

    def __repr__(self) -> str:
        return f"Dataset({str(self.path)!r}): {images_text(len(self), self.num_identities)}"
