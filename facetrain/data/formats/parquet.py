"""Parquet shards with an image and an identity in each row. pyarrow comes with `facetrain[parquet]`."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.errors import DataError

_IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "image_bytes", "bytes")
_LABEL_COLUMNS = ("label", "identity", "class", "cls", "id")
_GROUPS_HELD = 8
"""Row groups a process keeps. No row can be read alone: take `data.shuffle: blocks`, or pack the dataset."""


class ParquetDataset:
    """A folder of .parquet files; the image's column holds bytes, or the {bytes, path} of Hugging Face."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths = sorted(folder.glob("*.parquet"))
        files = [_open(path) for path in self._paths]
        names = files[0].schema_arrow.names
        self._column = _pick(names, _IMAGE_COLUMNS, "image", self._paths[0])
        label_column = _pick(names, _LABEL_COLUMNS, "identity", self._paths[0])
        labels, groups = [], []
        for number, file in enumerate(files):
            labels.append(_column_of(file, label_column, self._paths[number]).to_numpy())
            rows = [file.metadata.row_group(g).num_rows for g in range(file.metadata.num_row_groups)]
            groups += [(number, group, count) for group, count in enumerate(rows)]
        self.labels = _numbered(np.concatenate(labels), folder)
        self._groups = np.array(groups, dtype=np.int64).reshape(-1, 3)
        self._ends = np.cumsum(self._groups[:, 2])
        self.num_images = len(self.labels)
        if not self.num_images:
            raise DataError(f"{folder}: its .parquet files hold no rows")
        self.num_classes = int(self.labels.max()) + 1
        self._group = lru_cache(maxsize=_GROUPS_HELD)(self._read_group)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the folder."""
        return ParquetDataset, (self._folder,)

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        value = self._group(group)[number - int(self._ends[group] - self._groups[group, 2])].as_py()
        value = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(value, bytes):
            raise DataError(f"{self.location(number)}: column {self._column} holds no bytes")
        return value

    def location(self, number: int) -> str:
        """Name the file, the row group and the row."""
        group = int(np.searchsorted(self._ends, number, side="right"))
        file, inside, rows = self._groups[group].tolist()
        return f"{self._paths[file]}: row group {inside}, row {number - int(self._ends[group]) + rows}"

    def _read_group(self, group: int) -> Any:
        file, inside, _ = self._groups[group].tolist()
        path = self._paths[file]
        return _read(path, lambda: _open(path).read_row_group(inside, [self._column]))[self._column]


def _open(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: reading .parquet needs pyarrow; install it with `pip install facetrain[parquet]`"
        ) from error
    return _read(path, lambda: pyarrow.parquet.ParquetFile(path))


def _column_of(file: Any, name: str, path: Path) -> Any:
    return _read(path, lambda: file.read([name]))[name]


def _read(path: Path, action: Any) -> Any:
    try:
        return action()
    except (OSError, ValueError) as error:  # pyarrow's own errors are of these two kinds
        raise DataError(f"{path}: {' '.join(str(error).split())}") from error


def _pick(names: list[str], wanted: tuple[str, ...], what: str, path: Path) -> str:
    for name in wanted:
        if name in names:
            return name
    raise DataError(
        f"{path}: no column for the {what}: it has {', '.join(names)}, not one of {', '.join(wanted)}"
    )


def _numbered(labels: np.ndarray, folder: Path) -> np.ndarray:
    """Keep labels that are whole numbers; number names in their order."""
    if labels.dtype.kind in "iu":
        if len(labels) and (labels.min() < 0 or labels.max() >= 2**31):
            raise DataError(f"{folder}: labels go from {labels.min()} to {labels.max()}, not from 0 to 2^31")
        return labels.astype(np.int32)
    return np.unique(labels.astype(str), return_inverse=True)[1].astype(np.int32)
