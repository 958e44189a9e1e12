"""TFRecord files of tf.Example messages, read without TensorFlow; each record's checksum is compared.

Labels come from the messages, or from an index file with tabs between its fields:

    TFR-NAME  shard  offset  label    TFace's NAME.txt, given as the dataset; the shards are beside it or in TFR-NAME/
    path  shard  offset               NAME.index of TFace's img2tfrecord, beside the shards; the folder of the path is
                                      the identity
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import MAX_LABEL, CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.crc32c import masked_crc32c
from facetrain.data.formats.image_list import LIST_SUFFIXES
from facetrain.data.formats.labels import label_of_each
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.data.formats.tf_example import Feature, read_features
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import os_errors_as

PATTERN = "*.tfrecord*"
_INDEX_SUFFIXES = (".idx", ".index")
"""Files beside shards that other readers need, such as DALI's `tfrecord2idx`."""
_IMAGES = ("image", "image_raw", "image/encoded", "encoded", "image_bytes", "jpg", "jpeg", "bytes")
_LABELS = ("label", "identity", "class", "cls", "image/label", "image/class/label", "image/source_id", "id")
_NAMES = ("filename", "image/filename", "name", "path")
_HEADER = struct.Struct("<QI")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_MAX_RECORD = (1 << 31) - 1
_WINDOW = 512
_MAX_LINE = 1 << 16
_MAX_LABEL_BYTES = 4096


class Record(NamedTuple):
    """Place of a record, of the image and of the name in its message, and the identity."""

    file: int
    offset: int
    size: int
    start: int
    image_size: int
    name_offset: int
    name_size: int
    identity: int | str


class TfRecordDataset(CatalogDataset):
    """Images of TFRecord shards; `offset` and `size` are of the whole record, whose checksum is compared.

    Further columns: `start` of the image in the message, `image_size`.
    """

    stored_as = "record"

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the record is damaged.
        """
        arrays = self.columns.arrays
        record = super().read(index)
        message = memoryview(record)[_HEADER_BYTES:-_FOOTER_BYTES]
        if masked_crc32c(bytes(message)) != int.from_bytes(record[-_FOOTER_BYTES:], "little"):
            raise UnreadableError(
                f"{self.location(index)}: the checksum of the record is wrong; the file is damaged: copy it again"
            )
        start = arrays["start"].item(index)
        return bytes(message[start : start + arrays["image_size"].item(index)])


def open_tfrecords(path: Path) -> CatalogDataset:
    """Open a folder of TFRecord shards, or TFace's index of such shards.

    Raises:
        DataError: a file is missing or damaged or has no images, or an image has no label.
    """
    is_folder = path.is_dir()
    folder = path if is_folder else path.parent
    shards = _shards(folder) or _shards_of_index(path)
    require_all_shards(shards)
    indexes = sorted(path.glob("*.index")) if is_folder else [path]
    build = partial(_build_catalog, shards, indexes)
    columns = cached_columns(catalog_path(path), [*shards, *indexes], build)
    return TfRecordDataset(path, shards, columns)


def is_index(path: Path) -> bool:
    """Return whether the first line of a file is one of TFace's index: a name and three numbers."""
    with os_errors_as(DataError, path), path.open("rb") as file:
        fields = file.readline(_MAX_LINE).rstrip().split(b"\t")
    return len(fields) == 4 and all(field.isdigit() for field in fields[1:])


def _shards(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.glob(PATTERN)
        if not path.name.startswith(".") and path.suffix not in _INDEX_SUFFIXES
    )


def _shards_of_index(path: Path) -> list[Path]:
    """Return the shards in the folder of TFace's name for the dataset, which the first field of a line is."""
    with os_errors_as(DataError, path), path.open("rb") as file:
        name = file.readline(_MAX_LINE).split(b"\t")[0].decode("utf-8", "surrogateescape")
    if not name or "/" in name or name.startswith("."):
        return []
    folder = path.parent / name
    with os_errors_as(DataError, path):  # no folder can have a name that is too long
        return _shards(folder) if folder.is_dir() else []


FORMAT = Format("TFRecord", open_tfrecords, parts=(PATTERN,), suffixes=LIST_SUFFIXES, accepts=is_index)


def _build_catalog(shards: list[Path], indexes: list[Path]) -> Columns:
    if not shards:
        raise DataError(
            f"{indexes[0]}: no shards {PATTERN} beside the index, or in a folder with the name in it"
        )
    if len(indexes) > 1:
        raise DataError(
            f"{indexes[0]}: there is more than one index; keep one, or give NAME.txt as the dataset"
        )
    files = [PositionalFile(path) for path in shards]
    records = list(_indexed(files, indexes[0]) if indexes else _scanned(files))
    label_of = label_of_each(record.identity for record in records)
    if not all(0 <= label < MAX_LABEL for label in label_of.values()):
        wrong = next(label for label in label_of.values() if not 0 <= label < MAX_LABEL)
        raise DataError(f"{shards[0].parent}: there is the label {wrong}; labels must be from 0 to 2^31")
    columns = columns_of_rows(
        "file offset size start image_size name_offset name_size label",
        [(*record[:-1], label_of[record.identity]) for record in records],
    )
    is_named = any(isinstance(identity, str) for identity in label_of)
    identities = [str(name) for name in sorted(label_of, key=label_of.__getitem__)] if is_named else []
    return Columns.of(**columns, identities=identities)


