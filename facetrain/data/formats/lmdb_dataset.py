"""LMDB databases of images, as written for HaiyuWu's SOTA-Face-Recognition-Train-and-Test and its relatives.

Each value is (encoded image, label) in msgpack. The key __keys__ holds the list of all keys, in order.
Without it, the keys are in the order of their numbers, or sorted if they are not numbers.

The package `lmdb` trusts every page number in a file, so a damaged file can end the process that opens it. It therefore
runs once, in a process of its own, which finds the place of each image in the file. The images are then read at these
places, as those of every other format.
"""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows
from facetrain.data.formats.labels import MAX_LABEL
from facetrain.data.formats.msgpack_list import Item, list_items
from facetrain.distinct import distinct
from facetrain.distributed.process_lifetime import end_with_parent
from facetrain.distributed.spawn import HelperContext
from facetrain.errors import DataError, missing_package
from facetrain.files import error_reason, os_errors_as
from facetrain.text import printable

_KEYS = b"__keys__"
_DATA_FILE = "data.mdb"
_COMPARED_BYTES = 64
_LONGEST_KEY = 511
_LEAST_FOUND_BYTES = 64
"""Size of a value that is searched in the file: a short one may also be elsewhere."""


class LmdbDataset(CatalogDataset):
    """Images of a database. The names are the keys, unless they are numbers."""

    def name(self, index: int) -> str | None:
        """Return the key of an image; None if it is a number."""
        key = super().name(index)
        return None if key is None or (key.isascii() and key.isdigit()) else key


def open_lmdb(path: Path) -> CatalogDataset:
    """Open a database: a file, or the data.mdb of a folder.

    Raises:
        DataError: the package is missing, the database is damaged, or a value is not a pair of an image and a label.
    """
    file = path / _DATA_FILE if path.is_dir() else path
    columns = cached_columns(catalog_path(path), [file], partial(_catalog_of_helper, file))
    return LmdbDataset(path, [file], columns)


FORMAT = Format("LMDB", open_lmdb, parts=(_DATA_FILE,))


def _catalog_of_helper(path: Path) -> Columns:
    """Return the catalog, which a process of its own builds."""
    with ProcessPoolExecutor(1, HelperContext(), end_with_parent) as helper:
        try:
            return helper.submit(build_catalog, path).result()
        except BrokenProcessPool:
            raise DataError(
                f"{path}: the LMDB library crashed while it read the database, which is truncated or damaged; copy it "
                "again"
            ) from None


def build_catalog(path: Path) -> Columns:
    """Return the catalog of a database; a damaged one can end the process."""
    with os_errors_as(DataError, path), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            raise DataError(f"{path}: an empty file; copy the database again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, _open(path) as cursor:
            return _catalog(path, cursor, _Places(path, file.fileno(), content, _values(cursor)))


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Yield a cursor of the library; its keys and values are views of its mapping of the file."""
    try:
        import lmdb
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'lmdb')}") from error
    try:
        with (
            lmdb.open(str(path), subdir=False, readonly=True, lock=False, create=False) as database,
            database.begin(buffers=True) as transaction,
        ):
            cursor = transaction.cursor()
            found = _count_keys(cursor)
            if found != database.stat()["entries"]:  # a damaged page number leads to another page
                raise DataError(f"{path}: the database has lost entries; copy it again")
            yield cursor
    except lmdb.Error as error:
        raise DataError(
            f"{path}: not an LMDB database, or a damaged one ({error_reason(error)}); copy it again"
        ) from error


def _keys(cursor: Any) -> Iterator[bytes]:
    return map(bytes, cursor.iternext(values=False)) if cursor.first() else iter(())


def _values(cursor: Any) -> Iterator[memoryview]:
    return (value for _, value in cursor.iternext()) if cursor.first() else iter(())


def _count_keys(cursor: Any) -> int:
    """Return the number of different keys. They are sorted: a page that is read twice goes back in the order."""
    count, before = 0, None
    for key in _keys(cursor):
        if before is not None and key <= before:
            return len(set(_keys(cursor)))  # a damaged database, or one with an order of its own
        count, before = count + 1, key
    return count


class _Places:
    """Offsets in the file of views of the library's mapping, each checked against the bytes of the file."""

    def __init__(self, path: Path, file: int, content: mmap.mmap, values: Iterable[memoryview]) -> None:
        """Find where the mapping begins, by the first value that is long enough to be found in the file."""
        self._path, self._file, self._size, self._base = path, file, len(content), 0
        view = next((value for value in values if len(value) >= _LEAST_FOUND_BYTES), None)
        at = -1 if view is None else content.find(view)
        while view is not None and at >= 0:
            # A page that was replaced may hold an equal value at another place within a page.
            if (_address(view) - at) % mmap.PAGESIZE == 0:
                self._base = _address(view) - at
                return
            at = content.find(view, at + 1)

    def __call__(self, view: memoryview) -> int:
        """Return the offset of a view.

        Raises:
            DataError: the file has other bytes there.
        """
        offset = _address(view) - self._base
        ends = offset, max(offset, offset + len(view) - _COMPARED_BYTES)
        inside = offset >= 0 and offset + len(view) <= self._size
        if not inside or any(self._differs(view, offset, start) for start in ends):
            raise DataError(f"{self._path}: an entry is not where the file has it; copy the database again")
        return offset

    def _differs(self, view: memoryview, offset: int, start: int) -> bool:
        expected = view[start - offset :][:_COMPARED_BYTES]
        return os.pread(self._file, len(expected), start) != expected


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0]) if len(view) else 0


