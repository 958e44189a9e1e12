"""WebDataset: tar shards of images.

The identity of `KEY.jpg` is in `KEY.cls` or `KEY.json` in the same shard, or it is the name of the image's folder: one
way for all images, because a lost label would make a new identity of a folder. A `.json` file of more than 1 MiB is no
label. A hard link counts as the file before it that it is a link to; `tar` writes them for files with several names.
Compressed shards are refused: gzip has no random access.
"""

from __future__ import annotations

import io
import re
import tarfile
from array import array
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import (
    CatalogDataset,
    Format,
    catalog_path,
    columns_of_rows,
    files_in,
)
from facetrain.data.formats.labels import names_of_folders, number_identities
from facetrain.data.formats.names import SUFFIXES
from facetrain.data.formats.shard_names import training_shards
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile, open_stream
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError
from facetrain.files import error_reason, parse_json
from facetrain.text import printable, shell_path

_LABEL_KEYS = ("label", "identity", "class", "cls")
_MAX_LABEL_BYTES = 1 << 20
_USUAL_NUMBER = re.compile(r"(0|[1-9]\d{0,8})(\.0*)?", re.ASCII)
"""Number without leading zeros: 7 and 007 may be two people."""
_END_BYTES = 2 * tarfile.RECORDSIZE
# What tarfile raises for damaged headers: MemoryError for a size of gigabytes; ValueError and OverflowError for numbers
# of a PAX header that are none, or too long.
_TAR_ERRORS = (tarfile.TarError, OSError, MemoryError, ValueError, OverflowError)
Extent = tuple[int, int]
"""Offset and size."""
Place = tuple[int, int, int, int]
"""Offset and size of the header, and of the image."""
Image = tuple[Place, str, int | str, bool]
"""Place, folder, identity, and whether a file has the identity."""


class TarDataset(CatalogDataset):
    """Images of tar shards. A name is the member's header: a long one is in further blocks before the last one."""

    def _decode_name(self, data: bytes) -> str:
        try:
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                member = archive.next()
        except _TAR_ERRORS as error:
            raise DataError(f"{self.path}: a member's name is damaged ({error_reason(error)})") from None
        return "" if member is None else _member_path(member.name)


def open_tar(path: Path) -> CatalogDataset:
    """Open a folder of .tar shards, or one such file. Of shards of several splits, those of train are the dataset.

    Raises:
        DataError: a shard is missing, compressed or damaged, two images of it have one key, or an image has no
            identity.
    """
    found = files_in(path, SUFFIXES["webdataset"]) if path.is_dir() else [path]
    shards, skipped = training_shards(found)
    for shard in shards:
        if not shard.name.lower().endswith(".tar"):
            raise DataError(
                f"{shard}: a compressed archive, whose images cannot be read one by one; decompress it: "
                f"gunzip {shell_path(shard)}"
            )
    # Of all shards: the catalog lists those of other splits as well.
    columns = cached_columns(catalog_path(path), found, partial(_build_catalog, shards, skipped))
    return TarDataset(path, shards, columns)


FORMAT = Format("WebDataset", open_tar, parts=("*.tar", "*.tar.gz", "*.tgz"))


def _build_catalog(shards: list[Path], skipped: list[SkippedFile]) -> Columns:
    """Return the catalog: labels are the identities if all are whole numbers, otherwise their rank in sorted order."""
    # Arrays and not tuples, which would take 600 bytes per image.
    places, identity_number, folder_number = array("q"), array("i"), array("i")
    number_of: dict[int | str, int] = {}
    number_of_folder: dict[str, int] = {}
    unlabeled = array("q")
    for shard, path in enumerate(shards):
        for place, folder, identity, is_labeled in _images(path, skipped):
            if not is_labeled:
                unlabeled.append(len(identity_number))
            places.extend((shard, *place))
            identity_number.append(number_of.setdefault(identity, len(number_of)))
            folder_number.append(number_of_folder.setdefault(folder, len(number_of_folder)))
    rows = np.array(places, np.int64).reshape(-1, 5)
    if 0 < len(unlabeled) < len(rows):
        shard, _, _, offset, _ = rows[unlabeled[0]].tolist()
        raise DataError(
            f"{shards[shard]}: {len(unlabeled):,} of {len(rows):,} images of the dataset have no .cls or .json file "
            f"(up to {_MAX_LABEL_BYTES:,} bytes), such as the image at byte {offset:,}, and the others have one; copy "
            "the shard again, or add the files"
        )
    if len(unlabeled):
        _require_folders_of_identities(number_of_folder, shards[0].parent)
    label_of, identities = number_identities(list(number_of), shards[0].parent)
    label = label_of[np.array(identity_number, np.int32)]
    if not identities:
        folders = list(map(_name, number_of_folder))
        identities = names_of_folders(map(int, label), (folders[number] for number in folder_number))
    columns = columns_of_rows("file name_offset name_size offset size", rows)
    return Columns.of(**columns, label=label, identities=identities, skipped=skipped)


