"""WebDataset: tar shards of images.

The identity of `KEY.jpg` is in `KEY.cls` or `KEY.json` in the same shard, or it is the name of the image's folder. A
`.json` file of more than 1 MiB is no label. A hard link counts as the file before it that it is a link to; `tar` writes
them for files with several names. Shards compressed with gzip are decompressed once.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats.gzip_shards import GZIP_SUFFIXES, decompressed
from facetrain.data.formats.labels import label_of_each, names_of_folders
from facetrain.data.formats.member_path import member_path
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, parse_json, printable, shell_path

_LABEL_KEYS = ("label", "identity", "class", "cls")
_MAX_LABEL_FILE_BYTES = 1 << 20
_MAX_OPEN_SHARDS = 256
_CHUNK_BYTES = 1 << 20
# What tarfile raises for damaged headers: MemoryError for a size of gigabytes; ValueError and OverflowError for numbers
# of a PAX header that are none, or too long.
_TAR_ERRORS = (tarfile.TarError, OSError, MemoryError, ValueError, OverflowError)


class TarDataset:
    """Images of a folder of .tar and .tar.gz shards, or of one such file; their offsets are cached in a catalog.

    Raises:
        DataError: if a shard is damaged, two images of it have one key, or an image has no identity.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        is_folder = path.is_dir()
        found = shards_in(path) if is_folder else [path]
        require_all_shards(found if is_folder else [])
        self._shards = [decompressed(one) if is_compressed(one) else one for one in found]
        name = path / ".shards.catalog" if is_folder else path.with_name(f".{path.name}.catalog")
        columns = cached_columns(name, self._shards, lambda: (_build_catalog(self._shards), {}))
        self._columns = columns.arrays
        self._header, self._header_bytes = columns.arrays["header"], columns.arrays["header_bytes"]
        self._shard, self._offset = columns.arrays["shard"], columns.arrays["offset"]
        self._size, self.labels = columns.arrays["size"], columns.arrays["label"]
        self.num_images = len(self.labels)
        if not self.num_images:
            left_out = self.skipped[:1]
            raise DataError(
                f"{path}: the {len(self._shards):,} .tar shards contain no images"
                + "".join(f"; {one.name} is left out: {one.reason}" for one in left_out)
            )
        self.num_classes = int(self.labels.max()) + 1
        self._open = lru_cache(maxsize=_MAX_OPEN_SHARDS)(PositionalFile)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path."""
        return TarDataset, (self._path,)

    @property
    def skipped(self) -> list[SkippedFile]:
        """Members that are not images or labels, and the reasons."""
        return [SkippedFile(*one) for one in json.loads(self._columns["skipped"].tobytes())]

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the shard is truncated.
        """
        size = int(self._size[index])
        data = self._open(self._shards[self._shard[index]]).bytes_at(int(self._offset[index]), size)
        if len(data) < size:
            raise UnreadableError(f"{self.location(index)}: the shard is truncated; download it again")
        return data

    def name(self, index: int) -> str:
        """Return the path of an image inside its shard."""
        header, size = self._header.item(index), self._header_bytes.item(index)
        data = self._open(self._shards[self._shard[index]]).bytes_at(header, size)
        try:
            # The whole header: a long name is in blocks of its own before the last one.
            with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
                member = archive.next()
        except _TAR_ERRORS as error:
            raise DataError(f"{self.location(index)}: the name is damaged ({error_reason(error)})") from None
        return str(index) if member is None else printable(member_path(member.name))

    def identity_name(self, label: int) -> str:
        """Return the text of the identity, or its folder if it has one of its own; otherwise its number."""
        return self._identities[label] if label < len(self._identities) else str(label)

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the images, one range per shard."""
        shard = self._shard[first : first + count]
        for number in np.unique(shard).tolist():
            rows = first + np.flatnonzero(shard == number)
            start, last = int(self._offset[rows].min()), int(rows[self._offset[rows].argmax()])
            end = self._offset.item(last) + self._size.item(last)
            self._open(self._shards[number]).prefetch_bytes(start, end - start)

    @cached_property
    def _identities(self) -> list[str]:
        return [printable(name) for name in json.loads(self._columns["identities"].tobytes())]

    def location(self, index: int) -> str:
        """Return the shard and the byte offset."""
        return f"{self._shards[self._shard[index]]}: image at byte {self._offset[index]:,}"


def shards_in(folder: Path) -> list[Path]:
    """Return the .tar and .tar.gz files of a folder, sorted by name."""
    return sorted(folder / name for name in os.listdir(folder) if is_shard(name))


def is_shard(name: str) -> bool:
    """Return whether this is the name of a .tar or .tar.gz; decompressed copies, which begin with a dot, are none."""
    return name.lower().endswith((".tar", *GZIP_SUFFIXES)) and not name.startswith(".")


def is_compressed(path: Path) -> bool:
    """Return whether this is the name of a .tar.gz."""
    return path.name.lower().endswith(GZIP_SUFFIXES)


def _build_catalog(shards: list[Path]) -> dict[str, np.ndarray]:
    """Return shard (int32), header, header_bytes, offset, size (int64) and label (int32) of every image.

    A header is the byte offset of the member in the shard. The labels are the identities if all of them are whole
    numbers, otherwise their rank in sorted order. The bytes of the columns `identities` and `skipped` are JSON.
    """
    skipped: list[tuple[str, str, str]] = []
    found = [(shard, *image) for shard, path in enumerate(shards) for image in _images(path, skipped)]
    label_of = label_of_each(name for *_, name in found)
    table = np.array([(*place, label_of[name]) for *place, _, name in found], dtype=np.int64).reshape(-1, 6)
    shard, header, header_bytes, offset, size, label = (np.ascontiguousarray(column) for column in table.T)
    names = [str(name) for name in sorted(label_of, key=label_of.__getitem__)]
    if all(isinstance(name, int) for name in label_of):
        names = names_of_folders(label.tolist(), (folder for *_, folder, _ in found))
    return {
        "shard": shard.astype(np.int32), "header": header, "header_bytes": header_bytes, "offset": offset,
        "size": size, "label": label.astype(np.int32),
        "identities": np.frombuffer(json.dumps(names).encode(), np.uint8),
        "skipped": np.frombuffer(json.dumps(skipped).encode(), np.uint8),
    }  # fmt: skip


def _images(
    path: Path, skipped: list[tuple[str, str, str]]
) -> Iterator[tuple[int, int, int, int, str, int | str]]:
    """Yield (header, header_bytes, offset, size, folder, identity) of every image; add other members to `skipped`.

    The identity is a number if .cls or .json has one, otherwise a name. If both files exist, .cls counts.
    """
    images: dict[str, tuple[int, int, int, int]] = {}
    names: dict[str, str] = {}
    identities: dict[str, int | str] = {}
    json_identity: dict[str, int | str | DataError] = {}
    others: list[tuple[str, str]] = []

    def skip(name: str, kind: str, reason: str) -> None:
        skipped.append((f"{path.name}/{printable(name)}", kind, printable(reason)))

    try:
        with tarfile.open(path, "r:") as archive:
            # tarfile takes a damaged header for the end of the archive: `_require_end` finds it.
            for name, member, content in _files(archive):
                folder, _, file = name.rpartition("/")
                stem, _, kind = file.partition(".")
                key, suffix = f"{folder}/{stem}", "." + kind.lower()
                if content is None:
                    skip(name, "special", _why_special(member))
                elif not stem:
                    skip(name, "hidden", "a name begins with a dot")
                elif suffix in IMAGE_SUFFIXES:
                    if key in images:
                        raise DataError(
                            f"{path}: {printable(names[key])} and {printable(name)} are two images with one key, the "
                            "name up to its first dot; give them different keys, or remove one of them"
                        )
                    names[key] = name
                    header_bytes = member.offset_data - member.offset
                    images[key] = member.offset, header_bytes, content.offset_data, content.size
                elif suffix == ".cls" or (suffix == ".json" and content.size <= _MAX_LABEL_FILE_BYTES):
                    data, location = _label_bytes(archive, content), f"{path}: {printable(name)}"
                    if suffix == ".cls":
                        identities[key] = _identity(data, suffix, location)
                    else:
                        json_identity[key] = _identity_or_error(data, suffix, location)
                elif suffix != ".json":
                    others.append((key, name))
            _require_end(path, archive.offset)
    except _TAR_ERRORS as error:
        raise DataError(
            f"{path}: not a tar archive ({error_reason(error)}); a compressed one must be named .tar.gz"
        ) from error
    for key, name in others:
        if key in images:
            continue
        suffix = os.path.splitext(name)[1]
        if suffix.lower() in IMAGE_SUFFIXES:
            skip(
                name, "suffix", f"the key of an image ends at the first dot; rename it to have {suffix} there"
            )
        else:
            skip(name, "suffix", f"{suffix or 'no suffix'}: not a format that OpenCV reads")
    for key, found in json_identity.items():
        if key in images and key not in identities:
            if isinstance(found, DataError):
                raise found
            identities[key] = found
    for key, place in images.items():
        folder = key.rpartition("/")[0].rpartition("/")[2]
        if key not in identities and not folder:
            raise DataError(
                f"{path}: image {printable(key[1:])} has neither a .cls or .json file (up to "
                f"{_MAX_LABEL_FILE_BYTES:,} bytes) nor a folder that names its identity"
            )
        yield *place, folder, identities.get(key, folder)


def _require_end(path: Path, offset: int) -> None:
    """Check that an archive whose members end at a byte offset has zeros from there on, at least a block of them.

    POSIX ends an archive with two blocks of zeros. Without this check, an archive that was cut between two members or
    has a damaged header would lose its remaining images in silence.

    Raises:
        DataError: other bytes follow, or none.
    """
    file = PositionalFile(path)
    block = file.bytes_at(offset, tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE and not any(block):
        raise DataError(
            f"{path}: ends at byte {file.size:,} without the blocks of zeros that end an archive: it is truncated; "
            f"copy it again, or add them by `truncate -s +1024 {shell_path(path)}` if it is complete"
        )
    if any(block):
        raise DataError(
            f"{path}: no member begins at byte {offset:,}: the archive is truncated or damaged; copy it again"
        )
    for start in range(offset, file.size, _CHUNK_BYTES):
        chunk = file.bytes_at(start, _CHUNK_BYTES)
        if chunk.strip(b"\0"):
            raise DataError(
                f"{path}: data follows the end of the archive at byte {offset:,}: archives were joined, or it is "
                "damaged; join archives with `tar --concatenate`, or give each of them as a shard"
            )


def _files(archive: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarInfo | None]]:
    """Yield path, header and content of the members that are no folders: of a hard link, the content of its file.

    The content is None if it cannot be read in place.
    """
    file_of: dict[str, tarfile.TarInfo] = {}
    for member in archive:
        if member.isdir():
            continue
        name = member_path(member.name)
        content = file_of.get(member_path(member.linkname)) if member.islnk() else member
        if content is None or not content.isreg() or content.issparse():
            yield name, member, None
        else:
            file_of[name] = content
            yield name, member, content


def _why_special(member: tarfile.TarInfo) -> str:
    if member.issym():
        return f"a symbolic link to {member.linkname}; write the shard with `tar --dereference`"
    if member.islnk():
        return f"a hard link to {member.linkname}, which is no file before it in the shard"
    return "a sparse file, a device or a pipe; write the shard without `tar --sparse`"


def _label_bytes(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = archive.extractfile(member)
    return content.read(_MAX_LABEL_FILE_BYTES + 1) if content else b""


def _identity_or_error(content: bytes, suffix: str, location: str) -> int | str | DataError:
    """Return the error instead of raising it: it does not matter if there is another file."""
    try:
        return _identity(content, suffix, location)
    except DataError as error:
        return error


def _identity(content: bytes, suffix: str, location: str) -> int | str:
    if len(content) > _MAX_LABEL_FILE_BYTES:
        raise DataError(
            f"{location}: more than {_MAX_LABEL_FILE_BYTES:,} bytes, too many for a label; shorten it"
        )
    try:
        value = content.decode("utf-8").strip()
        value = _label_of_json(parse_json(value)) if suffix == ".json" else value
        if not value:
            raise ValueError("an empty text")
    except ValueError as error:
        raise DataError(f"{location}: contains no identity (keys: {', '.join(_LABEL_KEYS)})") from error
    # A number only as it is usually written: 7 and 007 may be two people.
    is_number = value.isascii() and value.isdigit() and len(value) < 10 and str(int(value)) == value
    return int(value) if is_number else value


def _label_of_json(fields: Any) -> str:
    """Return the first label of a .json file that is not null.

    Raises:
        ValueError: there is none, or it is neither a whole number nor a text.
    """
    labels = [fields[name] for name in _LABEL_KEYS if name in fields] if isinstance(fields, dict) else []
    label = next((label for label in labels if label is not None), None)
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, bool) or not isinstance(label, int | str):
        raise ValueError(f"{label!r} is not a label")
    return str(label).strip()