def _catalog(path: Path, cursor: Any, place: _Places) -> Columns:
    images = sum(1 for _ in _image_keys(cursor))
    listed = cursor.item()[1] if cursor.set_key(_KEYS) else None
    # Neither a set of the keys nor a list of views: they would take a kilobyte per image.
    rows = array("q")
    try:
        for name in _in_key_order(list(_image_keys(cursor))) if listed is None else _listed(listed):
            # The library raises for other lengths.
            if not 0 < len(name) <= _LONGEST_KEY or not cursor.set_key(name):
                raise ValueError(f"there is no {name[:_LONGEST_KEY]!r}")
            key, value = cursor.item()
            image, label = _image_and_label(path, key, value)
            rows.extend((place(value) + image.start, image.end - image.start, label, place(key), len(key)))
        table = np.array(rows, np.int64).reshape(-1, 5)
        _require_each_once(table[:, 3], cursor, listed, images)
    except ValueError as error:
        raise DataError(
            f"{path}: {_KEYS.decode()} is not the list of the {images:,} keys: {error}; write the database again"
        ) from None
    return Columns.of(**columns_of_rows("offset size label name_offset name_size", table))


def _image_keys(cursor: Any) -> Iterator[bytes]:
    # Keys in underscores are of programs; any other key would be an image that is left out.
    return (key for key in _keys(cursor) if not key.startswith(b"__"))


def _require_each_once(place_N: np.ndarray, cursor: Any, listed: memoryview | None, images: int) -> None:
    """Require that the catalog has each image once, by the places of their keys."""
    different = len(distinct(place_N))
    if different < len(place_N):
        raise ValueError(f"{len(place_N):,} keys are listed, {different:,} different ones")
    if listed is not None and different < images:
        unlisted = set(_image_keys(cursor)).difference(_listed(listed))
        raise ValueError(f"{min(unlisted)!r} is not in the list")


def _image_and_label(path: Path, key: memoryview, value: memoryview) -> tuple[Item, int]:
    try:
        items = list(list_items(value))
        images = [item for item in items if item.number is None]
        labels = [item.number for item in items if item.number is not None]
        if (len(images), len(labels)) != (1, 1):
            raise ValueError(
                f"{len(images)} byte strings and {len(labels)} whole numbers; expected one of each"
            )
        if not 0 <= labels[0] < MAX_LABEL:
            raise ValueError(f"the label {labels[0]} is not from 0 to 2^31")
    except ValueError as error:
        name = printable(bytes(key).decode("utf-8", "replace"))
        raise DataError(
            f"{path}: the value of key {name!r} is not a pair of image and label: {error}"
        ) from None
    return images[0], labels[0]


def _listed(value: memoryview) -> Iterator[bytes]:
    return (bytes(value[item.start : item.end]) for item in list_items(value))


def _in_key_order(keys: Collection[bytes]) -> list[bytes]:
    if not all(key.isdigit() for key in keys):
        return sorted(keys)
    # As texts: Python refuses to convert a key of thousands of digits.
    return sorted(keys, key=lambda key: (len(key.lstrip(b"0")), key.lstrip(b"0"), key))
