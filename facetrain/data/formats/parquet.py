"""Parquet shards with an image and an identity in each row; needs `pip install facetrain[parquet]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.errors import DataError, missing_package
from facetrain.files import error_reason

_IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "image_bytes", "bytes")
_LABEL_COLUMNS = ("label", "identity", "class", "cls", "id")
_MAX_LABEL = 2**31
_SPARE_BYTES = 1 << 27
_ROW_GROUPS_IN_MEMORY = 8
"""Row groups in memory per process. A single row cannot be read: use `data.shuffle: blocks`, or pack the dataset."""


class ParquetDataset:
    """Images of a folder of .parquet files; the image column has bytes, or Hugging Face's {bytes, path}.

    Raises:
        DataError: if pyarrow is not installed, a file is damaged, or a column is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths = sorted(folder.glob("*.parquet"))
        files = [_open(path) for path in self._paths]
        names = files[0].schema_arrow.names
        self._column = _pick(names, _IMAGE_COLUMNS, "image", self._paths[0])
        label_column = _pick(names, _LABEL_COLUMNS, "identity", self._paths[0])
        labels, groups = [], []
        for number, file in enumerate(files):
            _require_fitting_rows(file, self._paths[number])
            labels.append(_column_of(file, label_column, self._paths[number]).to_numpy())
            rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
            groups += [(number, group, count) for group, count in enumerate(rows)]
        self.labels = _numbered(np.concatenate(labels), folder)
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])
        self.num_images = len(self.labels)
        if not self.num_images:
            raise DataError(f"{folder}: the .parquet files contain no rows")
        self.num_classes = int(self.labels.max()) + 1
        self._group = lru_cache(maxsize=_ROW_GROUPS_IN_MEMORY)(self._read_group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder."""
        return ParquetDataset, (self._folder,)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            DataError: if the file is damaged, or the row contains no bytes.
        """
        group = int(np.searchsorted(self._ends, index, side="right"))
        value = self._group(group)[index - int(self._ends[group] - self._groups[group, 2])].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes):
            raise DataError(f"{self.location(index)}: column {self._column} contains no bytes")
        return value

    def location(self, index: int) -> str:
        """Return the file, the row group and the row."""
        group = int(np.searchsorted(self._ends, index, side="right"))
        file, row_group, rows = self._groups[group].tolist()
        return f"{self._paths[file]}: row group {row_group}, row {index - int(self._ends[group]) + rows}"

    def _read_group(self, group: int) -> Any:
        file, row_group, _ = self._groups[group].tolist()
        path = self._paths[file]
        _require_fitting_group(path, _open(path).metadata.row_group(row_group), row_group)
        return _read(path, lambda: _open(path).read_row_group(row_group, [self._column]))[self._column]


def column_names(path: Path) -> list[str]:
    """Return the names of the columns of a .parquet file.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged.
    """
    return list(_open(path).schema_arrow.names)


def read_row_groups(path: Path, columns: list[str]) -> Iterator[Any]:
    """Yield the row groups of a .parquet file as tables of pyarrow, with these columns.

    Raises:
        DataError: pyarrow is not installed, the file is damaged, or it grows too much when it is decompressed.
    """
    file = _open(path)
    _require_fitting_rows(file, path)
    for number in range(file.metadata.num_row_groups):
        _require_fitting_group(path, file.metadata.row_group(number), number)
        yield _read(path, partial(file.read_row_group, number, columns))


def _open(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'parquet')}") from error
    return _read(path, lambda: pyarrow.parquet.ParquetFile(path))


def _require_fitting_rows(file: Any, path: Path) -> None:
    """Refuse a file whose labels, compressed a thousand times, would fill the memory: every image has some bytes."""
    size = path.stat().st_size
    if file.metadata.num_rows > size:
        raise DataError(f"{path}: claims {file.metadata.num_rows:,} rows in {size:,} bytes; it has no images")


def _require_fitting_group(path: Path, group: Any, number: int) -> None:
    """Refuse a row group that grows too much when it is decompressed: images are compressed already."""
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if group.total_byte_size > limit:
        raise DataError(
            f"{path}: row group {number} decompresses to {group.total_byte_size:,} bytes, more than the {limit:,} that "
            "a file of this size may need; write the images without compression"
        )


def _column_of(file: Any, name: str, path: Path) -> Any:
    return _read(path, lambda: file.read([name]))[name]


def _read(path: Path, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except (OSError, ValueError) as error:  # base classes of pyarrow's errors
        raise DataError(f"{path}: {error_reason(error)}") from error


def _pick(names: list[str], wanted: tuple[str, ...], what: str, path: Path) -> str:
    for name in wanted:
        if name in names:
            return name
    raise DataError(
        f"{path}: no column for the {what}: it has {', '.join(names)}; rename one to {' or '.join(wanted)}"
    )


def _numbered(labels: np.ndarray, folder: Path) -> np.ndarray:
    """Return the labels, int32 (N,): whole numbers as they are, or the rank of names in sorted order."""
    if labels.dtype.kind in "iu":
        if len(labels) and (labels.min() < 0 or labels.max() >= _MAX_LABEL):
            raise DataError(
                f"{folder}: the labels range from {labels.min()} to {labels.max()}; they must be from 0 to 2^31"
            )
        return labels.astype(np.int32)
    return np.unique(labels.astype(str), return_inverse=True)[1].astype(np.int32)
