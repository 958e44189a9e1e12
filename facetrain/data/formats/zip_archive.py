"""Zip archives of images, read in place.

The identity of an image is the folder that it is in. A member labels.csv (or .txt, .tsv, .lst) with the lines of a list
file, relative to its folder, takes precedence: it then gives the images, their order and their identities.
"""

from __future__ import annotations

import io
import json
import os
import zlib
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats.image_list import LIST_SUFFIXES, list_entries, number_identities
from facetrain.data.formats.labels import names_of_folders
from facetrain.data.formats.member_path import member_path
from facetrain.data.formats.zip_directory import (
    DEFLATED,
    LOCAL_HEADER,
    STORED,
    Member,
    read_directory,
    read_name,
)
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import printable

LABELS_STEM = "labels"
_MAX_IMAGE_BYTES = 128 << 20
"""Encoded bytes of an image; an uncompressed one of `MAX_PIXELS` has 115 MiB."""
_MAX_DEFLATE_RATIO = 1032
"""Bytes that one byte of a deflate stream can encode (zlib's technical notes)."""
_MAX_LIST_RATIO, _SPARE_LIST_BYTES = 50, 1 << 16
"""Bytes of text per byte in the archive, and some more: lists of paths compress well, but not a thousand times."""
_SPARE_HEADER_BYTES = 512
"""Bytes to read for the name and the extra fields of a local header, whose size only the header has."""


