"""Image folders: one subfolder of image files per identity."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.dataset import IMAGE_SUFFIXES
from facetrain.errors import DataError
from facetrain.files import os_errors_as


class FolderDataset:
    """Images of a folder with one subfolder per identity; labels follow the sorted subfolder names.

    Raises:
        DataError: if there are no images.
    """

    def __init__(self, folder: Path) -> None:
        self.names = sorted(
            entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != "."
        )
        files = [
            (label, path) for label, name in enumerate(self.names) for path in _image_files(folder / name)
        ]
        if not files:
            raise DataError(
                f"{folder}: contains neither train.rec nor images in one subfolder per identity "
                f"({', '.join(sorted(IMAGE_SUFFIXES))})"
            )
        self._paths = [path for _, path in files]
        self.labels = np.array([label for label, _ in files], dtype=np.int64)
        self.num_images = len(files)
        self.num_classes = len(self.names)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            DataError: if the file cannot be read.
        """
        with os_errors_as(DataError, self._paths[index]):
            return self._paths[index].read_bytes()

    def name(self, index: int) -> str:
        """Return the path of an image inside the folder."""
        return f"{self._paths[index].parent.name}/{self._paths[index].name}"

    def location(self, index: int) -> str:
        """Return the path of the file."""
        return str(self._paths[index])


def _image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
