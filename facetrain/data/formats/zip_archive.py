"""Zip archives of images, read in place.

The identity of an image is the folder that it is in. A member labels.csv (or .txt, .tsv, .lst) with the lines of a list
file, relative to its folder, takes precedence: it then gives the images, their order and their identities.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.image_list import LIST_SUFFIXES, list_entries, number_identities
from facetrain.data.formats.labels import names_of_folders
from facetrain.data.formats.member_path import member_path
from facetrain.data.formats.zip_directory import (
    DEFLATED,
    ENTRY_BYTES,
    LOCAL_HEADER,
    STORED,
    Member,
    name_in_entry,
    read_directory,
)
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import printable

LABELS_STEM = "labels"
_MAX_IMAGE_BYTES = 128 << 20
"""Encoded bytes of an image; an uncompressed one of `MAX_PIXELS` has 115 MiB."""
_SPARE_HEADER_BYTES = 512
"""Bytes to read for the name and the extra fields of a local header, whose size only the header has."""


class ZipDataset(CatalogDataset):
    """Images of a zip archive; `offset` is the local header before an image, `size` its bytes in the archive.

    A deflated image is decompressed whole, unlike a member of a compressed tar: most programs deflate, and
    ten lines read it. Further columns: `full_size` after decompression, `method`, `crc`; `prefix`, the length of the
    path that all names begin with. A name is the member's entry in the directory of the archive.
    """

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the member is damaged.
        """
        arrays = self.columns.arrays
        full_size = arrays["full_size"].item(index)
        data = _member_bytes(self.file_of(index), arrays["offset"].item(index), arrays["size"].item(index))
        if data is not None and arrays["method"].item(index) == DEFLATED:
            data = _inflate(data, full_size)
        if data is None or len(data) != full_size or zlib.crc32(data) != arrays["crc"].item(index):
            raise UnreadableError(
                f"{self.location(index)}: the member is damaged or truncated; download the archive again"
            )
        return data

    def name(self, index: int) -> str:
        """Return the path of an image inside the archive, without the folders that all identities are in."""
        return printable(self._decode_name(self._name_bytes(index))[self.columns.value("prefix") :])

    def location(self, index: int) -> str:
        """Return the archive and the path inside it."""
        return f"{self.path}: {printable(self._decode_name(self._name_bytes(index)))}"

    def _decode_name(self, data: bytes) -> str:
        return _path_of(name_in_entry(data))


def open_zip(path: Path) -> CatalogDataset:
    """Open a zip archive with stored or deflated members.

    Raises:
        DataError: the archive is damaged or encrypted, or an image has no identity.
    """
    columns = cached_columns(catalog_path(path), [path], partial(_build_catalog, path))
    return ZipDataset(path, [path], columns)


FORMAT = Format("zip archive", open_zip, suffixes=(".zip",))


def _path_of(name: str) -> str:
    return member_path(name.replace("\\", "/"))


def _member_bytes(file: PositionalFile, offset: int, packed: int) -> bytes | None:
    """Return the stored bytes of the member with a local header at an offset; None if they are not all there."""
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


def _build_catalog(path: Path) -> Columns:
    file, images, lists = PositionalFile(path), list[Member](), list[Member]()
    skipped: list[tuple[str, str, str]] = []
    for member in read_directory(file):
        name = _path_of(member.name)
        stem, suffix = os.path.splitext(name.rpartition("/")[2])
        if name.endswith("/"):
            continue
        if any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
            skipped.append((printable(name), "hidden", "a name begins with a dot, or macOS added the file"))
        elif suffix.lower() in IMAGE_SUFFIXES:
            images.append(_checked(member._replace(name=name), file))
        elif stem == LABELS_STEM and suffix.lower() in LIST_SUFFIXES:
            lists.append(_checked(member._replace(name=name), file))
        else:
            reason = f"{printable(suffix) or 'no suffix'}: not a format that OpenCV reads"
            skipped.append((printable(name), "suffix", reason))
    if len(lists) > 1:
        raise DataError(f"{path}: has several lists of labels: {lists[0].name}, {lists[1].name}; keep one")
    if lists:
        images, label = _listed(file, lists[0], images, skipped)
    else:
        images, label = _in_folders(images, skipped)
    if not images:
        raise DataError(
            f"{path}: the archive contains no images in one folder per identity, and no list named {LABELS_STEM}.csv"
        )
    prefix = len("/".join([*_common_folders([image.name.split("/")[:-2] for image in images]), ""]))
    columns = columns_of_rows(
        "offset size full_size method crc name_offset name_size",
        [
            (one.offset, one.packed, one.size, one.method, one.crc, one.entry, ENTRY_BYTES + one.name_size)
            for one in images
        ],
    )
    folders = (image.name.rpartition("/")[0][prefix:] for image in images)
    identities = names_of_folders(label.tolist(), folders)
    return Columns.of(**columns, label=label, identities=identities, skipped=skipped, prefix=prefix)


def _common_folders(paths: list[list[str]]) -> list[str]:
    """Return the folders that all paths begin with."""
    # Every path is between these two in sorted order.
    pairs = zip(min(paths, default=[]), max(paths, default=[]), strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _checked(member: Member, file: PositionalFile) -> Member:
    """Return a member that can be read."""
    place = f"{file.path}: {printable(member.name)}"
    if member.encrypted:
        raise DataError(f"{place}: the member is encrypted; unpack the archive with its password")
    if member.method not in (STORED, DEFLATED):
        raise DataError(
            f"{place}: compression method {member.method} is not supported; write the archive with `zip -0`"
        )
    if member.offset + member.packed > file.size:
        raise DataError(f"{place}: the member is past the end of the archive; download it again")
    if member.size > _MAX_IMAGE_BYTES:  # before `_inflate` allocates them
        raise DataError(f"{place}: claims {member.size:,} bytes; the limit is {_MAX_IMAGE_BYTES:,}")
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
    return found, number_identities(distinct.tolist(), place)[0][number]
