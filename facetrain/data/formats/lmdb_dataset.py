"""LMDB databases of images, as written for HaiyuWu's SOTA-Face-Recognition-Train-and-Test and its relatives.

Each value is (encoded image, label) in msgpack. The key __keys__ holds the list of all keys, in order.
Without it, the keys are in the order of their numbers, or sorted if they are not numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from pathlib import Path

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.labels import MAX_LABEL
from facetrain.data.formats.lmdb_pages import LmdbFile, Value
from facetrain.data.formats.msgpack_values import image_and_label, list_items
from facetrain.errors import DataError
from facetrain.files import printable

_KEYS = b"__keys__"
_DATA_FILE = "data.mdb"


class LmdbDataset(CatalogDataset):
    """Images of a database, read without LMDB. The names are the keys, unless they are numbers."""

    def name(self, index: int) -> str | None:
        """Return the key of an image; None if it is a number."""
        key = super().name(index)
        return None if key is None or (key.isascii() and key.isdigit()) else key


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
    # Keys in underscores are of programs; any other key would be an image that is left out.
    images = {key for key in value_of if not key.startswith(b"__")}
    try:
        keys = _listed(file, value_of[_KEYS]) if _KEYS in value_of else _in_key_order(images)
        if unlisted := images.difference(keys):
            raise ValueError(f"{min(unlisted)!r} is not in the list")
        values = [value_of[key] for key in keys]
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{path}: {_KEYS.decode()} is not the list of the {len(images):,} keys: {error}; write the database again"
        ) from None
    rows = [(*_parse(file, value), value.key_offset, len(value.key)) for value in values]
    return Columns.of(**columns_of_rows("offset size label name_offset name_size", rows))


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


def _listed(file: LmdbFile, value: Value) -> list[bytes]:
    """Return the byte strings of a list."""
    data = file.bytes_at(value.offset, value.size)
    items = list_items(lambda start, count: data[start : start + count], len(data), most=len(data))
    return [data[item.start : item.end] for item in items]


def _in_key_order(keys: Collection[bytes]) -> list[bytes]:
    if not all(key.isdigit() for key in keys):
        return sorted(keys)
    # As texts: Python refuses to convert a key of thousands of digits.
    return sorted(keys, key=lambda key: (len(key.lstrip(b"0")), key.lstrip(b"0")))