def _scanned(files: list[PositionalFile]) -> Iterator[Record]:
    """Yield the records of all shards one after the other, with the labels in their messages."""
    for number, file in enumerate(files):
        offset = 0
        while offset < file.size:
            record = _record(file, number, offset, None)
            yield record
            offset += record.size


def _indexed(files: list[PositionalFile], index: Path) -> Iterator[Record]:
    """Yield the records that an index lists, with its labels, or the folders of its paths as identities."""
    by_number = {_shard_number(file.path): number for number, file in enumerate(files)}
    with os_errors_as(DataError, index), index.open("rb") as lines:
        for line_number, line in enumerate(lines, start=1):
            fields = line.rstrip(b"\r\n").split(b"\t")
            if len(fields) not in (3, 4) or not all(f.isdigit() and len(f) < 19 for f in fields[1:]):
                raise DataError(
                    f"{index}, line {line_number}: {line[:60]!r} is not a name, a shard and an offset, or these and a "
                    "label"
                )
            shard, offset = by_number.get(int(fields[1])), int(fields[2])
            if shard is None:
                raise DataError(f"{index}, line {line_number}: there is no shard {int(fields[1]):05}")
            folder = fields[0].decode("utf-8", "surrogateescape").replace("\\", "/").rpartition("/")[0]
            identity = int(fields[3]) if len(fields) == 4 else folder.rpartition("/")[2]
            yield _record(files[shard], shard, offset, identity)


def _shard_number(path: Path) -> int:
    """Return the number in NAME-00012.tfrecord; -1 without one."""
    digits = path.name.partition(".tfrecord")[0].rpartition("-")[2]
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 10 else -1


def _record(file: PositionalFile, shard: int, offset: int, identity: int | str | None) -> Record:
    """Return the record at a byte offset; `identity` None: the message has the identity."""
    place = f"{file.path}: record at byte {offset:,}"
    header = file.bytes_at(offset, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES or masked_crc32c(header[:8]) != _HEADER.unpack(header)[1]:
        raise DataError(f"{place}: not a TFRecord file, or damaged; gzip is not supported: decompress it")
    length = _HEADER.unpack(header)[0]
    if length > min(_MAX_RECORD, file.size - offset - _HEADER_BYTES - _FOOTER_BYTES):
        raise DataError(
            f"{place}: claims {length:,} bytes, past the end of the file; it is truncated: copy it again"
        )
    window = _Window(file.part(offset + _HEADER_BYTES, length))
    try:
        features = read_features(window.read, length)
    except ValueError as error:
        raise DataError(f"{place}: not a tf.Example ({error})") from None
    byte_strings = {name: one for name, one in features.items() if one is not None and one.number is None}
    image = next((byte_strings[name] for name in _IMAGES if name in byte_strings), None)
    if image is None:
        raise DataError(f"{place}: no image among the features; expected one of {', '.join(_IMAGES)}")
    name = next((byte_strings[name] for name in _NAMES if name in byte_strings), Feature(0, 0, None))
    if identity is None:
        identity = _identity(features, window, place)
    return Record(
        shard, offset, _HEADER_BYTES + length + _FOOTER_BYTES, image.start, image.end - image.start,
        offset + _HEADER_BYTES + name.start, min(name.end - name.start, 4096), identity,
    )  # fmt: skip


def _identity(features: dict[str, Feature | None], window: _Window, place: str) -> int | str:
    """Return the identity in the first of the features for labels that a record has."""
    name = next((name for name in _LABELS if name in features), None)
    if name is None:
        raise DataError(
            f"{place}: no label among the features ({', '.join(_LABELS)}); for TFace, give its index NAME.txt"
        )
    label = features[name]
    # An error, not the next feature: that could have other numbers for the same people.
    if label is None or (label.number is not None and label.number % 1 != 0):  # also NaN and infinity
        value = "empty" if label is None else label.number
        raise DataError(f"{place}: the feature {name} is {value}; expected a whole number or a text")
    if label.number is not None:
        return int(label.number)
    size = label.end - label.start
    if size > _MAX_LABEL_BYTES:
        raise DataError(
            f"{place}: the feature {name} has {size:,} bytes, too many for the name of an identity; the limit is "
            f"{_MAX_LABEL_BYTES:,}"
        )
    # Also a text of digits: 7 and 007 may be two people.
    return window.read(label.start, size).decode("utf-8", "surrogateescape")


class _Window:
    """Reads small pieces of a record from a larger one that is read ahead."""

    def __init__(self, read: Any) -> None:
        self._read, self._start, self._data = read, 0, b""

    def read(self, position: int, count: int) -> bytes:
        """Return `count` bytes from a position on; fewer at the end of the record."""
        if not self._start <= position or position + count > self._start + len(self._data):
            self._start, self._data = position, self._read(position, max(count, _WINDOW))
        return self._data[position - self._start :][:count]
