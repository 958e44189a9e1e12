"""LMDB databases of images, as written for HaiyuWu's SOTA-Face-Recognition-Train-and-Test and its relatives.

Each value is (encoded image, label), as msgpack or pickle. The key __keys__ holds the list of all keys, in order.
Without it, the keys are in the order of their numbers, or sorted if they are not numbers. facetrain's own writer uses
the images' names as keys, and stores the identities' names as a list in __identities__.
"""

from __future__ import annotations

from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats.lmdb_pages import LmdbFile, Value
from facetrain.data.formats.serialized_values import image_and_label, list_items
from facetrain.errors import DataError, UnreadableError
from facetrain.files import printable

KEYS, LENGTH, NUM_CLASSES, IDENTITIES = b"__keys__", b"__len__", b"__classnum__", b"__identities__"
DATA_FILE = "data.mdb"
_MAX_LABEL = 2**31


class LmdbDataset:
    """Images of a database; a catalog of their places is cached, and images are then read without LMDB.

    Raises:
        DataError: the database is damaged, or a value is not a pair of an image and a label.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        file = path / DATA_FILE if path.is_dir() else path
        self._file = LmdbFile(file)
        name = file.with_name(f".{file.name}.catalog")
        columns = cached_columns(name, [file], partial(_build_catalog, self._file))
        self._offset, self._size = columns.arrays["offset"], columns.arrays["size"]
        self._key_offset, self._key_size = columns.arrays["key_offset"], columns.arrays["key_size"]
        self._identities_at = columns.facts["identities"]
        self.labels = columns.arrays["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the path."""
        return LmdbDataset, (self._path,)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the file was truncated.
        """
        size = self._size.item(index)
        data = self._file.bytes_at(self._offset.item(index), size)
        if len(data) < size:
            raise UnreadableError(f"{self.location(index)}: the database is truncated; copy it again")
        return data

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the images: one request for each, because neighbors may be far apart."""
        for offset, size in zip(
            self._offset[first : first + count].tolist(),
            self._size[first : first + count].tolist(),
            strict=True,
        ):
            self._file.prefetch_bytes(offset, size)

    def name(self, index: int) -> str | None:
        """Return the key of an image; None if it is only the number of the image."""
        key = self._key(index)
        return None if key.isascii() and key.isdigit() else key

    def identity_name(self, label: int) -> str:
        """Return the name of an identity, or its number."""
        return self._identities[label] if label < len(self._identities) else str(label)

    def location(self, index: int) -> str:
        """Return the file, the key and the byte offset."""
        return f"{self._file.path}: key {self._key(index)}, image at byte {self._offset[index]:,}"

    def _key(self, index: int) -> str:
        key = self._file.bytes_at(self._key_offset.item(index), self._key_size.item(index))
        return printable(key.decode("utf-8", "surrogateescape"))

    @cached_property
    def _identities(self) -> list[str]:
        if self._identities_at is None:
            return []
        data = self._file.bytes_at(*self._identities_at)
        items = list_items(lambda start, count: data[start : start + count], len(data), most=self.num_classes)
        return [printable(data[item.start : item.end].decode("utf-8", "replace")) for item in items]


def _build_catalog(file: LmdbFile) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the place of every image and of its key, and the label, in the order of the keys; and facts."""
    found = {value.key: value for value in file.values()}
    special = {key: found.pop(key) for key in (KEYS, LENGTH, NUM_CLASSES, IDENTITIES) if key in found}
    values = _in_listed_order(file, special[KEYS], found) if KEYS in special else _in_key_order(found)
    if not values:
        raise DataError(f"{file.path}: the database contains no images")
    rows = [_parse(file, value) for value in values]
    offset, size, label = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    columns: dict[str, np.ndarray] = {
        "offset": offset,
        "size": size,
        "label": label.astype(np.int32),
        "key_offset": np.array([value.key_offset for value in values], np.int64),
        "key_size": np.array([len(value.key) for value in values], np.int32),
    }
    named = special.get(IDENTITIES)
    return columns, {"identities": None if named is None else [named.offset, named.size]}


def _parse(file: LmdbFile, value: Value) -> tuple[int, int, int]:
    """Return the byte offset and the size of an image, and its label."""
    try:
        start, end, label = image_and_label(partial(_read_inside, file, value), value.size)
    except (ValueError, OverflowError, IndexError) as error:
        raise DataError(
            f"{file.path}: the value of key {printable(value.key.decode('utf-8', 'replace'))!r} is not a pair of "
            f"image and label: {error}"
        ) from None
    if end > value.size or not 0 <= label < _MAX_LABEL:
        raise DataError(
            f"{file.path}: the value of key {printable(value.key.decode('utf-8', 'replace'))!r} has the label {label}, "
            "or an image that is longer than the value; labels go from 0 to 2^31 - 1"
        )
    return value.offset + start, end - start, label


def _read_inside(file: LmdbFile, value: Value, position: int, count: int) -> bytes:
    """Return bytes of a value, never those after it."""
    return file.bytes_at(value.offset + position, max(min(count, value.size - position), 0))


def _in_listed_order(file: LmdbFile, listed: Value, found: dict[bytes, Value]) -> list[Value]:
    data = file.bytes_at(listed.offset, listed.size)
    ordered = []
    try:
        items = list_items(lambda start, count: data[start : start + count], len(data), most=len(found))
        for item in items:
            ordered.append(found[data[item.start : item.end]])
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{file.path}: {KEYS.decode()} is not the list of the {len(found):,} keys: {error}; write the "
            "database again"
        ) from None
    return ordered


def _in_key_order(found: dict[bytes, Value]) -> list[Value]:
    if not all(key.isdigit() for key in found):
        return [found[key] for key in sorted(found)]
    # As texts: Python refuses to convert a key of thousands of digits.
    return [found[key] for key in sorted(found, key=lambda key: (len(key.lstrip(b"0")), key.lstrip(b"0")))]
