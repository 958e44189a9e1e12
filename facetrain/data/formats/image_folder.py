"""Image folders: one subfolder of image files per identity."""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from facetrain.data.beside_dataset import BESIDE_IDENTITIES
from facetrain.data.column_cache import Columns
from facetrain.data.formats.base import CatalogDataset, Format
from facetrain.data.formats.labels import require_names
from facetrain.data.formats.names import SUFFIXES
from facetrain.data.formats.shard_names import split_of
from facetrain.data.images.header import IMAGE_SUFFIXES, is_image_name, size_fault
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, open_regular, os_errors_as
from facetrain.text import listed, printable

_LOST_AND_FOUND = "lost+found"
"""Folder at the root of a disk, which only its administrator can read."""
_DATASET_FILES, _LMDB_FILES = (".rec", ".mdb", ".tar", ".parquet"), SUFFIXES["lmdb_dataset"]
"""Ends of the names of files whose folders are datasets of other formats, and of files that are a dataset each."""
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
        return read_image_file(self.file_path(index))

    def prefetch(self, first: int, count: int) -> None:
        """Do nothing: the files would have to be opened."""

    def places(self, index: np.ndarray) -> np.ndarray:
        """Return 0 and the sizes of B files, int64 (B, 2); a size of 0 for a file that cannot be read."""
        sizes = []
        for number in index.tolist():
            try:
                sizes.append(os.stat(self.file_path(number)).st_size)
            except OSError:
                sizes.append(0)
        return np.stack([np.zeros(len(sizes), np.int64), np.array(sizes, np.int64)], axis=1)

    def location(self, index: int) -> str:
        """Return the path of the file."""
        return printable(self.file_path(index))

    def file_path(self, index: int) -> str:
        """Return the path of an image's file; `location` escapes it for messages."""
        # Without pathlib, which takes as long as the reading. A list can have absolute paths.
        return os.path.join(self._root, self._decode_name(self._name_bytes(index)))


def read_image_file(path: str | os.PathLike[str]) -> bytes:
    """Return the content of an image file.

    Raises:
        UnreadableError: it cannot be read, is not a regular file, or is larger than any image.
    """
    # Not Path.read_bytes, which makes more system calls for each small file.
    try:
        file = open_regular(path)
        try:
            size = os.fstat(file).st_size
            if fault := size_fault(size):
                raise ValueError(fault)
            return os.read(file, size)
        finally:
            os.close(file)
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{printable(os.fspath(path))}: {error_reason(error)}") from error


def open_folder(folder: Path) -> CatalogDataset:
    """Open a folder with one subfolder per identity; labels follow the sorted names of subfolders with images.

    Raises:
        DataError: there are no images, or `require_names` refuses the name of a subfolder.
    """
    skipped: list[SkippedFile] = []

    def skip(name: str, kind: str, reason: str) -> None:
        skipped.append(SkippedFile(printable(name), kind, reason))

    # Buffers and not lists of texts and numbers, which would take 280 bytes per image.
    identities, labels, names, name_sizes = list[str](), array("i"), bytearray(), array("i")
    for identity, is_folder in _entries(folder, skip):
        if identity in BESIDE_IDENTITIES:
            continue
        if not is_folder:
            skip(identity, "no_identity", "the file is not in the folder of an identity")
            continue
        files = 0
        for name, is_folder in _entries(folder, skip, f"{identity}/"):
            if is_folder:
                skip(name, "nested", "a folder inside the folder of an identity")
            elif is_image_name(name):
                encoded = os.fsencode(name)
                names += encoded
                name_sizes.append(len(encoded))
                files += 1
            else:
                skip(name, "suffix", "not a format that OpenCV reads")
        if not files:
            skip(identity, "empty", "the folder has no images")
            continue
        labels.extend([len(identities)] * files)
        identities.append(identity)
    if not labels:
        raise DataError(
            f"{folder}: contains neither train.rec nor images in one subfolder per identity "
            f"({', '.join(sorted(IMAGE_SUFFIXES))}); give the folder that has the identities; "
            + _other_inputs(folder, skipped)
        )
    require_names(identities, folder)
    name_size = np.array(name_sizes, np.int32)
    columns = Columns.of(
        label=np.array(labels, np.int32),
        names=np.frombuffer(names, np.uint8),
        name_size=name_size,
        name_offset=np.cumsum(name_size, dtype=np.int64) - name_size,
        identities=identities,
        skipped=skipped,
    )
    return FileDataset(folder, [folder], columns, root=folder)


