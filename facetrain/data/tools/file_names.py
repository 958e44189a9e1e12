"""Names IDENTITY/FILE for the images of a dataset in a folder or shards; FILE in shards without identity names."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

from facetrain.data.dataset import FaceDataset
from facetrain.data.images.header import FORMAT_SUFFIXES, IMAGE_SUFFIXES, read_header
from facetrain.errors import ImageError

_FORBIDDEN = re.compile(r"[/\\\x00-\x1f]|^\s+|\s+$")
"""Characters of a name that would lead out of its folder, and those around it, which lists of paths ignore."""
_MOST_BYTES = 230
"""Bytes of a name in UTF-8. File systems allow 255; the rest is for a number and the suffix."""


class FileNames:
    """Names of the images of a dataset: the original ones, or numbers with leading zeros, no two of them equal."""

    def __init__(self, source: FaceDataset, identities: Sequence[int], *, in_shards: bool) -> None:
        """Take the dataset.

        Args:
            source: the dataset.
            identities: identity in the dataset of each label that is written.
            in_shards: whether the name up to its first dot is the key of an image. In a folder, the suffix names the
                format of the bytes, also if the original name has another.
        """
        self._source, self._in_shards = source, in_shards
        self._folders = _identity_folders(source, identities, in_shards=in_shards)
        self._digits = len(str(source.num_images - 1))
        self._taken = set[str]()
        # Numbers alone are different by themselves: a table of 17 million of them would fill the memory.
        self._is_named = any(source.name(number) is not None for number in range(source.num_images))

    def name(self, number: int, label: int, data: bytes) -> str:
        """Return the name of an image; it ends with a suffix by which readers know an image.

        Args:
            number: number of the image in the dataset.
            label: label that is written.
            data: the encoded image.

        Raises:
            ImageError: the name has no suffix of an image, and the format of the bytes is unknown.
        """
        original, digits = self._source.name(number), f"{number:0{self._digits}d}"
        stem = _name_inside((original or digits).rpartition("/")[2])
        suffix = Path(stem).suffix
        if suffix.lower() in IMAGE_SUFFIXES:
            stem = stem.removesuffix(suffix)
        else:
            suffix = ""
        if not suffix or not self._in_shards:
            suffix = self._format_suffix(number, data, suffix)
        if self._in_shards:
            stem = stem.replace(".", "_")
        folder, path = self._folders[label], _cut(stem)
        if folder:
            path = f"{folder}/{path}"
        if not self._is_named:
            return path + suffix
        if self._in_shards:  # the suffix is no part of a key
            return unique_name(path, "", digits, self._taken, ignore_case=False) + suffix
        return unique_name(path, suffix, digits, self._taken)

    def _format_suffix(self, number: int, data: bytes, original: str) -> str:
        """Return the suffix for the format of an image, spelled as in its name; the original one if it is unknown."""
        header = read_header(data)
        if header is not None:
            suffixes = FORMAT_SUFFIXES[header.format]
            return original if original.lower() in suffixes else suffixes[0]
        if original:
            return original
        # No reader would take a file without the suffix of an image for one.
        raise ImageError(
            f"{self._source.location(number)}: neither the name nor the bytes are those of an image; leave out "
            "such images with `facetrain data check DATASET --repair DIR`"
        )


def folders_are_reordered(source: FaceDataset, identities: Sequence[int]) -> bool:
    """Return whether a reader of the folders, which sorts them, numbers the identities in another order."""
    folders = _identity_folders(source, identities, in_shards=False)
    return folders != sorted(folders)


def _identity_folders(source: FaceDataset, identities: Sequence[int], *, in_shards: bool) -> list[str]:
    """Return a folder name for each identity: its name, or its number.

    In a folder of images, the numbers have leading zeros if all identities are numbers, so that the order of the names
    is the order of the labels. In shards, whose labels have files, numbers that are the labels are left out: a reader
    would take them for names, and person 5 of this dataset for person 5 of another.
    """
    names = [source.identity_name(identity) for identity in identities]
    if in_shards and not source.has_identity_names and names == [str(label) for label in range(len(names))]:
        return [""] * len(names)
    # One name alone that is equal to its number may be the real one: folders 0, 1, 10, 2 have the labels 0 to 3.
    is_numbered = all(name == str(identity) for name, identity in zip(names, identities, strict=True))
    digits = len(str(source.num_classes - 1)) if is_numbered and not in_shards else 0
    taken = set[str]()
    # In shards, names that differ only in case are different for every reader.
    return [
        unique_name(_cut(_name_inside(name)).zfill(digits), "", identity, taken, ignore_case=not in_shards)
        for name, identity in zip(names, identities, strict=True)
    ]


def _name_inside(name: str) -> str:
    """Return a name without outer white space and characters that lead out of its folder: it comes from anywhere."""
    name = _FORBIDDEN.sub(lambda match: "_" * len(match[0]), name)
    return f"_{name}" if not name or name.startswith(".") else name


def _cut(name: str) -> str:
    """Return the beginning of a name that is too long for a file system; equal ones then get numbers."""
    # A name of a file may have bytes that are no UTF-8, which are surrogates here.
    encoded = name.encode(errors="surrogatepass")
    return name if len(encoded) <= _MOST_BYTES else encoded[:_MOST_BYTES].decode(errors="ignore")


def unique_name(
    stem: str, suffix: str, number: int | str, taken: set[str], *, ignore_case: bool = True
) -> str:
    """Return STEM + SUFFIX, or STEM_NUMBER + SUFFIX if that is taken, and add it to the names that are taken.

    If both are taken, a second number follows the first one. Names that differ only in Unicode's form, NFC or NFD, are
    equal, as on some file systems.

    Args:
        stem: the name without its suffix.
        suffix: end of the name, which stays at its end; it may be empty.
        number: number of the image or identity.
        taken: names that were given before, as they are compared.
        ignore_case: whether names that differ only in case are equal, as on some file systems.
    """
    name, copy = stem + suffix, 1
    while (known := unicodedata.normalize("NFC", name.lower() if ignore_case else name)) in taken:
        name = f"{stem}_{number}{suffix}" if copy == 1 else f"{stem}_{number}_{copy}{suffix}"
        copy += 1
    taken.add(known)
    return name
