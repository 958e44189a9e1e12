"""TFRecord files of tf.Example messages, with the checksums of their records; needs facetrain[tfrecord]."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.labels import number_identities
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError, missing_package

PATTERN = "*.tfrecord*"
_INDEX_SUFFIXES = (".idx", ".index")
"""Files beside shards that other readers need, such as DALI's `tfrecord2idx`."""
_IMAGES = ("image", "image_raw", "image/encoded", "encoded", "image_bytes", "jpg", "jpeg", "bytes")
_LABELS = ("label", "identity", "class", "cls", "image/label", "image/class/label", "image/source_id", "id")
_NAMES = ("filename", "image/filename", "name", "path")
_HEADER_BYTES, _FOOTER_BYTES = 12, 4
_MAX_NAME_BYTES = 4096
"""Bytes of the name of an image or identity; longer ones are no names."""

# tensorflow/core/example/example.proto and feature.proto, without their options.
_SCHEMA = """
name: "facetrain/example.proto" package: "facetrain" syntax: "proto3"
message_type { name: "Bytes" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "Floats" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Integers" field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature"
  field { name: "bytes" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Bytes" }
  field { name: "floats" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Floats" }
  field { name: "integers" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Integers" } }
message_type { name: "Entry"
  field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "value" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Feature" } }
message_type { name: "Features"
  field { name: "entries" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".facetrain.Entry" } }
message_type { name: "Example"
  field { name: "features" number: 1 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: ".facetrain.Features" } }
"""
Value = bytes | int | float

Record = tuple[tuple[int, ...], int | str]
"""Columns of a record: file, offset, size, start, image_size, name_offset, name_size; and its identity."""


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
        message = record[_HEADER_BYTES:-_FOOTER_BYTES]
        if masked_crc32c(message) != int.from_bytes(record[-_FOOTER_BYTES:], "little"):
            raise UnreadableError(
                f"{self.location(index)}: the checksum of the record is wrong; the file is damaged: copy it again"
            )
        start = arrays["start"].item(index)
        return message[start : start + arrays["image_size"].item(index)]


def masked_crc32c(data: bytes) -> int:
    """Return the CRC-32C as TFRecord stores it: rotated by 15 bits, plus a constant."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def open_tfrecords(path: Path) -> CatalogDataset:
    """Open a folder of TFRecord shards.

    Raises:
        DataError: a package or a file is missing, a file is damaged or has no images, or an image has no label.
    """
    try:
        import google.protobuf  # noqa: F401
        import google_crc32c  # noqa: F401
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'tfrecord')}") from error
    found = path.glob(PATTERN)
    shards = sorted(file for file in found if file.name[0] != "." and file.suffix not in _INDEX_SUFFIXES)
    require_all_shards(shards)
    columns = cached_columns(catalog_path(path), shards, partial(_build_catalog, shards))
    return TfRecordDataset(path, shards, columns)


FORMAT = Format("TFRecord", open_tfrecords, parts=(PATTERN,))


def _build_catalog(shards: list[Path]) -> Columns:
    records = list(_scanned([PositionalFile(path) for path in shards]))
    label, names = number_identities([identity for _, identity in records], shards[0].parent)
    places = "file offset size start image_size name_offset name_size"
    columns = columns_of_rows(places, [place for place, _ in records])
    return Columns.of(**columns, label=label, identities=names)


def _scanned(files: list[PositionalFile]) -> Iterator[Record]:
    """Yield the records of all shards one after the other."""
    for number, file in enumerate(files):
        if not file.size:
            raise DataError(f"{file.path}: the file is empty; copy it again, or remove it")
        offset = 0
        while offset < file.size:
            record = _record(file, number, offset)
            yield record
            offset += record[0][2]


def _record(file: PositionalFile, shard: int, offset: int) -> Record:
    """Return the record at a byte offset."""
    place = f"{file.path}: record at byte {offset:,}"
    header = file.bytes_at(offset, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES or masked_crc32c(header[:8]) != int.from_bytes(header[8:], "little"):
        raise DataError(f"{place}: not a TFRecord file, or damaged; gzip is not supported: decompress it")
    length, start = int.from_bytes(header[:8], "little"), offset + _HEADER_BYTES
    if start + length + _FOOTER_BYTES > file.size:
        raise DataError(
            f"{place}: claims {length:,} bytes, past the end of the file; it is truncated: copy it again"
        )
    message = file.bytes_at(start, length)
    try:
        features = _read_features(message)
    except ValueError as error:
        raise DataError(f"{place}: not a tf.Example ({error})") from None
    texts = {name: value for name, value in features.items() if isinstance(value, bytes)}
    image = next((texts[name] for name in _IMAGES if name in texts), None)
    if image is None:
        raise DataError(f"{place}: no image among the features; expected one of {', '.join(_IMAGES)}")
    name = next((texts[name] for name in _NAMES if name in texts), b"")[:_MAX_NAME_BYTES]
    # The first place with these bytes is as good as the place of the feature: the bytes are equal.
    row = (
        shard, offset, _HEADER_BYTES + length + _FOOTER_BYTES, message.index(image), len(image),
        start + message.index(name), len(name),
    )  # fmt: skip
    return row, _identity(features, place)


def _identity(features: dict[str, Value | None], place: str) -> int | str:
    """Return the identity in the first of the features for labels that a record has."""
    name = next((name for name in _LABELS if name in features), None)
    if name is None:
        raise DataError(f"{place}: no label among the features; expected one of {', '.join(_LABELS)}")
    label = features[name]
    # An error, not the next feature: that could have other numbers for the same people.
    if isinstance(label, bytes) and len(label) <= _MAX_NAME_BYTES:
        return label.decode("utf-8", "surrogateescape")  # also a text of digits: 7 and 007 may be two people
    if isinstance(label, bytes) or label is None or label % 1 != 0:  # also NaN and infinity
        raise DataError(
            f"{place}: the feature {name} is {label!r:.60}; expected a whole number or a short text"
        )
    return int(label)


def _read_features(message: bytes) -> dict[str, Value | None]:
    """Return the first value of each feature of an Example by its name; None for a feature without a value.

    Raises:
        ValueError: the message is damaged.
    """
    from google.protobuf.message import DecodeError

    try:
        example = _example_type().FromString(message)
    except DecodeError as error:
        raise ValueError(str(error)) from None
    return {
        entry.key.decode("utf-8", "replace"): _first_value(entry.value) for entry in example.features.entries
    }


def _first_value(feature: Any) -> Value | None:
    for values in (feature.bytes.value, feature.floats.value, feature.integers.value):
        if values:
            return values[0]
    return None


@cache
def _example_type() -> Any:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    file = text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("facetrain.Example"))
