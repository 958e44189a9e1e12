"""LMDB databases of images, as written for HaiyuWu's SOTA-Face-Recognition-Train-and-Test and its relatives.

Each value is (encoded image, label), as msgpack or pickle. The key __keys__ holds the list of all keys, in order.
Without it, the keys are in the order of their numbers, or sorted if they are not numbers. facetrain's own writer uses
the images' names as keys, and stores the identities' names as a list in __identities__.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.labels import MAX_LABEL
from facetrain.data.formats.lmdb_pages import LmdbFile, Value
from facetrain.data.formats.serialized_values import image_and_label, list_items
from facetrain.errors import DataError
from facetrain.files import printable

KEYS, LENGTH, NUM_CLASSES, IDENTITIES = b"__keys__", b"__len__", b"__classnum__", b"__identities__"
_DATA_FILE = "data.mdb"


class LmdbDataset(CatalogDataset):
    """Images of a database, read without LMDB. The names are the keys, unless they are numbers."""

    def name(self, index: int) -> str | None:
        """Return the key of an image; None if it is a number."""
        key = super().name(index)
        return None if key is None or (key.isascii() and key.isdigit()) else key

    def location(self, index: int) -> str:
        """Return the file, the key and the byte offset."""
        return f"{self.files[0]}: key {super().name(index)}, image at byte {self.columns.arrays['offset'][index]:,}"


def open_lmdb(path: Path) -> CatalogDataset:
    """Open a database: a file, or the data.mdb of a folder.

    Raises:
        DataError: the database is damaged, or a value is not a pair of an image and a label.
    """
    file = path / _DATA_FILE if path.is_dir() else path
    columns = cached_columns(catalog_path(path), [file], partial(_build_catalog, file))
    return LmdbDataset(path, [file], columns)


FORMAT = Format("LMDB", open_lmdb, parts=(_DATA_FILE,), suffixes=(".lmdb",))


def _build_catalog(path: Path) -> Columns:
    file = LmdbFile(path)
    value_of = {value.key: value for value in file.values()}
    special = {key: value_of.pop(key) for key in (KEYS, LENGTH, NUM_CLASSES, IDENTITIES) if key in value_of}
    try:
        keys, identities = (_listed(file, special.get(key)) for key in (KEYS, IDENTITIES))
        # Other keys in underscores are of programs; any other one would be an image that is left out.
        unlisted = [key for key in value_of.keys() - set(keys) if not key.startswith(b"__")]
        if KEYS not in special:
            keys = _in_key_order(value_of)
        elif unlisted:
            raise ValueError(f"{unlisted[0]!r} is not in the list")
        values = [value_of[key] for key in keys]
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{path}: {KEYS.decode()} is not the list of the {len(value_of):,} keys, or {IDENTITIES.decode()} no list "
            f"of names: {error}; write the database again"
        ) from None
    rows = [(*_parse(file, value), value.key_offset, len(value.key)) for value in values]
    columns = columns_of_rows("offset size label name_offset name_size", rows)
    return Columns.of(**columns, identities=[name.decode("utf-8", "replace") for name in identities])


def _parse(file: LmdbFile, value: Value) -> tuple[int, int, int]:
    """Return the byte offset and the size of an image, and its label."""
    try:
        start, end, label = image_and_label(file.part(value.offset, value.size), value.size)
        if end > value.size or not 0 <= label < MAX_LABEL:
            raise ValueError(
                f"the label {label} is not from 0 to 2^31, or the image is longer than the value"
            )
    except (ValueError, OverflowError, IndexError) as error:
        key = printable(value.key.decode("utf-8", "replace"))
        raise DataError(
            f"{file.path}: the value of key {key!r} is not a pair of image and label: {error}"
        ) from None
    return value.offset + start, end - start, label


def _listed(file: LmdbFile, value: Value | None) -> list[bytes]:
    """Return the byte strings of a list; none without a list."""
    if value is None:
        return []
    data = file.bytes_at(value.offset, value.size)
    items = list_items(lambda start, count: data[start : start + count], len(data), most=len(data))
    return [data[item.start : item.end] for item in items]


def _in_key_order(keys: Collection[bytes]) -> list[bytes]:
    if not all(key.isdigit() for key in keys):
        return sorted(keys)
    # As texts: Python refuses to convert a key of thousands of digits.
    return sorted(keys, key=lambda key: (len(key.lstrip(b"0")), key.lstrip(b"0")))