FORMAT = Format("image folder", open_folder)


def _other_inputs(folder: Path, skipped: Sequence[SkippedFile]) -> str:
    """Return what to give in place of a folder without identities, by what it has."""
    lists = sorted(file.name for file in skipped if file.name.endswith(SUFFIXES["image_list"]))
    files = [file.name for file in skipped if file.name.lower().endswith(_LMDB_FILES)]
    datasets = files + _subfolders(file for file in skipped if file.name.lower().endswith(_DATASET_FILES))
    nested = _subfolders(file for file in skipped if file.kind == "nested")
    of_training = {part: None for part in datasets + nested if split_of(part).startswith("train")}
    parts = list(of_training) or datasets or nested  # without test and validation
    if lists and not of_training and not datasets:
        return f"if {lists[0]} lists images and their people, give {folder / lists[0]}"
    if len(parts) > 1 and not of_training and all(map(split_of, parts)):
        return f"of the splits {listed(parts)}, give one, such as {folder / parts[0]}"
    if len(parts) == 1:
        return f"if the identities are in {parts[0]}, give {folder / parts[0]}"
    if len(parts) > 1:  # such as 0 to 9 of WebFace42M
        return (
            f"if {listed(parts)} have identities each, give a mixture of them, a .yaml file with the line `datasets:` "
            f'and a line `- path: "{parts[0]}"` for each'
        )
    return (
        "for images directly in it, write a list file of their people, such as people.txt with lines `photo1.jpg ann`, "
        "and give it"
    )


def _subfolders(files: Iterable[SkippedFile]) -> list[str]:
    """Return the subfolders that files are in."""
    return list(dict.fromkeys(file.name.partition("/")[0] for file in files if "/" in file.name))


def _entries(
    folder: Path, skip: Callable[[str, str, str], None], parent: str = ""
) -> Iterator[tuple[str, bool]]:
    """Yield the sorted paths in a folder, or in a folder of it, and whether each is a folder; skip the others."""
    with os_errors_as(DataError, folder / parent), os.scandir(folder / parent) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            name = parent + entry.name
            if entry.name.startswith("."):  # macOS writes ._NAME.jpg beside each image on a foreign disk
                skip(name, "hidden", "the name begins with a dot")
            elif name == _LOST_AND_FOUND:
                skip(name, "special", "a folder of the file system")
            elif not parent and entry.is_symlink() and not os.path.exists(entry.path):
                skip(name, "special", "a link to a file or folder that does not exist")
            else:
                yield name, entry.is_dir()


def folders_with_images(folder: Path, most: int) -> list[str]:
    """Return the names of at most `most` subfolders with an image among their first files; hidden ones do not count.

    Raises:
        DataError: the folder cannot be read.
    """
    found: list[str] = []
    with os_errors_as(DataError, folder), os.scandir(folder) as entries:
        subfolders = (entry for entry in entries if not entry.name.startswith(".") and entry.is_dir())
        for entry in islice(subfolders, _PROBED_FOLDERS):
            with contextlib.suppress(PermissionError), os.scandir(entry.path) as files:  # such as lost+found
                if any(is_image_name(file.name) for file in islice(files, _PROBED_FILES)):
                    found.append(entry.name)
            if len(found) == most:
                break
    return found
