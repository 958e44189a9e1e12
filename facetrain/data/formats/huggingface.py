"""Datasets that Hugging Face's `datasets` saved to disk: Arrow files with an image and a label in each row.

The files are mapped into memory once to find the place of every image, which is then read without pyarrow.
"""

# N images

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.formats import arrow_columns
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
    # The columns of texts `image` and `path` become places in the files.
    build = partial(arrow_columns.build_catalog, files, "offset size name_offset name_size", _read_file)
    return CatalogDataset(path, files, cached_columns(catalog_path(folder), files, build))


FORMAT = Format("Hugging Face", open_saved, parts=(STATE_FILE, SPLITS_FILE))


def _read_file(path: Path) -> arrow_columns.LabeledRows:
    pa = arrow_columns.import_pyarrow(path)
    places, labels, names, label = [np.empty((0, 4), np.int64)], [], list[str](), ""
    for batch, file in arrow_columns.arrow_batches(path):
        column = batch.column(
            arrow_columns.pick_column(batch.schema.names, arrow_columns.IMAGE_COLUMNS, "image", path)
        )
        label = arrow_columns.pick_column(batch.schema.names, arrow_columns.LABEL_COLUMNS, "identity", path)
        names = arrow_columns.class_names(batch.schema, label)
        images, paths = arrow_columns.image_fields(column)
        if images is None or images.null_count:
            raise DataError(
                f"{path}: images are missing in the column of type {str(column.type)[:100]}; expected bytes, or a "
                "struct of bytes and path: save the dataset with a version of `datasets` that embeds the images"
            )
        no_names = np.zeros((len(images), 2), np.int64)
        places.append(
            np.hstack(
                [_places(images, file, path), no_names if paths is None else _places(paths, file, path)]
            )
        )
        labels.append(batch.column(label))
    column = pa.chunked_array(labels) if labels else pa.chunked_array([], pa.int64())
    return np.concatenate(places), arrow_columns.label_values(column, label, path), names


def _places(array: Any, file: Any, path: Path) -> np.ndarray:
    """Return the first byte in the file and the size of each value of bytes or texts: int64 (N, 2); size 0: null."""
    _, offsets, data = array.buffers()
    if data is None or not len(array):
        return np.zeros((len(array), 2), np.int64)
    # A compressed buffer was decoded into other memory.
    if not file.address <= data.address <= file.address + file.size - data.size:
        raise DataError(f"{path}: the file is compressed; save it without compression")
    width = np.int64 if str(array.type).startswith("large_") else np.int32
    ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    size = np.diff(ends)
    size[array.is_null().to_numpy(zero_copy_only=False)] = 0
    return np.stack([ends[:-1] + (data.address - file.address), size], axis=1)
