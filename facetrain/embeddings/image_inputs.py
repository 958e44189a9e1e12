"""Images of any input: an image, a folder of images, a dataset, a `.rec` or a `.bin`, each read on access."""

# N images

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.image_folder import folders_with_images, read_image_file
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.formats.names import DATASET_SUFFIXES
from facetrain.data.formats.set_names import has_bin_suffix
from facetrain.data.images.header import is_image_name
from facetrain.data.open_dataset import is_dataset_folder, open_dataset
from facetrain.errors import DataError
from facetrain.telemetry.log import warn
from facetrain.text import printable

T = TypeVar("T")


class ImageInput(NamedTuple):
    """Images of an input with what is known of them."""

    images: Sequence[bytes]
    """Encoded images, which are read on access, except those of a `.bin`."""
    names: Sequence[str]
    labels: np.ndarray
    """Class of each image, int (N,); −1 for no label."""
    landmarks: Callable[[], np.ndarray | None]
    """Reads the landmarks, (N, 5, 2), for networks that take them; returns None without any. Raises DataError if the
    landmark file does not fit the input."""


def read_input(input: Path) -> ImageInput:
    """Return the images of an input.

    Images beside a dataset, and below a folder of images, are not read; the first call for a folder warns of them.

    Raises:
        DataError: the input does not exist or cannot be read.
    """
    if has_bin_suffix(input):
        members, _ = read_bin(input)
        names = [f"{input.name}:{index}" for index in range(len(members))]
        landmarks = partial(read_landmarks_beside, input, len(members))
        return ImageInput(members, names, np.full(len(members), -1), landmarks)
    files = _image_files(input)
    if _is_dataset(input, files):
        if files:
            _warn_once(
                f"{input}: read as a dataset; the images beside it ({files[0].name}) are not read; to embed such "
                "images, move them to another folder"
            )
        source = open_dataset(input)
        return ImageInput(
            dataset_images(source),
            LazySequence(source.num_images, lambda index: _image_name(source, index)),
            np.asarray(source.labels, np.int64),
            lambda: source.landmarks,
        )
    for name in folders_with_images(input, 1) if files else ():
        _warn_once(
            f"{input}: read as a folder of images; the images in its subfolder {name} are not read; to embed them, "
            "give the subfolder"
        )
    paths = files or [input]
    if not files:
        read_image_file(input)  # a wrong path is reported now
    names = [printable(path.name) for path in paths]
    return ImageInput(lazy_files(paths), names, np.full(len(paths), -1), lambda: None)


def dataset_images(source: FaceDataset) -> Sequence[bytes]:
    """Return the encoded images of a dataset, which are read on access."""
    return LazySequence(source.num_images, source.read, source.location)


def lazy_files(paths: Sequence[Path]) -> LazySequence[bytes]:
    """Return the contents of files, each read on access: millions of images are never in memory together.

    The access to an item raises UnreadableError if the file cannot be read.
    """
    return LazySequence(
        len(paths), lambda index: read_image_file(paths[index]), lambda index: printable(str(paths[index]))
    )


def _image_name(source: FaceDataset, index: int) -> str:
    """Return the path of a packed image in the dataset that was packed; otherwise the location of the image."""
    name, location = None, source.location(index)
    with contextlib.suppress(DataError):  # the name may be damaged like the image
        name = source.name(index)
    return location if name is None or location.endswith("/" + name) else name


def _is_dataset(input: Path, files: list[Path]) -> bool:
    """Return whether an input is a dataset, and not an image or a folder of images, `files`."""
    if files:
        return is_dataset_folder(input)
    return input.is_dir() or input.name.lower().endswith(DATASET_SUFFIXES)


@cache
def _warn_once(message: str) -> None:
    """Print a warning once: a command may read its input again."""
    warn(message)


def _image_files(folder: Path) -> list[Path]:
    """Return the images directly in a folder.

    Hidden files are left out, as in a dataset: macOS writes a file `._NAME.jpg` beside an image.
    """
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in entries if is_image_name(path.name) and not path.name.startswith("."))


def image_location(images: Sequence[Any], index: int, name: str) -> str:
    """Return where an image is, for messages: its `location`, if the sequence knows it, or its number in `name`."""
    locate: Callable[[int], str] | None = getattr(images, "location", None)
    return f"{name}: image {index}" if locate is None else locate(index)


class LazySequence(Sequence[T]):
    """Sequence whose items a function computes on access.

    `location`, if there is one, is an attribute that names the place of an image, see `image_location`.
    """

    def __init__(
        self, count: int, item: Callable[[int], T], location: Callable[[int], str] | None = None
    ) -> None:
        self._indices, self._item, self.location = range(count), item, location

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        """Return an item, or a list of the items of a slice."""
        index = self._indices[index]
        return list(map(self._item, index)) if isinstance(index, range) else self._item(index)