def _require_folders_of_identities(folders: Collection[str], place: Path) -> None:
    """Check that the paths of the folders with images can be those of one identity each.

    Raises:
        DataError: two of them have one name, such as ann/thumbs and bob/thumbs, or one is inside another.
    """
    folder_of: dict[str, str] = {}
    for folder in folders:
        outer = map(str, PurePosixPath(folder).parents)
        other = next(filter(folders.__contains__, outer), None) or folder_of.setdefault(_name(folder), folder)
        if other != folder:
            raise DataError(
                f"{place}: {printable(other)} and {printable(folder)} both have images, and it is not clear whether of "
                "one person: an image without a .cls or .json file has the name of its folder as its identity; leave "
                "out one of the folders, rename it, or move its images"
            )


def _name(folder: str) -> str:
    return folder.rpartition("/")[2]


def _images(path: Path, skipped: list[SkippedFile]) -> Iterator[Image]:
    """Yield the images of a shard; add other members to `skipped`.

    The identity is a number if .cls or .json has one, otherwise a name. If both files exist, .cls counts.
    """

    def skip(name: str, kind: str, reason: str) -> None:
        skipped.append(SkippedFile(f"{path.name}/{printable(name)}", kind, reason))

    images, labels, others = _read_members(path, skip)
    for key, name in others:
        if key not in images:  # other files of an image, such as masks, are ignored
            skip(
                name, "suffix", "no image: its suffix begins at the first dot, where the key of an image ends"
            )
    for key, suffix in labels:
        # A .json without an image may describe the archive.
        if suffix == ".cls" and key not in images:
            skip(key.lstrip("/") + suffix, "suffix", "a label, and no image has its key")
    for key, (_, place) in images.items():
        folder = key.rpartition("/")[0]
        identity: int | str = _name(folder)
        suffix = next((suffix for suffix in (".cls", ".json") if (key, suffix) in labels), "")
        if suffix:
            identity = _identity(
                labels[key, suffix], suffix, f"{path}: {printable(key.lstrip('/') + suffix)}"
            )
        elif not identity:
            raise DataError(
                f"{path}: image {printable(key[1:])} has neither a .cls or .json file (up to "
                f"{_MAX_LABEL_BYTES:,} bytes) nor a folder that names its identity"
            )
        yield place, folder, identity, bool(suffix)


def _read_members(
    path: Path, skip: Callable[[str, str, str], None]
) -> tuple[dict[str, tuple[str, Place]], dict[tuple[str, str], bytes], list[tuple[str, str]]]:
    """Return the images of a shard, its labels and its other files; call `skip` for members that cannot be one.

    They are the name and the place of each image by its key, the content of each file with a label by key and suffix,
    and key and name of each other file.
    """
    images: dict[str, tuple[str, Place]] = {}
    labels: dict[tuple[str, str], bytes] = {}
    others: list[tuple[str, str]] = []
    try:
        with open_stream(path) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            # tarfile takes a damaged header for the end of the archive: `_require_end` finds it.
            for name, header, content in _files(archive):
                folder, _, file = name.rpartition("/")
                stem, _, kind = file.partition(".")
                key, suffix = f"{folder}/{stem}", "." + kind.lower()
                if content is None:
                    skip(name, "special", "a link to no file before it, a sparse file or a device")
                elif any(part.startswith(".") and part != ".." for part in name.split("/")):
                    skip(name, "hidden", "a name begins with a dot")
                elif suffix in IMAGE_SUFFIXES:
                    if key in images:
                        raise DataError(
                            f"{path}: {printable(images[key][0])} and {printable(name)} are two images with one key, "
                            "the name up to its first dot; give them different keys, or remove one of them"
                        )
                    images[key] = name, (*header, *content)
                elif suffix == ".cls" or (suffix == ".json" and content[1] <= _MAX_LABEL_BYTES):
                    stream.seek(content[0])
                    labels[key, suffix] = stream.read(min(content[1], _MAX_LABEL_BYTES + 1))
                elif suffix != ".json":
                    others.append((key, name))
            _require_end(path, archive.offset)
    except _TAR_ERRORS as error:
        raise DataError(
            f"{path}: not a tar archive ({error_reason(error)}); copy it again, or decompress it"
        ) from error
    return images, labels, others


