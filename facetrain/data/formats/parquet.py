"""Parquet shards with an image and an identity in each row; needs `pip install facetrain[parquet]`.

Images in a column without compression and dictionary are read in place. Other columns can be read only in groups of
rows, of which the last used ones stay in memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.arrow_columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    arrow_errors,
    class_names,
    image_fields,
    import_pyarrow,
    label_values,
    number_labels,
    pick_column,
    require_equal_names,
    value_places,
)
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path, files_in
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.data.formats.splits import train_files
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import printable

_CACHE_BYTES = 1 << 28
"""Decoded row groups in memory per process; one larger group stays alone."""
_LENGTH_BYTES = 4


class ParquetDataset(CatalogDataset):
    """Images of .parquet files; an image that is not in place has the offset −1.

    Further columns, for each row group: `group_file` its file, `group` its number in the file, `group_end` the number
    of images up to its end. `column` is the name of the image column.
    """

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the row, or its group of rows, is damaged, or the row contains no bytes.
        """
        if self.columns.arrays["offset"].item(index) >= 0:
            return super().read(index)
        group, row = self._row_place(index)
        image = self._groups.get(group).image(row)
        if image is None:
            raise UnreadableError(f"{self.location(index)}: column {self._column} contains no bytes")
        return image

    def name(self, index: int) -> str | None:
        """Return the path that the image column has; None without one."""
        group, row = self._row_place(index)
        path = self._groups.get(group).path(row)
        return printable(path) if path else None

    def location(self, index: int) -> str:
        """Return the file, the row group and the row."""
        group, row = self._row_place(index)
        arrays = self.columns.arrays
        return f"{self.files[arrays['group_file'][group]]}: row group {arrays['group'][group]}, row {row}"

    def _extents(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        file, start, end = super()._extents(rows)
        in_place = start >= 0
        return file[in_place], start[in_place], end[in_place]

    def _row_place(self, index: int) -> tuple[int, int]:
        """Return the number of the row group of an image among all, and the row in it."""
        group = bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def _read_group(self, group: int) -> _RowGroup:
        path = self.files[self.columns.arrays["group_file"][group]]
        try:
            return _read_group(_open(path), path, self.columns.arrays["group"].item(group), self._column)
        except DataError as error:
            raise UnreadableError(str(error)) from error

    @cached_property
    def _groups(self) -> _GroupCache:
        return _GroupCache(self)

    @cached_property
    def _ends(self) -> list[int]:
        return self.columns.arrays["group_end"].tolist()

    @cached_property
    def _column(self) -> str:
        return self.columns.value("column")


def open_parquet(folder: Path) -> CatalogDataset:
    """Open a folder of .parquet files; the image column has bytes, or Hugging Face's {bytes, path}.

    Of several splits in Hugging Face's layout (train-00000-of-00001.parquet), train is the dataset.

    Raises:
        DataError: if pyarrow is not installed, a file is missing or damaged, or a column is missing.
    """
    files, skipped = train_files(files_in(folder, (".parquet",)))
    require_all_shards(files)
    entries = [(file.name, file.kind, file.reason) for file in skipped]
    columns = cached_columns(catalog_path(folder), files, partial(_build_catalog, files, folder, entries))
    return ParquetDataset(folder, files, columns)


FORMAT = Format("Parquet", open_parquet, parts=("*.parquet",))


class _RowGroup:
    """Decoded image column of a row group. Images are copied from its buffers: a scalar of pyarrow takes longer."""

    def __init__(self, column: Any) -> None:
        self.nbytes = column.nbytes
        fields = [image_fields(chunk) for chunk in column.chunks]
        self._images = [None if images is None else value_places(images) for images, _ in fields]
        self._paths = [paths for _, paths in fields]
        self._ends = np.cumsum([len(chunk) for chunk in column.chunks]).tolist()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def image(self, row: int) -> bytes | None:
        """Return the bytes of a row; None if it has none."""
        part = bisect_right(self._ends, row)
        images = self._images[part]
        if images is None:
            return None
        places, data = images
        start, size = places[row - self._ends[part]].tolist()  # from the end: negative
        return None if size < 0 else bytes(memoryview(data)[start : start + size]) if size else b""

    def path(self, row: int) -> str | None:
        """Return the path of a row; None if it has none, or no text."""
        part = bisect_right(self._ends, row)
        paths = self._paths[part]
        try:
            return None if paths is None else paths[row - self._ends[part] + len(paths)].as_py()
        except UnicodeDecodeError:
            return None


class _GroupCache:
    """Row groups that were used last, up to a number of bytes."""

    def __init__(self, dataset: ParquetDataset) -> None:
        self._dataset, self._lock = dataset, Lock()
        self._groups: dict[int, _RowGroup] = {}

    def get(self, group: int) -> _RowGroup:
        """Return a row group, and drop the oldest ones if there are too many."""
        rows = self._groups.get(group) or self._dataset._read_group(group)
        with self._lock:
            self._groups.pop(group, None)
            self._groups[group] = rows  # the newest is the last
            while len(self._groups) > 1 and sum(rows.nbytes for rows in self._groups.values()) > _CACHE_BYTES:
                del self._groups[next(iter(self._groups))]
        return rows


def _build_catalog(files: Sequence[Path], folder: Path, skipped: list[tuple[str, str, str]]) -> Columns:
    names, labels, places, groups = list[str](), [], [np.empty((0, 3), np.int64)], []
    image = label = ""
    for number, path in enumerate(files):
        file = _open(path)
        columns = file.schema_arrow.names
        if not number:
            image = pick_column(columns, IMAGE_COLUMNS, "image", path)
            label = pick_column(columns, LABEL_COLUMNS, "identity", path)
            names = class_names(file.schema_arrow, label)
        if missing := {image, label}.difference(columns):
            raise DataError(
                f"{path}: has no column {', '.join(missing)}, unlike {files[0]}; rename its columns"
            )
        require_equal_names(names, files[0], class_names(file.schema_arrow, label), path)
        with arrow_errors(path):
            labels.append(label_values(file.read([label]).column(label), label, path))
        for group in range(file.metadata.num_row_groups):
            of_group = _places_in_file(file, path, group, image)
            places.append(np.insert(of_group, 0, number, axis=1))
            groups.append((number, group, len(of_group)))
    labeled, names = number_labels(np.concatenate(labels), names, folder)
    file_N, offset, size = (np.ascontiguousarray(column) for column in np.concatenate(places).T)
    group_file, group_number, rows = np.array(groups, np.int64).reshape(-1, 3).T
    return Columns.of(
        label=labeled, file=file_N.astype(np.int32), offset=offset, size=size, identities=names, skipped=skipped,
        column=image, group_file=group_file.copy(), group=group_number.copy(), group_end=np.cumsum(rows),
    )  # fmt: skip


def _places_in_file(file: Any, path: Path, group: int, column: str) -> np.ndarray:
    """Return the byte offset in the file and the size of each image of a row group: int64 (rows, 2); -1: not in place.

    A plain column stores each value as its length and its bytes, and pages of them one after the other. The values that
    pyarrow decodes are searched in this order, so an image whose place is known is the one that pyarrow reads.
    """
    with arrow_errors(path):
        metadata = file.metadata.row_group(group)
        nowhere = np.full((metadata.num_rows, 2), -1, np.int64)
        chunks = [metadata.column(number) for number in range(metadata.num_columns)]
        chunk = next((one for one in chunks if one.path_in_schema in (column, f"{column}.bytes")), None)
        if chunk is None or chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page:
            return nowhere
        start, size = chunk.data_page_offset, chunk.total_compressed_size
    raw = PositionalFile(path).bytes_at(start, size)
    rows = _read_group(file, path, group, column)
    places, position = [], 0
    for row in range(len(rows)):
        value = rows.image(row)
        if value is None:
            return nowhere
        stored = len(value).to_bytes(_LENGTH_BYTES, "little") + value
        if not raw.startswith(stored, position):  # a new page begins
            position = raw.find(stored, position)
            if position < 0:
                return nowhere
        places.append((start + position + _LENGTH_BYTES, len(value)))
        position += len(stored)
    return np.array(places, np.int64).reshape(-1, 2)


def _open(path: Path) -> Any:
    import_pyarrow(path)
    import pyarrow.parquet

    with arrow_errors(path):
        return pyarrow.parquet.ParquetFile(path)


def _read_group(file: Any, path: Path, group: int, column: str) -> _RowGroup:
    with arrow_errors(path):
        table = file.read_row_group(group, [column])
        table.validate(full=True)  # an index can point outside its dictionary
        return _RowGroup(table.column(column))
