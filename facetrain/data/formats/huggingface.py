"""Datasets that Hugging Face's `datasets` saved to disk: Arrow files with an image and a label in each row.

The files are memory-mapped once to find the byte offset of every image; images are then read without pyarrow.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats.arrow_columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    class_names,
    import_pyarrow,
    number_labels,
    pick_column,
    require_equal_names,
    require_labels,
)
from facetrain.data.formats.splits import STATE_FILE, train_folder
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import error_reason, os_errors_as, parse_json, printable, read_regular_text

_MAX_OPEN_FILES = 256


class SavedDataset:
    """Images of a folder that `Dataset.save_to_disk` wrote, or of the split train of a `DatasetDict`.

    Raises:
        DataError: pyarrow is not installed, a file is damaged, or a column is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        folder = train_folder(path)
        self._paths = _data_files(folder)
        name = folder / ".arrow.catalog"
        columns = cached_columns(name, self._paths, lambda: (_build_catalog(self._paths), {}))
        self._columns = columns.arrays
        self.labels = self._columns["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1
        self._open = lru_cache(maxsize=_MAX_OPEN_FILES)(PositionalFile)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder."""
        return SavedDataset, (self._path,)

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: the file was truncated.
        """
        size = self._columns["size"].item(index)
        data = self._file(index).bytes_at(self._columns["offset"].item(index), size)
        if len(data) < size:
            raise UnreadableError(f"{self.location(index)}: the file is truncated; copy it again")
        return data

    def prefetch(self, first: int, count: int) -> None:
        """Ask the operating system to read the images."""
        for index in range(first, first + count):
            self._file(index).prefetch_bytes(
                self._columns["offset"].item(index), self._columns["size"].item(index)
            )

    def name(self, index: int) -> str | None:
        """Return the path that the image column has; None without one."""
        size = self._columns["name_size"].item(index)
        data = self._file(index).bytes_at(self._columns["name_offset"].item(index), size)
        return printable(data.decode("utf-8", "surrogateescape")) if size else None

    def identity_name(self, label: int) -> str:
        """Return the name that the label column has for an identity, or its number."""
        return self._identities[label] if label < len(self._identities) else str(label)

    def location(self, index: int) -> str:
        """Return the file and the byte offset."""
        return f"{self._file(index).path}: image at byte {self._columns['offset'][index]:,}"

    def _file(self, index: int) -> PositionalFile:
        return self._open(self._paths[self._columns["file"].item(index)])

    @cached_property
    def _identities(self) -> list[str]:
        return [printable(name) for name in json.loads(self._columns["identities"].tobytes())]


def _data_files(folder: Path) -> list[Path]:
    """Return the Arrow files that state.json lists."""
    path = folder / STATE_FILE
    try:
        with os_errors_as(DataError, path):
            state = parse_json(read_regular_text(path))
        names = [entry["filename"] for entry in state["_data_files"]]
        if not names or not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ValueError("_data_files must be names of files in the folder")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise ValueError("it has an index of selected rows; call flatten_indices() before save_to_disk()")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the state of a saved dataset ({error_reason(error)})") from None
    return [folder / name for name in names]


def _build_catalog(paths: list[Path]) -> dict[str, np.ndarray]:
    """Return file, offset, size, name_offset, name_size and label of every image, and the names of the identities."""
    places, labels, names = [], [], list[str]()
    for number, path in enumerate(paths):
        batches, file_names = _read_batches(path)
        names = names if number else file_names
        require_equal_names(names, paths[0], file_names, path)
        for place, batch_labels in batches:
            places.append(np.column_stack([np.full(len(place), number), place]))
            labels.append(batch_labels)
    if not sum(map(len, labels)):
        raise DataError(f"{paths[0].parent}: the Arrow files contain no rows")
    label, names = number_labels(np.concatenate(labels), names, paths[0].parent)
    file, offset, size, name_offset, name_size = (np.ascontiguousarray(c) for c in np.concatenate(places).T)
    return {
        "file": file.astype(np.int32), "offset": offset, "size": size,
        "name_offset": name_offset, "name_size": name_size.astype(np.int32), "label": label,
        "identities": np.frombuffer(json.dumps(names).encode(), np.uint8),
    }  # fmt: skip


def _read_batches(path: Path) -> tuple[list[tuple[np.ndarray, np.ndarray]], list[str]]:
    """Return the places of images and names, int64 (N, 4), and the labels of each batch; and the class names."""
    pa, found = import_pyarrow(path), []
    try:
        with pa.memory_map(str(path)) as mapped:
            base, size = mapped.read_buffer().address, mapped.size()
            mapped.seek(0)
            reader = pa.ipc.open_stream(mapped)
            image = pick_column(reader.schema.names, IMAGE_COLUMNS, "image", path)
            label = pick_column(reader.schema.names, LABEL_COLUMNS, "identity", path)
            names = class_names(reader.schema, label)
            for batch in reader:
                # Before any column is used: pyarrow ends the process on lengths and offsets that do not fit.
                batch.validate(full=True)
                column = batch.column(image)
                is_struct = pa.types.is_struct(column.type)
                bytes_place = _places(column.field("bytes") if is_struct else column, base, size, path)
                path_place = np.zeros_like(bytes_place)
                if is_struct and column.type.get_field_index("path") >= 0:
                    path_place = _places(column.field("path"), base, size, path, may_be_null=True)
                labels = batch.column(label)
                if labels.null_count:
                    raise DataError(f"{path}: {labels.null_count:,} rows have no label")
                require_labels(labels.type, label, path)
                rows = np.column_stack([bytes_place, path_place])
                found.append((rows, labels.to_numpy(zero_copy_only=False).copy()))
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
    return found, names


def _places(array: Any, base: int, size: int, path: Path, *, may_be_null: bool = False) -> np.ndarray:
    """Return the byte offset in the file and the size of each value of a column of bytes or text: int64 (N, 2)."""
    if array.null_count and not may_be_null:
        raise DataError(
            f"{path}: {array.null_count:,} images are not in the file; save the dataset with a version of `datasets` "
            "that embeds them"
        )
    if may_be_null and str(array.type) == "null":
        return np.zeros((len(array), 2), np.int64)
    kind = {"binary": np.int32, "string": np.int32, "large_binary": np.int64, "large_string": np.int64}.get(
        str(array.type)
    )
    if kind is None:
        raise DataError(
            f"{path}: the image column is {array.type}; expected bytes, or a struct of bytes and path"
        )
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return np.zeros((len(array), 2), np.int64)
    ends = np.frombuffer(offsets, kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    start = data.address - base
    if not 0 <= start <= size - data.size:
        raise DataError(f"{path}: the file is compressed; save it without compression")
    lengths = np.diff(ends)
    if len(ends) != len(array) + 1 or ends[0] < 0 or ends[-1] > data.size or (lengths < 0).any():
        raise DataError(f"{path}: a column is damaged; copy the file again")
    return np.column_stack([start + ends[:-1], lengths])
