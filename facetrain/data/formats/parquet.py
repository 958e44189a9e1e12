"""Parquet shards with an image and an identity in each row; needs `pip install 'facetrain[parquet]'`.

Images in a column without compression and dictionary are read in place. Other columns can be read only in groups of
rows, of which the last used ones stay in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats import arrow_columns
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, columns_of_rows, files_in
from facetrain.data.formats.shard_names import training_shards
from facetrain.data.images.header import size_fault
from facetrain.data.object_blocks import ObjectPath
from facetrain.data.positional_file import PositionalFile, open_stream
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError, UnreadableError
from facetrain.text import listed, printable

_CACHE_BYTES = 1 << 28
"""Decoded row groups in memory per process; one larger group stays alone."""
_LENGTH_BYTES = 4
_FIND_BYTES = 1 << 20
_MOST_TEXT_BYTES = 2**31 - 1
_decoding = threading.Lock()
"""Of the threads that need a row group at the same time, one decodes it: a group may be larger than the memory for
each of them."""

_Reader = Callable[[Any, int, str], Any]
"""Function that reads a part of the image column of a row group."""


class ParquetDataset(CatalogDataset):
    """Images of .parquet files; an image that is not in place has the offset −1, one without bytes also the size −1.

    Further columns: `group` and `row`, the row group of an image and its row there. `column` is the name of the image
    column, `group_bytes` the size of the images of the largest row group.
    """

    def _read(self, index: int) -> bytes:
        if self.columns.arrays["offset"].item(index) >= 0:
            return super()._read(index)
        image = self._value(index, _read_images)
        if image is None:
            raise UnreadableError(f"{self.location(index)}: the image column contains no bytes")
        if fault := size_fault(len(image)):
            raise UnreadableError(f"{self.location(index)}: {fault}")
        return bytes(image)

    def name(self, index: int) -> str | None:
        """Return the path that the image column has; None without one."""
        return printable(self._value(index, _read_paths) or "") or None

    def location(self, index: int) -> str:
        """Return the file, the row group and the row."""
        arrays = self.columns.arrays
        path = self.files[arrays["file"][index]]
        return f"{path}: row group {arrays['group'][index]}, row {arrays['row'][index]}"

    def _extents(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        file, start, end = super()._extents(rows)
        in_place = start >= 0
        return file[in_place], start[in_place], end[in_place]

    def _value(self, index: int, read: _Reader) -> Any:
        """Return what `_read_images` or `_read_paths` has of a row; None if it has nothing."""
        arrays = self.columns.arrays
        with _decoding:
            column = self._groups[read](arrays["file"].item(index), arrays["group"].item(index))
        return None if column is None else column[arrays["row"].item(index)].as_py()

    @cached_property
    def _groups(self) -> dict[_Reader, Callable[[int, int], Any]]:
        """Functions that return the images and the paths of a row group; those that were used last stay in memory."""
        most = max(_CACHE_BYTES // max(self.columns.value("group_bytes"), 1), 1)
        return {
            read: lru_cache(maxsize=most)(partial(self._load_group, read))
            for read in (_read_images, _read_paths)
        }

    def _load_group(self, read: _Reader, number: int, group: int) -> Any:
        path = self.files[number]
        try:
            with arrow_columns.arrow_errors(path):
                return read(_open(path), group, self.columns.value("column"))
        except DataError as error:
            raise UnreadableError(str(error)) from error


def open_parquet(folder: Path) -> CatalogDataset:
    """Open a folder of .parquet files; the image column has bytes, or Hugging Face's {bytes, path}.

    Of files of several splits, those of train are the dataset.

    Raises:
        DataError: if pyarrow is not installed, a file is missing or damaged, or a column is missing.
    """
    found = files_in(folder, (".parquet",))
    files, skipped = training_shards(found)
    # Of all files: the catalog lists those of other splits as well.
    columns = cached_columns(catalog_path(folder), found, partial(_build_catalog, files, skipped))
    return ParquetDataset(folder, files, columns)


FORMAT = Format("Parquet", open_parquet, parts=("*.parquet",))


def _build_catalog(files: Sequence[Path], skipped: list[SkippedFile]) -> Columns:
    rows, labels, group_bytes = list[np.ndarray](), list[np.ndarray](), 0
    read = list[Path]()
    for number, path in enumerate(files):
        with arrow_columns.arrow_errors(path):
            file = _open(path)
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            if not any(part.num_rows for part in (file.metadata, *groups)):
                continue  # such as a table that a filter left empty, whose columns have no types
            columns = file.schema_arrow.names
            if not read:
                image = arrow_columns.pick_column(columns, arrow_columns.IMAGE_COLUMNS, "image", path)
                label = arrow_columns.pick_column(columns, arrow_columns.LABEL_COLUMNS, "identity", path)
            read.append(path)
            if missing := {image, label}.difference(columns):
                raise DataError(
                    f"{path}: has no column {', '.join(missing)}, unlike {read[0]}; rename its columns"
                )
            if repeated := [name for name in (image, label) if file.schema_arrow.names.count(name) > 1]:
                raise DataError(
                    f"{path}: has several columns with the name {repeated[0]}; rename all but one"
                )
            found = arrow_columns.class_names(file.schema_arrow, label)
            if not labels:  # not those of each file: they are the same millions of texts
                names = found
            labels.append(arrow_columns.label_values(file.read([label]).column(label), label, path))
            places = _places(file, path, image)
        if not len(places) == len(labels[-1]) == file.metadata.num_rows:
            raise DataError(
                f"{path}: {len(places):,} images and {len(labels[-1]):,} labels in {file.metadata.num_rows:,} rows; "
                "the file is damaged or incomplete: copy it again"
            )
        if found != names:
            raise DataError(
                f"{read[0]} and {path}: their labels have different names ({listed(names)} and "
                f"{listed(found)}); write them as one dataset, or put them into two folders and train on a mixture "
                "of them"
            )
        if (labels[-1].dtype.kind == "O") != (labels[0].dtype.kind == "O"):
            raise DataError(
                f"{read[0]} and {path}: the labels of one are texts, those of the other numbers; write the labels of "
                "all files in one way"
            )
        # Not by the metadata: some writers leave the size of a group 0, as DuckDB did until 2023.
        bytes_of_group = np.bincount(places[:, 2], places[:, 1].clip(0), minlength=1)
        group_bytes = max(group_bytes, int(bytes_of_group.max()))
        rows.append(np.insert(places, 0, number, axis=1))
    if not read:
        raise DataError(f"{files[0].parent}: the dataset contains no images")
    numbered, identities = arrow_columns.number_labels(np.concatenate(labels), names, files[0].parent)
    return Columns.of(
        **columns_of_rows("file offset size group row", np.concatenate(rows)),
        label=numbered,
        identities=identities,
        skipped=skipped,
        column=image,
        group_bytes=group_bytes,
    )


def _places(file: Any, path: Path, image: str) -> np.ndarray:
    """Return the byte offset in the file and the size of each image, its row group and its row: int64 (rows, 4).

    The offset is −1 if an image is not in place; the size is −1 if a row has no image. A plain column without
    compression stores each value as its length and its bytes. The values that pyarrow decodes are searched in this
    order, so an image whose place is known is the one that pyarrow reads.

    Raises:
        DataError: the column has no bytes.
    """
    places, position = [], 0
    # Not by the metadata of the columns: pyarrow ends the process if they are damaged.
    raw = PositionalFile(path)
    for group in range(file.metadata.num_row_groups):
        images = _read_images(file, group, image)
        if images is None:
            kind = printable(str(file.schema_arrow.field(image).type))[:100]
            raise DataError(
                f"{path}: column {image} has values of type {kind}; expected bytes, or structs with a field `bytes`"
            )
        for row, value in enumerate(images.to_pylist()):
            start, size = -1, -1 if value is None else len(value)
            if value is not None and position >= 0:
                stored = len(value).to_bytes(_LENGTH_BYTES, "little") + value
                position = _find(raw, stored, position)
                if position >= 0:
                    start = position + _LENGTH_BYTES
                    position += len(stored)
            places.append((start, size, group, row))
    return np.array(places, np.int64).reshape(-1, 4)


def _find(file: PositionalFile, content: bytes, start: int) -> int:
    """Return the offset of bytes in a file at or after `start`; −1 if they are not there."""
    count = len(content)  # they are at `start`, except at the beginning of a page
    while start < file.size:
        place = file.bytes_at(start, count).find(content)
        if place >= 0:
            return start + place
        start += count - len(content) + 1
        count = len(content) + _FIND_BYTES
    return -1


def _open(path: Path) -> Any:
    import pyarrow.parquet

    # pyarrow refuses a text of 100 MB in the footer, and the names of millions of people take more.
    most = min(max(PositionalFile(path).size, 1), _MOST_TEXT_BYTES)  # it refuses the limit 0
    # Given a path, pyarrow closes the file.
    source = open_stream(path) if isinstance(path, ObjectPath) else path
    # Checksums are verified where pages have them: those of facetrain have.
    return pyarrow.parquet.ParquetFile(source, thrift_string_size_limit=most, page_checksum_verification=True)


def _read_images(file: Any, group: int, column: str) -> Any:
    """Return the images of a row group, and check their paths; None if the column has no bytes."""
    return arrow_columns.image_fields(_read_group(file, group, column).column(column))[0]


def _read_paths(file: Any, group: int, column: str) -> Any:
    """Return the paths of a row group without reading its images; None if the column has no paths."""
    table = _read_group(file, group, f"{column}.path")
    return arrow_columns.image_fields(table.column(column))[1] if column in table.column_names else None


def _read_group(file: Any, group: int, column: str) -> Any:
    table = file.read_row_group(group, [column])
    table.validate(full=True)  # a text need not be UTF-8, an index can point outside its dictionary
    return table
