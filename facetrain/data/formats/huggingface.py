"""Datasets that Hugging Face's `datasets` saved to disk: Arrow files with an image and a label in each row.

The files are mapped into memory once to find the place of every image, which is then read without pyarrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns
from facetrain.data.formats.arrow_columns import (
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    arrow_batches,
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
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path
from facetrain.data.formats.splits import SPLITS_FILE, STATE_FILE, data_files, train_folder
from facetrain.errors import DataError


def open_saved(path: Path) -> CatalogDataset:
    """Open a folder that `Dataset.save_to_disk` wrote, or the split train of a `DatasetDict`.

    Raises:
        DataError: pyarrow is not installed, a file is damaged, or a column is missing.
    """
    folder = train_folder(path)
    files = data_files(folder)
    columns = cached_columns(catalog_path(folder), files, partial(_build_catalog, files))
    return CatalogDataset(path, files, columns)


FORMAT = Format("Hugging Face", open_saved, parts=(STATE_FILE, SPLITS_FILE))


def _build_catalog(files: Sequence[Path]) -> Columns:
    """Return the catalog; the columns of texts `image` and `path` become places in the files."""
    places, labels, names = [], [], list[str]()
    for number, path in enumerate(files):
        of_file, values, file_names = _read_file(path)
        names = names if number else file_names
        require_equal_names(names, files[0], file_names, path)
        places.append(np.insert(of_file, 0, number, axis=1))
        labels.append(values)
    label, names = number_labels(np.concatenate(labels), names, files[0].parent)
    file, *columns = (np.ascontiguousarray(column) for column in np.concatenate(places).T)
    of_column = dict(zip(("offset", "size", "name_offset", "name_size"), columns, strict=True))
    return Columns.of(label=label, file=file.astype(np.int32), identities=names, **of_column)


def _read_file(path: Path) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the places of the images and names, int64 (N, 4), the labels, (N,), and the names of the classes."""
    pa = import_pyarrow(path)
    places, labels, names, label = [np.empty((0, 4), np.int64)], [], list[str](), ""
    for batch, file in arrow_batches(path):
        column = batch.column(pick_column(batch.schema.names, IMAGE_COLUMNS, "image", path))
        label = pick_column(batch.schema.names, LABEL_COLUMNS, "identity", path)
        names = class_names(batch.schema, label)
        images, paths = image_fields(column)
        if images is None:
            raise DataError(
                f"{path}: the image column is {column.type}; expected bytes, or a struct of bytes and path"
            )
        if images.null_count:
            raise DataError(
                f"{path}: {images.null_count:,} images are not in the file; save the dataset with a version of "
                "`datasets` that embeds them"
            )
        places.append(np.hstack([_places(images, file, path), _places(paths, file, path, len(images))]))
        labels.append(batch.column(label))
    with arrow_errors(path):
        column = pa.chunked_array(labels) if labels else pa.chunked_array([], pa.int64())
        return np.concatenate(places), label_values(column, label, path), names


def _places(array: Any, file: Any, path: Path, count: int = 0) -> np.ndarray:
    """Return the place in the file of each value of an array, int64 (N, 2); zeros for an array that is None."""
    if array is None:
        return np.zeros((count, 2), np.int64)
    with arrow_errors(path):
        places, data = value_places(array)
    start = 0 if data is None else data.address - file.address
    if not 0 <= start <= file.size - (0 if data is None else data.size):
        raise DataError(f"{path}: the file is compressed; save it without compression")
    return np.maximum(places, 0) + np.array([start, 0])  # a null has the size −1
