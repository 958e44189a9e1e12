"""Parquet shards with an image and an identity in each row; needs `pip install facetrain[parquet]`.

Images in a column without compression and dictionary are read in place. Other columns can be read only in groups of
rows, of which the last used ones stay in memory.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats.arrow_columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    class_names,
    decoded_bytes,
    import_pyarrow,
    is_text,
    label_text,
    number_labels,
    pick_column,
    require_equal_names,
    require_labels,
)
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.data.formats.splits import train_files
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, printable

_SPARE_BYTES = 1 << 27
_CACHE_BYTES = 1 << 28
"""Decoded row groups in memory per process; one larger group stays alone."""
_MAX_OPEN_FILES = 256
_LENGTH_BYTES = 4
_PAGE_HEADER_BYTES = 1 << 20
"""Bytes of a row group beside its values: headers of pages, and statistics."""


class ParquetDataset:
    """Images of a folder of .parquet files; the image column has bytes, or Hugging Face's {bytes, path}.

    Of several splits in Hugging Face's layout (train-00000-of-00001.parquet), train is the dataset.

    Raises:
        DataError: if pyarrow is not installed, a file is damaged, or a column is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths, self.skipped = train_files(sorted(folder.glob("*.parquet")))
        require_all_shards(self._paths)
        name = folder / ".parquet.catalog"
        columns = cached_columns(name, self._paths, partial(_build_catalog, self._paths, folder))
        self._column, self._columns = columns.facts["column"], columns.arrays
        self._offset, self._size = self._columns["offset"], self._columns["size"]
        self._groups = self._columns["groups"].reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2]).tolist()
        self.labels = self._columns["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1
        self._open = lru_cache(maxsize=_MAX_OPEN_FILES)(PositionalFile)
        self._cache = _GroupCache(self._read_group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder."""
        return ParquetDataset, (self._folder,)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the row, or its group of rows, is damaged, or the row contains no bytes.
        """
        offset = self._offset.item(index)
        if offset >= 0:
            size, path = self._size.item(index), self._paths[self._groups.item(self._group(index), 0)]
            data = self._open(path).bytes_at(offset, size)
            if len(data) < size:
                raise UnreadableError(f"{self.location(index)}: the file is truncated; copy it again")
            return data
        group, row = self._decoded_row(index)
        value = group.image(row)
        if value is None:
            raise UnreadableError(f"{self.location(index)}: column {self._column} contains no bytes")
        return value

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the images that are read in place."""
        for index in range(first, first + count):
            if self._offset.item(index) >= 0:
                path = self._paths[self._groups.item(self._group(index), 0)]
                self._open(path).prefetch_bytes(self._offset.item(index), self._size.item(index))

    def name(self, index: int) -> str | None:
        """Return the path that the image column has; None without one."""
        group, row = self._decoded_row(index)
        path = group.path(row)
        return printable(path) if path else None

    def identity_name(self, label: int) -> str:
        """Return the text of a label, or the name that the column has for it; otherwise its number."""
        return self._identities[label] if label < len(self._identities) else str(label)

    def location(self, index: int) -> str:
        """Return the file, the row group and the row."""
        group = self._group(index)
        file, row_group, rows = self._groups[group].tolist()
        return f"{self._paths[file]}: row group {row_group}, row {index - self._ends[group] + rows}"

    def _group(self, index: int) -> int:
        return bisect_right(self._ends, index)

    def _decoded_row(self, index: int) -> tuple[_RowGroup, int]:
        group = self._group(index)
        return self._cache.get(group), index - self._ends[group] + self._groups.item(group, 2)

    def _read_group(self, group: int) -> _RowGroup:
        file, row_group, _ = self._groups[group].tolist()
        try:
            return _read_group(_open(self._paths[file]), self._paths[file], row_group, self._column)
        except DataError as error:
            raise UnreadableError(str(error)) from error

    @cached_property
    def _identities(self) -> list[str]:
        return [printable(name) for name in json.loads(self._columns["identities"].tobytes())]


class _RowGroup:
    """Decoded image column of a row group.

    The images are taken from pyarrow's dictionaries of their bytes: a scalar of the column takes five times as long.
    """

    def __init__(self, column: Any) -> None:
        self._column, self.nbytes = column, column.nbytes
        self._parts = [_dictionary_of_bytes(chunk) for chunk in column.chunks]
        self._ends = np.cumsum([len(chunk) for chunk in column.chunks]).tolist()

    def __len__(self) -> int:
        return len(self._column)

    def image(self, row: int) -> bytes | None:
        """Return the bytes of a row; None if it has none."""
        part = bisect_right(self._ends, row)
        dictionary, index_N = self._parts[part]
        index = index_N.item(row - self._ends[part])  # from the end: negative
        return None if index < 0 else dictionary[index].as_py()

    def path(self, row: int) -> str | None:
        """Return the path of a row; None if it has none, or no text."""
        import pyarrow

        value = self._column[row]
        if not isinstance(value, pyarrow.StructScalar):
            return None
        try:
            path = value["path"]
            return path.as_py() if is_text(path.type) else None
        except (KeyError, UnicodeDecodeError):
            return None


def _dictionary_of_bytes(chunk: Any) -> tuple[Any, np.ndarray]:
    """Return the different images of an image column, and the index of each row's, int32 (N,); −1 if it has no bytes.

    The field `bytes` alone: the path of an image may be no text, and the image is read without it.
    """
    import pyarrow

    nothing = pyarrow.array([], pyarrow.binary()), np.full(len(chunk), -1)
    if pyarrow.types.is_struct(chunk.type):
        number = chunk.type.get_field_index("bytes")
        if number < 0:
            return nothing
        chunk = chunk.flatten()[number]
    if not pyarrow.types.is_dictionary(chunk.type) or not (
        pyarrow.types.is_binary(chunk.type.value_type) or pyarrow.types.is_large_binary(chunk.type.value_type)
    ):
        return nothing
    return chunk.dictionary, chunk.indices.fill_null(-1).to_numpy()


class _GroupCache:
    """Row groups that were used last, up to a number of bytes."""

    def __init__(self, read: Callable[[int], _RowGroup]) -> None:
        self._read, self._lock, self._bytes = read, Lock(), 0
        self._groups: OrderedDict[int, _RowGroup] = OrderedDict()

    def get(self, group: int) -> _RowGroup:
        """Return a row group, and drop the oldest ones if there are too many."""
        with self._lock:
            if group in self._groups:
                self._groups.move_to_end(group)
                return self._groups[group]
        rows = self._read(group)
        with self._lock:
            if group not in self._groups:
                self._groups[group] = rows
                self._bytes += rows.nbytes
            while self._bytes > _CACHE_BYTES and len(self._groups) > 1:
                self._bytes -= self._groups.popitem(last=False)[1].nbytes
        return rows


def _build_catalog(paths: list[Path], folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return offset and size of every image (-1: not in place), label, row groups, identities; and the image column."""
    files = [_open(path) for path in paths]
    found = _column_names(files[0], paths[0])
    column = pick_column(found, IMAGE_COLUMNS, "image", paths[0])
    label_column = pick_column(found, LABEL_COLUMNS, "identity", paths[0])
    names = class_names(files[0].schema_arrow, label_column)
    labels, groups = [], []
    places: list[np.ndarray] = []
    for number, (file, path) in enumerate(zip(files, paths, strict=True)):
        _require_fitting_rows(file, path)
        if missing := {column, label_column}.difference(_column_names(file, path)):
            raise DataError(
                f"{path}: has no column {', '.join(missing)}, unlike {paths[0]}; rename its columns"
            )
        require_equal_names(names, paths[0], class_names(file.schema_arrow, label_column), path)
        values = _read_columns(path, file.read, [label_column])[label_column]
        labels.append(_decoded_labels(values, label_column, path))
        rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        groups += [(number, group, count) for group, count in enumerate(rows)]
        places += _places_in_file(file, path, column)
    label, names = number_labels(np.concatenate(labels), names, folder)
    if not len(label):
        raise DataError(f"{folder}: the .parquet files contain no rows")
    offset, size = (np.ascontiguousarray(one) for one in np.concatenate(places).T)
    columns = {
        "offset": offset, "size": size, "label": label, "groups": np.array(groups, np.int64).reshape(-1),
        "identities": np.frombuffer(json.dumps(names).encode(), np.uint8),
    }  # fmt: skip
    return columns, {"column": column}


def _decoded_labels(column: Any, name: str, path: Path) -> np.ndarray:
    """Return the values of a column of labels, (N,); texts as objects, of which rows with equal labels share one."""
    import pyarrow

    if column.null_count:
        raise DataError(f"{path}: {column.null_count:,} rows have no label")
    require_labels(column.type, name, path)
    if not pyarrow.types.is_dictionary(column.type):
        return column.to_numpy()
    parts = [np.empty(0, object)]
    for chunk in column.chunks:
        texts = np.array([*map(label_text, chunk.dictionary.to_pylist())], object)
        parts.append(texts[chunk.indices.to_numpy()])
    return np.concatenate(parts)


def _places_in_file(file: Any, path: Path, column: str) -> Iterator[np.ndarray]:
    """Yield the places of the images of each row group, as `_find_places` returns them."""
    start, in_place, previous_bytes = 0, True, 0
    for group in range(file.metadata.num_row_groups):
        metadata = file.metadata.row_group(group)
        places = np.full((metadata.num_rows, 2), -1, np.int64)
        if in_place:
            # Other columns of this group and of the one before may lie between the images of the two.
            span = previous_bytes + metadata.total_byte_size + _PAGE_HEADER_BYTES
            places = _find_places(path, _read_group(file, path, group, column), start, span)
            # A writer compresses all groups or none: do not search in the others.
            in_place = bool((places >= 0).all())
            start = int(places[-1].sum()) if in_place and len(places) else start
            previous_bytes = metadata.total_byte_size
        yield places


def _find_places(path: Path, rows: _RowGroup, start: int, span: int) -> np.ndarray:
    """Return the byte offset in the file and the size of each image of a row group: int64 (rows, 2); -1: not in place.

    A plain column stores each value as its length and its bytes. The values that pyarrow decodes are searched in this
    order from the byte `start` on, so an image whose place is known is the one that pyarrow reads. The column's
    metadata would give its offset, but pyarrow ends the process if that metadata is damaged.
    """
    raw = PositionalFile(path).bytes_at(start, max(min(span, path.stat().st_size - start), 0))
    nowhere = np.full((len(rows), 2), -1, np.int64)
    found, position = [], 0
    for row in range(len(rows)):
        value = rows.image(row)
        if value is None:
            return nowhere
        stored = len(value).to_bytes(_LENGTH_BYTES, "little") + value
        if not raw.startswith(stored, position):  # a new page begins
            position = raw.find(stored, position)
            if position < 0:
                return nowhere
        found.append((start + position + _LENGTH_BYTES, len(value)))
        position += len(stored)
    return np.array(found, np.int64).reshape(-1, 2)


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a .parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    return _column_names(_open(path), path)


def _column_names(file: Any, path: Path) -> list[str]:
    return list(_read(path, lambda: file.schema_arrow.names))


def read_row_groups(path: Path, columns: list[str]) -> Iterator[Any]:
    """Yield the row groups of a .parquet file as tables of pyarrow, with these columns.

    Raises:
        DataError: pyarrow is not installed, the file is damaged, or it grows too much when it is decompressed.
    """
    file = _open(path)
    _require_fitting_rows(file, path)
    for number in range(file.metadata.num_row_groups):
        _require_fitting_group(path, file.metadata.row_group(number).total_byte_size, number)
        table = _read_columns(path, partial(file.read_row_group, number), columns)
        _require_fitting_group(path, sum(decoded_bytes(column) for column in table.columns), number)
        yield table


def _open(path: Path) -> Any:
    """Open a file whose texts and images are read as dictionaries: a few bytes per row can encode long values."""
    import_pyarrow(path)
    import pyarrow.parquet

    def open_with_dictionaries() -> Any:
        schema = pyarrow.parquet.ParquetFile(path).schema
        columns = (schema.column(number) for number in range(len(schema)))
        # pyarrow has no dictionaries of values in lists.
        long = [
            one.path for one in columns if one.physical_type == "BYTE_ARRAY" and not one.max_repetition_level
        ]
        return pyarrow.parquet.ParquetFile(path, read_dictionary=long)

    return _read(path, open_with_dictionaries)


def _read_group(file: Any, path: Path, group: int, column: str) -> _RowGroup:
    metadata = file.metadata.row_group(group)
    _require_fitting_group(path, metadata.total_byte_size, group)
    rows = _read_columns(path, partial(file.read_row_group, group), [column])[column]
    if len(rows) != metadata.num_rows:
        raise DataError(
            f"{path}: row group {group} has {len(rows):,} images for {metadata.num_rows:,} rows; copy the file again"
        )
    return _RowGroup(rows)


def _require_fitting_rows(file: Any, path: Path) -> None:
    """Refuse a file whose labels, compressed a thousand times, would fill the memory: every image has some bytes."""
    size = path.stat().st_size
    if file.metadata.num_rows > size:
        raise DataError(f"{path}: claims {file.metadata.num_rows:,} rows in {size:,} bytes; it has no images")


def _require_fitting_group(path: Path, size: int, number: int) -> None:
    """Refuse a row group that grows too much when it is decompressed: images are compressed already."""
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: row group {number} decompresses to {size:,} bytes, more than the {limit:,} that "
            "a file of this size may need; write the images without compression and dictionary"
        )


def _read_columns(path: Path, read: Callable[[list[str]], Any], columns: list[str]) -> Any:
    """Return a table of these columns, which the schema of the file has: a damaged one can name a column of nothing."""
    table = _read(path, partial(read, columns))
    _read(path, partial(table.validate, full=True))  # an index can point outside its dictionary
    if missing := [name for name in columns if table.column_names.count(name) != 1]:
        raise DataError(f"{path}: column {printable(missing[0])} cannot be read; copy the file again")
    return table


def _read(path: Path, action: Callable[[], Any]) -> Any:
    import pyarrow

    try:
        return action()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
