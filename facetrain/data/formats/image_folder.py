"""Image folders: one subfolder of image files per identity."""

from __future__ import annotations

import contextlib
import os
from itertools import islice
from pathlib import Path

import numpy as np

from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, open_regular, os_errors_as, printable

_PROBED_FOLDERS, _PROBED_FILES = 1000, 16
"""Entries to look at in a folder that is probably not one of images: it may have millions."""


class FolderDataset:
    """Images of a folder with one subfolder per identity; labels follow the sorted names of subfolders with images.

    Raises:
        DataError: if there are no images.
    """

    def __init__(self, folder: Path) -> None:
        self.skipped: list[SkippedFile] = []
        """Files that are not images of an identity, and the reasons."""
        self._folder = folder
        self._identities: list[str] = []
        self._files: list[str] = []
        labels: list[int] = []
        for name in self._subfolders():
            files = self._image_files(name)
            if files:
                labels += [len(self._identities)] * len(files)
                self._identities.append(name)
                self._files += files
            else:
                self._skip(name, "empty", "the folder has no images")
        if not labels:
            raise DataError(self._no_images())
        self.labels = np.array(labels, dtype=np.int64)
        self.num_images = len(labels)
        self.num_classes = len(self._identities)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the file cannot be read.
        """
        # Without pathlib, which takes as long as the reading.
        path = f"{self._folder}/{self._identities[self.labels.item(index)]}/{self._files[index]}"
        try:
            file = open_regular(path)
            try:
                return os.read(file, os.fstat(file).st_size)
            finally:
                os.close(file)
        except OSError as error:
            raise UnreadableError(f"{path}: {error_reason(error)}") from error

    def name(self, index: int) -> str:
        """Return the path of an image inside the folder."""
        return printable(f"{self._identities[self.labels[index]]}/{self._files[index]}")

    def identity_name(self, label: int) -> str:
        """Return the name of an identity's folder."""
        return printable(self._identities[label])

    def location(self, index: int) -> str:
        """Return the path of the file."""
        return printable(str(self._folder)) + "/" + self.name(index)

    def _subfolders(self) -> list[str]:
        found = []
        with os_errors_as(DataError, self._folder), os.scandir(self._folder) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    self._skip(entry.name, "hidden", "the name begins with a dot")
                elif entry.is_dir():
                    found.append(entry.name)
                else:
                    self._skip(entry.name, "no_identity", "the file is not in the folder of an identity")
        return found

    def _image_files(self, identity: str) -> list[str]:
        found = []
        with os_errors_as(DataError, self._folder / identity), os.scandir(self._folder / identity) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{identity}/{entry.name}"
                suffix = os.path.splitext(entry.name)[1].lower()
                if entry.name.startswith("."):
                    # macOS writes a file ._NAME.jpg of its own beside each image on a foreign disk.
                    self._skip(name, "hidden", "the name begins with a dot")
                elif entry.is_dir():
                    self._skip(name, "nested", f"a folder inside the folder of an identity; {_count(entry)}")
                elif suffix in IMAGE_SUFFIXES:
                    found.append(entry.name)
                else:
                    self._skip(name, "suffix", f"{suffix or 'no suffix'}: not a format that OpenCV reads")
        return found

    def _skip(self, name: str, kind: str, reason: str) -> None:
        self.skipped.append(SkippedFile(printable(name), kind, reason))

    def _no_images(self) -> str:
        message = (
            f"{self._folder}: contains neither train.rec nor images in one subfolder per identity "
            f"({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
        if any(os.path.splitext(one.name)[1].lower() in IMAGE_SUFFIXES for one in self.skipped):
            message += (
                "; for images directly in this folder, write a list file that names their people, such as people.txt "
                "with lines `photo1.jpg ann`, and give this file"
            )
        nested = next((one.name for one in self.skipped if one.kind == "nested"), None)
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
