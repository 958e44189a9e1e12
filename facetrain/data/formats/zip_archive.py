"""Zip archives of images, read in place.

The identity of an image is the folder that it is in. A member labels.csv (or .txt, .tsv, .lst) with the lines of a list
file, relative to its folder, takes precedence: it then gives the images, their order and their identities.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import (
    CatalogDataset,
    Format,
    catalog_path,
    columns_of_rows,
    member_path,
    name_columns,
)
from facetrain.data.formats.image_list import LIST_SUFFIXES, label_identities, list_entries
from facetrain.data.formats.labels import names_of_folders
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile, open_stream
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, printable

LABELS_STEM = "labels"
_MAX_IMAGE_BYTES = 128 << 20
"""Encoded bytes of an image; an uncompressed one of `MAX_PIXELS` has 115 MiB."""
_LOCAL_HEADER_BYTES = 30
"""Bytes before the name in a local header. Its last numbers are the sizes of the name and of the extra fields
(PKWARE, APPNOTE.TXT 6.3.10, 4.3.7)."""
_MAX_END_BYTES, _LOCATOR_BYTES, _END64_BYTES = 22 + (1 << 16), 20, 56
_SPARE_HEADER_BYTES = 512
"""Bytes to read for the name and the extra fields of a local header, whose size only the header has."""
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    OSError,
    ValueError,
    NotImplementedError,
    EOFError,
    struct.error,
    zlib.error,
)
"""What zipfile raises for damaged archives. ValueError: a name that is not UTF-8, or a negative offset."""


class ZipDataset(CatalogDataset):
    """Images of a zip archive; `offset` is the local header before an image, `size` its bytes in the archive.

    A deflated image is decompressed whole, unlike a member of a compressed tar: most programs deflate, and
    few lines read it. Further columns: `full_size` after decompression, `method`, `crc`.
    """

    stored_as = "member"

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the member is damaged.
        """
        arrays = self.columns.arrays
        full_size, packed = arrays["full_size"].item(index), arrays["size"].item(index)
        data = _member_bytes(self.file_of(index), arrays["offset"].item(index), packed)
        if arrays["method"].item(index) == zipfile.ZIP_DEFLATED:
            try:
                data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, full_size + 1)
            except zlib.error:
                data = b""
        if len(data) != full_size or zlib.crc32(data) != arrays["crc"].item(index):
            raise UnreadableError(
                f"{self.location(index)}: the member is damaged or truncated; download the archive again"
            )
        return data


def open_zip(path: Path) -> CatalogDataset:
    """Open a zip archive with stored or deflated members.

    Raises:
        DataError: the archive is damaged or encrypted, or an image has no identity.
    """
    columns = cached_columns(catalog_path(path), [path], partial(_build_catalog, path))
    return ZipDataset(path, [path], columns)


FORMAT = Format("zip archive", open_zip, suffixes=(".zip",))


def _member_bytes(file: PositionalFile, offset: int, packed: int) -> bytes:
    """Return the stored bytes of the member with a local header at an offset; fewer if they are not all there."""
    data = file.bytes_at(offset, _LOCAL_HEADER_BYTES + _SPARE_HEADER_BYTES + packed)
    if len(data) < _LOCAL_HEADER_BYTES or data[:4] != b"PK\x03\x04":
        return b""
    start = _LOCAL_HEADER_BYTES + sum(struct.unpack_from("<2H", data, _LOCAL_HEADER_BYTES - 4))
    if start > _LOCAL_HEADER_BYTES + _SPARE_HEADER_BYTES:
        data = file.bytes_at(offset, start + packed)
    return data[start : start + packed]