class ZipDataset:
    """Images of a zip archive with stored or deflated members.

    Raises:
        DataError: the archive is damaged, encrypted or a bomb, or an image has no identity.
    """

    def __init__(self, path: Path) -> None:
        self._file = PositionalFile(path)
        name = path.with_name(f".{path.name}.catalog")
        self._columns = cached_columns(name, [path], partial(_build_catalog, self._file))
        columns = self._columns.arrays
        self._offset, self._packed, self._size = columns["offset"], columns["packed"], columns["size"]
        self._method, self._crc, self._entry = columns["method"], columns["crc"], columns["entry"]
        self.labels = columns["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path."""
        return ZipDataset, (self._file.path,)

    @property
    def skipped(self) -> list[SkippedFile]:
        """Members that are not images of an identity, and the reasons."""
        return [SkippedFile(*one) for one in json.loads(self._columns.arrays["skipped"].tobytes())]

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the member is damaged.
        """
        packed, size = self._packed.item(index), self._size.item(index)
        data = _member_bytes(self._file, self._offset.item(index), packed)
        if data is not None and self._method.item(index) == DEFLATED:
            data = _inflate(data, size)
        if data is None or len(data) != size or zlib.crc32(data) != self._crc.item(index):
            raise UnreadableError(
                f"{self.location(index)}: the member is damaged or truncated; download the archive again"
            )
        return data

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the part of the archive that holds these images."""
        offset = self._offset[first : first + count]
        last = int(offset.argmax())
        size = int(offset[last] - offset.min()) + self._packed.item(first + last) + _SPARE_HEADER_BYTES
        self._file.prefetch_bytes(int(offset.min()), size)

    def name(self, index: int) -> str:
        """Return the path of an image inside the archive, without the folders that all identities are in."""
        return printable(self._member_name(index)[self._columns.facts["prefix"] :])

    def identity_name(self, label: int) -> str:
        """Return the folder of an identity that has one of its own; otherwise its number."""
        return self._identities[label] if label < len(self._identities) else str(label)

    def location(self, index: int) -> str:
        """Return the archive and the path inside it."""
        return f"{self._file.path}: {printable(self._member_name(index))}"

    def _member_name(self, index: int) -> str:
        return _path_of(read_name(self._file, self._entry.item(index)))

    @cached_property
    def _identities(self) -> list[str]:
        return [printable(name) for name in json.loads(self._columns.arrays["identities"].tobytes())]


def _path_of(name: str) -> str:
    return member_path(name.replace("\\", "/"))


def _member_bytes(file: PositionalFile, offset: int, packed: int) -> bytes | None:
    """Return the stored bytes of a member; None if they are not all there."""
    data = file.bytes_at(offset, LOCAL_HEADER.size + _SPARE_HEADER_BYTES + packed)
    if len(data) < LOCAL_HEADER.size or data[:4] != b"PK\x03\x04":
        return None
    *_, name_size, extra_size = LOCAL_HEADER.unpack_from(data)
    start = LOCAL_HEADER.size + name_size + extra_size
    if start > LOCAL_HEADER.size + _SPARE_HEADER_BYTES:
        data = file.bytes_at(offset, start + packed)
    return data[start : start + packed] if len(data) >= start + packed else None


def _inflate(data: bytes, size: int) -> bytes | None:
    """Return a deflate stream decompressed, at most one byte more than `size`; None if it is damaged."""
    try:
        return zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error:
        return None


def _build_catalog(file: PositionalFile) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the columns of the images, and the length of the path that all identities have in common."""
    images: list[Member] = []
    lists: list[Member] = []
    skipped: list[tuple[str, str, str]] = []
    for member in read_directory(file):
        name = _path_of(member.name)
        parts, (stem, suffix) = name.split("/"), os.path.splitext(name.rpartition("/")[2])
        if name.endswith("/"):
            continue
        if any(part.startswith(".") or part == "__MACOSX" for part in parts):
            skipped.append((printable(name), "hidden", "a name begins with a dot, or macOS added the file"))
        elif suffix.lower() in IMAGE_SUFFIXES:
            images.append(_checked(member._replace(name=name), file))
        elif stem == LABELS_STEM and suffix.lower() in LIST_SUFFIXES:
            lists.append(_checked(member._replace(name=name), file, _MAX_LIST_RATIO))
        else:
            skipped.append(
                (
                    printable(name),
                    "suffix",
                    f"{printable(suffix) or 'no suffix'}: not a format that OpenCV reads",
                )
            )
    if len(lists) > 1:
        raise DataError(
            f"{file.path}: has several lists of labels: {lists[0].name}, {lists[1].name}; keep one"
        )
    if lists:
        images, label = _listed(file, lists[0], images, skipped)
    else:
        images, label = _in_folders(images, skipped)
    if not images:
        raise DataError(
            f"{file.path}: the archive contains no images in one folder per identity, and no list named "
            f"{LABELS_STEM}.csv"
        )
    common = _common_folders([image.name.split("/")[:-2] for image in images])
    cut = len("/".join([*common, ""]))
    columns = {
        name: np.array([getattr(image, name) for image in images], dtype)
        for name, dtype in (
            ("offset", np.int64), ("packed", np.int64), ("size", np.int64),
            ("method", np.uint8), ("crc", np.uint32), ("entry", np.int64),
        )
    }  # fmt: skip
    columns["label"] = label
    folders = (image.name.rpartition("/")[0][cut:] for image in images)
    names = names_of_folders(label.tolist(), folders)
    columns["identities"] = np.frombuffer(json.dumps(names).encode(), np.uint8)
    columns["skipped"] = np.frombuffer(json.dumps(skipped).encode(), np.uint8)
    return columns, {"prefix": cut}


def _common_folders(paths: list[list[str]]) -> list[str]:
    """Return the folders that all paths begin with."""
    # Every path is between these two in sorted order.
    pairs = zip(min(paths, default=[]), max(paths, default=[]), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _checked(member: Member, file: PositionalFile, max_ratio: int = _MAX_DEFLATE_RATIO) -> Member:
    """Return a member that can be read; its declared size bounds the memory that reading it needs."""
    place = f"{file.path}: {printable(member.name)}"
    if member.encrypted:
        raise DataError(f"{place}: the member is encrypted; unpack the archive with its password")
    if member.method not in (STORED, DEFLATED):
        raise DataError(
            f"{place}: compression method {member.method} is not supported; write the archive with `zip -0`"
        )
    if member.offset + member.packed > file.size:
        raise DataError(f"{place}: the member is past the end of the archive; download it again")
    if member.size > min(_MAX_IMAGE_BYTES, member.packed * max_ratio + _SPARE_LIST_BYTES):
        raise DataError(
            f"{place}: claims {member.size:,} bytes from {member.packed:,}; the limit is {_MAX_IMAGE_BYTES:,}, and "
            f"{max_ratio:,} times its bytes in the archive"
        )
    return member


def _in_folders(
    images: Sequence[Member], skipped: list[tuple[str, str, str]]
) -> tuple[list[Member], np.ndarray]:
    """Return the images in the order of an image folder, by sorted folders and then files, and their labels."""
    found = sorted(
        (image for image in images if "/" in image.name), key=lambda image: image.name.rpartition("/")[::2]
    )
    skipped += (
        (printable(image.name), "no_identity", "the file is not in the folder of an identity")
        for image in images
        if "/" not in image.name
    )
    number_of: dict[str, int] = {}
    label = [number_of.setdefault(image.name.rpartition("/")[0], len(number_of)) for image in found]
    return found, np.array(label, np.int32)


def _listed(
    file: PositionalFile, listed: Member, images: Sequence[Member], skipped: list[tuple[str, str, str]]
) -> tuple[list[Member], np.ndarray]:
    """Return the images of a list in its order, and their labels."""
    place = f"{file.path}: {listed.name}"
    data = _member_bytes(file, listed.offset, listed.packed)
    data = _inflate(data, listed.size) if data is not None and listed.method == DEFLATED else data
    if data is None or zlib.crc32(data) != listed.crc:
        raise DataError(f"{place}: the list is damaged; download the archive again")
    folder, by_name = listed.name.rpartition("/")[0], {image.name: image for image in images}
    found, identities = [], []
    for _, path, identity in list_entries(io.BytesIO(data), place):
        name = member_path(f"{folder}/{path}" if folder else path)
        if name not in by_name:
            raise DataError(f"{place}: the archive has no image {printable(name)}")
        found.append(by_name[name])
        identities.append(identity)
    used = {image.name for image in found}
    skipped += (
        (printable(n), "no_identity", "the list does not name the file") for n in by_name if n not in used
    )
    distinct, number = np.unique(np.array(identities, dtype=np.str_), return_inverse=True)
    return found, number_identities(distinct.tolist(), place)[number]
