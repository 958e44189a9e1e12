"""Verification sets of Hugging Face's `datasets`: folders of `save_to_disk` and Parquet files; need facetrain[parquet].

A row is a pair with the columns `image1`, `image2` and `target`, `label` or `is_same`; or a row is an image with the
columns `image` and `is_same`, and two rows are a pair, as CVLface prepares them. If there is a column `index`, the rows
are taken in its order. An image column has bytes, or a struct {bytes, path}.
"""

# N images, two per pair   P pairs

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats.arrow_columns import (
    arrow_batches,
    arrow_errors,
    decoded_bytes,
    image_fields,
    import_pyarrow,
    require_labels,
)
from facetrain.data.formats.splits import STATE_FILE, data_files
from facetrain.errors import PairsError
from facetrain.files import listed, printable

_IMAGES = ("image", "image1", "image2")
_LABELS = ("is_same", "target", "label")
_SPARE_BYTES = 1 << 27


def is_arrow_set(folder: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk`."""
    return (folder / STATE_FILE).is_file() and any(folder.glob("*.arrow"))


def read_arrow_set(folder: Path) -> tuple[list[bytes], np.ndarray]:
    """Read a folder of `Dataset.save_to_disk`.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        DataError: pyarrow is not installed, a file is damaged, or a column is missing or has values of another type.
    """
    return _read_rows(folder, [row for path in data_files(folder) for row in _arrow_rows(path)])


def read_parquet_set(paths: list[Path]) -> tuple[list[bytes], np.ndarray]:
    """Read a set from its Parquet files, in this order.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        DataError: as `read_arrow_set`, or a file grows too much when it is decompressed.
    """
    return _read_rows(paths[0], [row for path in paths for row in _parquet_rows(path)])


def _arrow_rows(path: Path) -> Iterator[dict[str, Any]]:
    for batch, file in arrow_batches(path):
        if batch.nbytes > file.size:
            raise PairsError(f"{path}: a batch is larger than the file; write it without compression")
        yield from _table_rows(batch.select(_used_columns(batch.schema.names, path)), path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .parquet file. People exchange sets: a small file must not fill the memory.

    Values are read as dictionaries, because a few bytes can repeat a long one for many rows.
    """
    import_pyarrow(path)
    import pyarrow.parquet

    limit = 2 * path.stat().st_size + _SPARE_BYTES
    with arrow_errors(path):
        schema = pyarrow.parquet.ParquetFile(path).schema
        columns = [schema.column(number) for number in range(len(schema))]
        repeated = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and not c.max_repetition_level]
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=repeated)
        used = _used_columns(file.schema_arrow.names, path)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            if max(group.total_byte_size, group.num_rows) > limit:
                raise PairsError(f"{path}: row group {number} decompresses to more than {limit:,} bytes")
            table = file.read_row_group(number, used)
            table.validate(full=True)  # an index can point outside its dictionary
            if sum(map(decoded_bytes, table.columns)) > limit:
                raise PairsError(f"{path}: row group {number} decompresses to more than {limit:,} bytes")
            yield from _table_rows(table, path)


def _table_rows(table: Any, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table or batch of pyarrow: encoded images, and numbers or texts."""
    values = {}
    for name in table.schema.names:
        column = table.column(name)
        if name in _IMAGES:
            images = [image_fields(chunk)[0] for chunk in getattr(column, "chunks", [column])]
            if any(image is None for image in images):
                raise PairsError(
                    f"{path}: column {name} has values of type {printable(str(column.type))[:100]}; expected bytes, "
                    "or a struct of bytes and path"
                )
            values[name] = [image for chunk in images for image in chunk.to_pylist()]
        else:
            require_labels(column.type, name, path)
            values[name] = column.to_pylist()
    for row in zip(*values.values(), strict=True):
        yield dict(zip(values, row, strict=True))


def _used_columns(names: list[str], path: Path) -> list[str]:
    images = ["image1", "image2"] if {"image1", "image2"} <= set(names) else ["image"]
    label = next((name for name in _LABELS if name in names), None)
    # A column `label` with one image per row is a class, not a pair.
    if not set(images) <= set(names) or label is None or (len(images) == 1 and label != "is_same"):
        raise PairsError(
            f"{path}: columns {listed(names)}; a set of pairs has image1, image2 and {' or '.join(_LABELS)}, "
            "or image and is_same"
        )
    used = [*images, label, *(["index"] if "index" in names else [])]
    if repeated := [name for name in used if names.count(name) > 1]:
        raise PairsError(f"{path}: has two columns {repeated[0]}; rename or remove one of them")
    return used


def _read_rows(path: Path, rows: list[dict[str, Any]]) -> tuple[list[bytes], np.ndarray]:
    if not rows:
        raise PairsError(f"{path}: the set has no rows")
    if "index" in rows[0]:
        try:
            rows = sorted(rows, key=lambda row: int(row["index"]))
        except (TypeError, ValueError) as error:
            raise PairsError(f"{path}: the column index has a value that is not a number") from error
    sides = [name for name in _IMAGES if name in rows[0]]
    label = next(name for name in _LABELS if name in rows[0])
    images = [row[side] for row in rows for side in sides]
    if not all(images):
        number = next(number for number, image in enumerate(images) if not image)
        raise PairsError(f"{path}: row {number // len(sides)} has no image bytes")
    labels = [row[label] for row in rows]
    if not all(value in (0, 1) for value in labels):
        raise PairsError(f"{path}: the column {label} has a value other than 0 and 1")
    if len(sides) == 1:
        if len(labels) % 2 or labels[0::2] != labels[1::2]:
            raise PairsError(f"{path}: the column {label} differs between the two images of a pair")
        labels = labels[0::2]
    return images, np.array(labels, bool)
