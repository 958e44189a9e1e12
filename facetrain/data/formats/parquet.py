"""Parquet shards with an image and an identity in each row; needs `pip install facetrain[parquet]`.

Images in a column without compression and dictionary are read in place. Other columns can be read only in groups of
rows, of which the last used ones stay in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats import arrow_columns
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

    Further columns: `group` and `row`, the row group of an image and its row there. `column` is the name of the image
    column, `group_bytes` the size of the largest row group.
    """

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the row, or its group of rows, is damaged, or the row contains no bytes.
        """
        if self.columns.arrays["offset"].item(index) >= 0:
            return super().read(index)
        image = self._value(index, 0)
        if image is None:
            raise UnreadableError(f"{self.location(index)}: the image column contains no bytes")
        return bytes(image)

    def name(self, index: int) -> str | None:
        """Return the path that the image column has; None without one."""
        with contextlib.suppress(UnicodeDecodeError):
            return printable(self._value(index, 1) or "") or None
        return None

    def location(self, index: int) -> str:
        """Return the file, the row group and the row."""
        arrays = self.columns.arrays
        path = self.files[arrays["file"][index]]
        return f"{path}: row group {arrays['group'][index]}, row {arrays['row'][index]}"

    def _extents(self, rows: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        file, start, end = super()._extents(rows)
        in_place = start >= 0
        return file[in_place], start[in_place], end[in_place]

    def _value(self, index: int, field: int) -> Any:
        """Return the image (field 0) or the path (field 1) of a row; None if it has none."""
        arrays = self.columns.arrays
        column = self._groups(arrays["file"].item(index), arrays["group"].item(index))[field]
        return None if column is None else column[arrays["row"].item(index)].as_py()

    @cached_property
    def _groups(self) -> Callable[[int, int], tuple[Any, Any]]:
        """Function that returns images and paths of a row group; the groups that were used last stay in memory."""
        most = max(_CACHE_BYTES // max(self.columns.value("group_bytes"), 1), 1)
        return lru_cache(maxsize=most)(self._read_group)

    def _read_group(self, number: int, group: int) -> tuple[Any, Any]:
        path = self.files[number]
        try:
            return _read_group(_open(path), path, group, self.columns.value("column"))
        except DataError as error:
            raise UnreadableError(str(error)) from error


def open_parquet(folder: Path) -> CatalogDataset:
    """Open a folder of .parquet files; the image column has bytes, or Hugging Face's {bytes, path}.

    Of several splits in Hugging Face's layout (train-00000-of-00001.parquet), train is the dataset.

    Raises:
        DataError: if pyarrow is not installed, a file is missing or damaged, or a column is missing.
    """
    files, skipped = train_files(files_in(folder, (".parquet",)))
    require_all_shards(files)
    entries = [(file.name, file.kind, file.reason) for file in skipped]
    columns = cached_columns(catalog_path(folder), files, partial(_build_catalog, files, entries))
    return ParquetDataset(folder, files, columns)


FORMAT = Format("Parquet", open_parquet, parts=("*.parquet",))


def _build_catalog(files: Sequence[Path], skipped: list[tuple[str, str, str]]) -> Columns:
    names = _open(files[0]).schema_arrow.names
    image = arrow_columns.pick_column(names, arrow_columns.IMAGE_COLUMNS, "image", files[0])
    label = arrow_columns.pick_column(names, arrow_columns.LABEL_COLUMNS, "identity", files[0])
    group_bytes = 0

    def read_file(path: Path) -> arrow_columns.LabeledRows:
        nonlocal group_bytes
        file, places = _open(path), [np.empty((0, 4), np.int64)]
        if missing := {image, label}.difference(file.schema_arrow.names):
            raise DataError(
                f"{path}: has no column {', '.join(missing)}, unlike {files[0]}; rename its columns"
            )
        for group in range(file.metadata.num_row_groups):
            places.append(_places(file, path, group, image))
            group_bytes = max(group_bytes, file.metadata.row_group(group).total_byte_size)
        with arrow_columns.arrow_errors(path):
            labels = arrow_columns.label_values(file.read([label]).column(label), label, path)
        return np.concatenate(places), labels, arrow_columns.class_names(file.schema_arrow, label)

    columns = arrow_columns.build_catalog(
        files, "offset size group row", read_file, skipped=skipped, column=image
    )
    return Columns.of(**columns.arrays, group_bytes=group_bytes)


def _places(file: Any, path: Path, group: int, column: str) -> np.ndarray:
    """Return the byte offset in the file and the size of each image of a row group, the group and the row: (rows, 4).

    The offset is −1 if an image is not in place. A plain column stores each value as its length and its bytes, and
    pages of them one after the other. The values that pyarrow decodes are searched in this order, so an image whose
    place is known is the one that pyarrow reads.
    """
    with arrow_columns.arrow_errors(path):
        metadata = file.metadata.row_group(group)
        places = np.full((metadata.num_rows, 4), -1, np.int64)
        places[:, 2], places[:, 3] = group, np.arange(metadata.num_rows)
        chunks = [metadata.column(number) for number in range(metadata.num_columns)]
        chunk = next((one for one in chunks if one.path_in_schema in (column, f"{column}.bytes")), None)
        if chunk is None or chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page:
            return places
        start, size = chunk.data_page_offset, chunk.total_compressed_size
    images = _read_group(file, path, group, column)[0]
    if images is None or images.null_count:
        return places
    raw, position, found = PositionalFile(path).bytes_at(start, size), 0, []
    for value in images.to_pylist():
        stored = len(value).to_bytes(_LENGTH_BYTES, "little") + value
        if not raw.startswith(stored, position):  # a new page begins
            position = raw.find(stored, position)
            if position < 0:
                return places
        found.append((start + position + _LENGTH_BYTES, len(value)))
        position += len(stored)
    places[:, :2] = np.array(found, np.int64).reshape(-1, 2)
    return places


def _open(path: Path) -> Any:
    arrow_columns.import_pyarrow(path)
    import pyarrow.parquet

    with arrow_columns.arrow_errors(path):
        return pyarrow.parquet.ParquetFile(path)


def _read_group(file: Any, path: Path, group: int, column: str) -> tuple[Any, Any]:
    """Return the images and the paths of a row group; see `arrow_columns.image_fields`."""
    with arrow_columns.arrow_errors(path):
        table = file.read_row_group(group, [column])
        table.validate(full=True)  # an index can point outside its dictionary
        return arrow_columns.image_fields(table.column(column))
