"""Catalog of images: the place of every image of a dataset in its files. One class reads the images of all formats."""

# N images

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from facetrain.data.column_cache import Columns
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.landmark_file import read_landmarks
from facetrain.data.images.header import size_fault
from facetrain.data.positional_file import PositionalFile
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import os_errors_as
from facetrain.text import printable

_SHORT_COLUMNS = ("label", "file", "name_size")
"""Columns of int32; the others are int64."""
_MOST_OPEN_FILES, _SHARE_OF_OPEN_FILES = 4096, 32
"""Files of a dataset that stay open, up to this part of the files that a process may open: a mixture has tens of
datasets. An image in a file that must be opened takes three times as long as in one that is open."""
_PREFETCH_GAP = 1 << 18
"""Bytes between two images up to which one request for both takes less time than two."""


@dataclass(frozen=True)
class Format:
    """Format of datasets: its recognition and its opener. `open_dataset` lists all formats."""

    name: str
    open: Callable[[Path], CatalogDataset]
    parts: tuple[str, ...] = ()
    """Names of files, or patterns such as *.tar: a folder with one of them is a dataset."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of files that are a dataset each, from `names.SUFFIXES`."""


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files of a folder with one of the suffixes in any case, sorted, without hidden ones."""
    with os_errors_as(DataError, folder):
        names = os.listdir(folder)
    return sorted(folder / name for name in names if name.lower().endswith(suffixes) and name[0] != ".")


def catalog_path(path: Path) -> Path:
    """Return the cache file of the catalog of a dataset that is a file or a folder."""
    return path / ".images.catalog" if path.is_dir() else path.with_name(f".{path.name}.catalog")


class CatalogDataset(FaceDataset):
    """Dataset whose images are at known places in its files.

    The columns of the catalog, one number for each image:

        label                   identity, int32
        offset, size            first byte and number of bytes of the encoded image
        file                    number of the file among `files`; absent if there is only one
        name_offset, name_size  place of the name in the same file, or in `names`; absent if the images have no names

    Columns that are not per image:

        names                   names that are in no file, uint8
        identities              list of the names of the identities; empty or absent if they have none
        skipped                 list of `SkippedFile`: the members that are no images of an identity

    A format whose images are not stored as such overrides `_read`, one whose names are not texts `_decode_name`.

    Attributes:
        path: the file or folder of the dataset.
        columns: the catalog.
        landmark_file: file with the landmarks of the images, see `landmark_file.py`; None if there is none.

    Raises:
        DataError: there are no images.
    """

    path: Path
    file_type: ClassVar[type[PositionalFile]] = PositionalFile

    def __init__(self, path: Path, files: Sequence[Path], columns: Columns) -> None:
        # Shared: a copy of the 36 bytes per image of a folder in each of 16 reading processes a GPU would fill a host.
        self.path, self.files, self.columns = path, files, columns.in_shared_memory()
        self.num_images = len(self.labels)
        self.landmark_file: Path | None = None
        if not self.num_images:
            example = "".join(f"; {file.name} is left out: {file.reason}" for file in self.skipped[:1])
            raise DataError(f"{path}: the dataset contains no images{example}")
        self.num_classes = int(self.labels.max()) + 1

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without open files and lists that every process makes again when it needs them."""
        kind = type(self)
        return {
            name: value
            for name, value in vars(self).items()
            if not isinstance(getattr(kind, name, None), cached_property)
        }

    @property
    def labels(self) -> np.ndarray:  # type: ignore[override]
        """Identity of every image: int32 (N,), memory-mapped from the cache file."""
        return self.columns.arrays["label"]

    @property
    def skipped(self) -> list[SkippedFile]:
        """Files and members that are not images of an identity, and the reasons."""
        return [SkippedFile(*entry) for entry in self.columns.value("skipped", [])]

    @property
    def landmarks(self) -> np.ndarray | None:
        """Landmarks of every image, float32 (N, 5, 2), mapped into memory; None without a landmark file.

        Raises:
            DataError: the file does not fit the images, or has numbers that are no fractions.
        """
        return None if self.landmark_file is None else read_landmarks(self.landmark_file, self.num_images)

    def read(self, index: int) -> bytes:
        """Return the encoded image; one of an object store that makes no sense is fetched once more.

        Raises:
            UnreadableError: the file ends inside the image, or cannot be read, or the image is larger than any.
            DataError: the image contradicts the catalog.
        """
        try:
            return self._read(index)
        except DataError:
            if not self.forget(index):
                raise
        try:
            return self._read(index)
        except DataError as error:
            raise type(error)(f"{error}; the store gave it twice, past data.cache") from None

    def forget(self, index: int) -> bool:
        """Have an image fetched again when it is read next; return whether it is in an object store."""
        if "offset" not in self.columns.arrays:  # a file each
            return False
        _, start, end = self._extents(slice(index, index + 1))
        if not len(start):  # a row of a compressed table
            return False
        return self.file_of(index).forget(start.item(0), end.item(0) - start.item(0))

    def _read(self, index: int) -> bytes:
        """Return the encoded image as the file has it; `read` says which errors."""
        arrays = self.columns.arrays
        size = arrays["size"].item(index)
        if fault := size_fault(size):
            raise UnreadableError(f"{self.location(index)}: {fault}")
        data = self.file_of(index).bytes_at(arrays["offset"].item(index), size)
        if len(data) < size:
            raise UnreadableError(f"{self.location(index)}: the file is truncated; copy it again")
        return data

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read images `first` to `first + count - 1`; neighbors share a request."""
        file, start, end = self._extents(slice(first, first + count))
        # The order of the images need not be the order of their bytes, for example in a list or an LMDB database.
        order = np.lexsort((start, file))
        file, start, end = file[order], start[order], end[order]
        is_apart = (file[1:] != file[:-1]) | (start[1:] - end[:-1] > _PREFETCH_GAP)
        edges = [0, *(np.flatnonzero(is_apart) + 1).tolist(), len(order)]
        for low, high in itertools.pairwise(edges):
            if low < high:
                offset = start.item(low)
                self.opened(file.item(low)).prefetch_bytes(offset, int(end[low:high].max()) - offset)

    def places(self, index: np.ndarray) -> np.ndarray:
        """Return first byte and number of bytes of B images in their files, int64 (B, 2); 0 for what has no column."""
        arrays, unknown_B = self.columns.arrays, np.zeros(len(index), np.int64)
        columns = [arrays[name][index] if name in arrays else unknown_B for name in ("offset", "size")]
        return np.stack(columns, axis=1).astype(np.int64)

    def sizes(self, index: np.ndarray) -> np.ndarray | None:
        """Return the sizes of B images as ranges of one number, int64 (B, 2); None if the catalog has no sizes."""
        size_N = self.columns.arrays.get("size")
        return None if size_N is None else np.stack([size_N[index]] * 2, axis=1).astype(np.int64)

    def location(self, index: int) -> str:
        """Return the file, the byte offset, and the name if there is one."""
        place = self._place(index)
        # A message about the image is worth more than one about its name.
        with contextlib.suppress(DataError):
            if (name := self.name(index)) is not None:
                place += f" ({name})"
        return place

    def name(self, index: int) -> str | None:
        """Return the path of an image inside the dataset; None if it has no name.

        Raises:
            DataError: the name is damaged.
        """
        data = self._name_bytes(index)
        return printable(self._decode_name(data)) if data else None

    def digest_file_names(self) -> str | None:
        """Return a digest of the names of an image folder's files in the order of the images; None for other formats.

        The other formats have their images in files, or their order in a list: a user does not change it by chance.
        """
        names = self.columns.arrays.get("names")
        if names is None:
            return None
        digest = hashlib.sha256(names.data)
        digest.update(self.columns.arrays["name_size"].data)
        return digest.hexdigest()

    def identity_name(self, label: int) -> str:
        """Return the name of an identity, or its number."""
        return self._identities[label] if 0 <= label < len(self._identities) else str(label)

    def identity_names(self) -> Iterator[str] | None:
        """Return the names of the identities 0, 1, …; the number of one without a name. None without any."""
        if next(self._stored_names(), None) is None:
            return None
        names = self._stored_names()
        return (next(names, str(label)) for label in range(self.num_classes))

    def file_of(self, index: int) -> PositionalFile:
        """Return the file of an image."""
        arrays = self.columns.arrays
        return self.opened(arrays["file"].item(index) if "file" in arrays else 0)

    @cached_property
    def opened(self) -> Callable[[int], PositionalFile]:
        """Function that returns the file with a number; the files that were used last stay open."""
        permitted = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = min(_MOST_OPEN_FILES, permitted // _SHARE_OF_OPEN_FILES)
        return lru_cache(maxsize=most)(lambda number: self.file_type(self.files[number]))

    def _place(self, index: int) -> str:
        return f"{self.file_of(index).path}: image at byte {self.columns.arrays['offset'][index]:,}"

    def _extents(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the number of the file, the first byte and the end of each of R images: int64 (R,) each."""
        arrays = self.columns.arrays
        start = arrays["offset"][rows].astype(np.int64)
        file = arrays["file"][rows] if "file" in arrays else np.zeros(len(start), np.int64)
        return file, start, start + arrays["size"][rows]

    def _name_bytes(self, index: int) -> bytes:
        """Return the stored name of an image; empty if it has none."""
        arrays = self.columns.arrays
        size = arrays["name_size"].item(index) if "name_size" in arrays else 0
        if not size:
            return b""
        offset = arrays["name_offset"].item(index)
        if "names" in arrays:
            return arrays["names"][offset : offset + size].tobytes()
        return self.file_of(index).bytes_at(offset, size)

    def _decode_name(self, data: bytes) -> str:
        return data.decode("utf-8", "surrogateescape")

    @cached_property
    def _identities(self) -> list[str]:
        return list(self._stored_names())

    def _stored_names(self) -> Iterator[str]:
        """Yield the names of the identities 0, 1, …; none if they have none."""
        return map(printable, self.columns.texts("identities"))


def columns_of_rows(names: str, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns (N,) of a table int64 (N, k) by their k names, which are separated by spaces."""
    return {
        name: np.ascontiguousarray(column, np.int32 if name in _SHORT_COLUMNS else np.int64)
        for name, column in zip(names.split(), rows.T, strict=True)
    }