def _build_catalog(path: Path) -> Columns:
    images: dict[str, zipfile.ZipInfo] = {}
    lists: dict[str, zipfile.ZipInfo] = {}
    skipped: list[tuple[str, str, str]] = []
    listed: list[tuple[str, str]] = []
    try:
        with open_stream(path) as stream, zipfile.ZipFile(stream) as archive:
            for member in archive.infolist():
                name = member_path(member.filename.replace("\\", "/"))
                stem, suffix = os.path.splitext(name.rpartition("/")[2])
                if any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
                    skipped.append((printable(name), "hidden", "hidden, or added by macOS"))
                elif name in images:
                    raise DataError(f"{path}: has two members {printable(name)}; remove one of them")
                elif suffix.lower() in IMAGE_SUFFIXES:
                    images[name] = _checked(member, path)
                elif stem == LABELS_STEM and suffix.lower() in LIST_SUFFIXES:
                    lists[name] = _checked(member, path)
                elif not name.endswith("/"):
                    skipped.append((printable(name), "suffix", "not a format that OpenCV reads"))
            _require_all_members(archive, path)
            if len(lists) > 1:
                raise DataError(
                    f"{path}: has several lists of labels: {', '.join(map(printable, lists))}; keep one"
                )
            for name, member in lists.items():
                folder = f"{name.rpartition('/')[0]}/".lstrip("/")
                entries = list_entries(io.BytesIO(archive.read(member)), f"{path}: {printable(name)}")
                listed = [(member_path(folder + image), identity) for _, image, identity in entries]
    except _ZIP_ERRORS as error:
        raise DataError(
            f"{path}: a damaged zip archive ({error_reason(error)}); download it again"
        ) from error
    if lists:
        names, label = _listed(listed, images, f"{path}: {printable(next(iter(lists)))}")
        reason = "the list does not name the file"
    else:
        names, label = _in_folders(images)
        reason = "the file is not in the folder of an identity"
    left = set(names)
    skipped += ((printable(name), "no_identity", reason) for name in images if name not in left)
    # The folders that all identities are in belong to no name.
    parents = [name.rpartition("/")[0].rpartition("/")[0] for name in names]
    prefix = f"{os.path.commonpath(parents)}/" if any(parents) else ""
    columns = columns_of_rows(
        "offset size full_size method crc",
        [
            (one.header_offset, one.compress_size, one.file_size, one.compress_type, one.CRC)
            for one in map(images.__getitem__, names)
        ],
    )
    names = [name.removeprefix(prefix.lstrip("/")) for name in names]
    identities = names_of_folders(label.tolist(), (name.rpartition("/")[0] for name in names))
    return Columns.of(**columns, **name_columns(names), label=label, identities=identities, skipped=skipped)


def _require_all_members(archive: zipfile.ZipFile, path: Path) -> None:
    """Check the number of members: zipfile stops at an entry that claims too many bytes (4.3.14 to 4.3.16).

    Raises:
        zipfile.BadZipFile: the end of the archive has another number.
    """
    file = PositionalFile(path)
    start = max(file.size - _MAX_END_BYTES, 0)
    end = start + file.bytes_at(start, _MAX_END_BYTES).rfind(b"PK\x05\x06")
    (count,) = struct.unpack("<H", file.bytes_at(end + 10, 2))
    if (
        file.bytes_at(max(end - _LOCATOR_BYTES, 0), 4) == b"PK\x06\x07"
    ):  # zip64: its end record is before the locator
        (count,) = struct.unpack("<Q", file.bytes_at(end - _LOCATOR_BYTES - _END64_BYTES + 32, 8))
    # Some programs write the number modulo 2^16.
    if (count - len(archive.infolist())) % (1 << 16):
        raise zipfile.BadZipFile(f"{len(archive.infolist()):,} members of {count:,}")


def _checked(member: zipfile.ZipInfo, path: Path) -> zipfile.ZipInfo:
    """Return a member that can be read."""
    place = f"{path}: {printable(member.filename)}"
    if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(
            f"{place}: encrypted, or compressed by the unknown method {member.compress_type}; unpack the archive and "
            "write it by `zip -0`"
        )
    if member.file_size > _MAX_IMAGE_BYTES:  # before they are allocated
        raise DataError(f"{place}: claims {member.file_size:,} bytes; the limit is {_MAX_IMAGE_BYTES:,}")
    return member


def _in_folders(images: dict[str, zipfile.ZipInfo]) -> tuple[list[str], np.ndarray]:
    """Return the images in the order of an image folder, by sorted folders and then files, and their labels."""
    names = sorted((name for name in images if "/" in name), key=lambda name: name.rpartition("/")[::2])
    number_of: dict[str, int] = {}
    label = [number_of.setdefault(name.rpartition("/")[0], len(number_of)) for name in names]
    return names, np.array(label, np.int32)


def _listed(
    entries: Sequence[tuple[str, str]], images: dict[str, zipfile.ZipInfo], place: str
) -> tuple[list[str], np.ndarray]:
    """Return the images of a list in its order, and their labels."""
    if missing := next((name for name, _ in entries if name not in images), None):
        raise DataError(f"{place}: the archive has no image {printable(missing)}")
    return [name for name, _ in entries], label_identities([identity for _, identity in entries], place)[0]
