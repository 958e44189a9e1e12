"""Image folders: one subfolder of image files per identity."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from facetrain.data.column_cache import Columns
from facetrain.data.formats.base import CatalogDataset, Format
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, open_regular, os_errors_as, printable

_PROBED_FOLDERS, _PROBED_FILES = 1000, 16
"""Entries to look at in a folder that is probably not one of images: it may have millions."""


class FileDataset(CatalogDataset):
    """Images with a file each, whose paths are the names of the catalog."""

    def __init__(self, path: Path, files: Sequence[Path], columns: Columns, root: Path) -> None:
        """Take a catalog and the folder that the paths are relative to."""
        super().__init__(path, files, columns)
        self._root = root

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the file cannot be read.
        """
        path = self._file_path(index)
        try:
            file = open_regular(path)
            try:
                return os.read(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        except OSError as error:
            raise UnreadableError(f"{printable(path)}: {error_reason(error)}") from error

    def prefetch(self, first: int, count: int) -> None:
        """Do nothing: the files would have to be opened."""

    def location(self, index: int) -> str:
        """Return the path of the file."""
        return printable(self._file_path(index))

    def _file_path(self, index: int) -> str:
        # Without pathlib, which takes as long as the reading. A list can have absolute paths.
        return os.path.join(self._root, self._decode_name(self._name_bytes(index)))


def open_folder(folder: Path) -> CatalogDataset:
    """Open a folder with one subfolder per identity; labels follow the sorted names of subfolders with images.

    Raises:
        DataError: there are no images.
    """
    skipped: list[tuple[str, str, str]] = []

    def skip(name: str, kind: str, reason: str) -> None:
        skipped.append((printable(name), kind, reason))

    identities, labels, names = list[str](), list[int](), list[bytes]()
    for identity in _subfolders(folder, skip):
        files = _image_files(folder, identity, skip)
        if not files:
            skip(identity, "empty", "the folder has no images")
            continue
        labels += [len(identities)] * len(files)
        identities.append(identity)
        names += (os.fsencode(f"{identity}/{file}") for file in files)
    if not labels:
        raise DataError(_no_images(folder, skipped))
    name_size = np.fromiter(map(len, names), np.int32, len(names))
    columns = Columns.of(
        label=np.array(labels, np.int32), names=np.frombuffer(b"".join(names), np.uint8), name_size=name_size,
        name_offset=np.cumsum(name_size, dtype=np.int64) - name_size, identities=identities, skipped=skipped,
    )  # fmt: skip
    return FileDataset(folder, [], columns, root=folder)


FORMAT = Format("image folder", open_folder)


def _subfolders(folder: Path, skip: Callable[[str, str, str], None]) -> list[str]:
    names = []
    with os_errors_as(DataError, folder), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.startswith("."):
                skip(entry.name, "hidden", "the name begins with a dot")
            elif entry.is_dir():
                names.append(entry.name)
            else:
                skip(entry.name, "no_identity", "the file is not in the folder of an identity")
    return names


def _image_files(folder: Path, identity: str, skip: Callable[[str, str, str], None]) -> list[str]:
    names = []
    with os_errors_as(DataError, folder / identity), os.scandir(folder / identity) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = f"{identity}/{entry.name}"
            suffix = os.path.splitext(entry.name)[1].lower()
            if entry.name.startswith("."):
                # macOS writes a hidden file ._NAME.jpg beside each image on a foreign disk.
                skip(name, "hidden", "the name begins with a dot")
            elif entry.is_dir():
                skip(name, "nested", f"a folder inside the folder of an identity; {_count(entry)}")
            elif suffix in IMAGE_SUFFIXES:
                names.append(entry.name)
            else:
                skip(name, "suffix", f"{suffix or 'no suffix'}: not a format that OpenCV reads")
    return names


def _no_images(folder: Path, skipped: list[tuple[str, str, str]]) -> str:
    message = (
        f"{folder}: contains neither train.rec nor images in one subfolder per identity "
        f"({', '.join(sorted(IMAGE_SUFFIXES))})"
    )
    if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name, *_ in skipped):
        message += (
            "; for images directly in this folder, write a list file that names their people, such as people.txt "
            "with lines `photo1.jpg ann`, and give this file"
        )
    nested = next((name for name, kind, _ in skipped if kind == "nested"), None)
    if nested is not None:
        message += f"; if the identities are the folders in {nested.split('/')[0]}, give that folder"
    return message


def folders_with_images(folder: Path, most: int) -> list[str]:
    """Return the names of at most `most` subfolders with an image among their first files; hidden ones do not count."""
    found: list[str] = []
    with os_errors_as(DataError, folder), os.scandir(folder) as entries:
        subfolders = (entry for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        for entry in islice(subfolders, _PROBED_FOLDERS):
            with contextlib.suppress(PermissionError), os.scandir(entry.path) as files:  # such as lost+found
                names = [file.name for file in islice(files, _PROBED_FILES)]
                if any(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names):
                    found.append(entry.name)
            if len(found) == most:
                break
    return found


def _count(folder: os.DirEntry[str]) -> str:
    """Return how many image files a folder has, at any depth."""
    names = (name for _, _, files in os.walk(folder.path) for name in files)
    count = sum(os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES for name in names)
    return f"images in it: {count:,}"