def _require_end(path: Path, offset: int) -> None:
    """Check that an archive whose members end at a byte offset has zeros from there on, as many as tar writes.

    POSIX ends an archive with two blocks of zeros, and tar fills its last record with them. Without this check, an
    archive that was cut between two members, has a damaged header, or is the unfinished copy in a file of the final
    size would lose its remaining images in silence.

    Raises:
        DataError: other bytes follow, or none, or more zeros.
    """
    file = PositionalFile(path)
    # The zeros that tar writes, and what follows them.
    if file.size - offset < tarfile.BLOCKSIZE or file.bytes_at(offset, _END_BYTES).strip(b"\0"):
        raise DataError(
            f"{path}: no member begins at byte {offset:,}, and the archive does not end there with zeros: it is "
            "truncated, damaged, or several archives were joined; copy it again, or join them by `tar --concatenate`"
        )
    # Of 512 bytes or 1 KiB, or up to the next multiple of 10 KiB. Zeros over the last images of up to 10 KiB together
    # leave what tar writes without these images: nothing in the archive tells them apart.
    least = offset + 2 * tarfile.BLOCKSIZE
    if file.size > least and file.size != least + -least % tarfile.RECORDSIZE:
        raise DataError(
            f"{path}: has more zeros at byte {offset:,} than the end of an archive: a copy or download was not "
            "finished; copy it again, or write it anew by tar if it is complete"
        )


def _files(archive: tarfile.TarFile) -> Iterator[tuple[str, Extent, Extent | None]]:
    """Yield path, header and content of the members that are no folders: of a hard link, the content of its file.

    The content is None if it cannot be read in place.
    """
    content_of: dict[str, Extent] = {}
    for member in iter(archive.next, None):
        # tarfile keeps them all: kilobytes per image of an archive of millions.
        archive.members.clear()  # type: ignore[attr-defined]
        name, content = _member_path(member.name), None
        if member.islnk():
            content = content_of.get(_member_path(member.linkname))
        elif member.isreg() and not member.issparse():
            content = member.offset_data, member.size
        if content is not None:
            content_of[name] = content
        if not member.isdir():
            yield name, (member.offset, member.offset_data - member.offset), content


def _member_path(name: str) -> str:
    """Return the path of a member of an archive without the parts that name the same folder, as in ./ann/1.jpg."""
    if "./" not in name and "//" not in name and not name.startswith("/"):
        return name
    *folders, file = name.split("/")
    return "/".join([*(part for part in folders if part not in ("", ".")), file])


def _identity(content: bytes, suffix: str, location: str) -> int | str:
    try:
        if len(content) > _MAX_LABEL_BYTES:
            raise ValueError("too long")
        text = content.decode("utf-8").strip()
        value = _label_of_json(parse_json(text)) if suffix == ".json" else text
        if not value:
            raise ValueError("an empty text")
    except ValueError as error:
        raise DataError(
            f"{location}: contains no identity of up to {_MAX_LABEL_BYTES:,} bytes (keys: {', '.join(_LABEL_KEYS)})"
        ) from error
    number = _USUAL_NUMBER.fullmatch(value)
    return int(number[1]) if number else value


def _label_of_json(fields: Any) -> str:
    """Return the first label of a .json file that is not null."""
    values = map(fields.get, _LABEL_KEYS) if isinstance(fields, dict) else iter(())
    label = next((value for value in values if value is not None), None)
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ValueError(f"{label!r} is not a label")
    return str(label).strip()
