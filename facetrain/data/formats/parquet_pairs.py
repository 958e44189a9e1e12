"""Verification sets in Parquet files, as on Hugging Face's hub; needs facetrain[parquet].

A row is a pair with the columns `image1`, `image2` and `target`, `label` or `is_same`; or a row is an image with the
columns `image` and `is_same`, and two rows are a pair, as CVLface prepares them. If there is a column `index`, the rows
are taken in its order. An image column has bytes, or a struct {bytes, path}.
"""

# N images, two per pair   P pairs

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.formats import arrow_columns
from facetrain.errors import PairsError
from facetrain.files import listed, printable

_IMAGES = ("image", "image1", "image2")
_LABELS = ("is_same", "target", "label")
_SPARE_BYTES = 1 << 27


def read_parquet_set(paths: list[Path]) -> tuple[list[bytes], np.ndarray]:
    """Read a set from its Parquet files, in this order.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        DataError: pyarrow is not installed, a file is damaged or grows too much when it is decompressed, or a column is
            missing or has values of another type.
    """
    return _read_pairs(paths[0], (table for path in paths for table in _parquet_tables(path)))


def _parquet_tables(path: Path) -> Iterator[Any]:
    """Yield the row groups of a .parquet file. People exchange sets: a small file must not fill the memory.

    Values are read as dictionaries, because a few bytes can repeat a long one for many rows.
    """
    arrow_columns.import_pyarrow(path)
    import pyarrow.parquet

    limit = 2 * path.stat().st_size + _SPARE_BYTES
    with arrow_columns.arrow_errors(path):
        schema = pyarrow.parquet.ParquetFile(path).schema
        columns = [schema.column(number) for number in range(len(schema))]
        repeated = [c.path for c in columns if c.physical_type == "BYTE_ARRAY" and not c.max_repetition_level]
        file = pyarrow.parquet.ParquetFile(path, read_dictionary=repeated)
        used = _used_columns(file.schema_arrow.names, path)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            _require_fitting(path, max(group.total_byte_size, group.num_rows), limit)
            table = file.read_row_group(number, used)
            table.validate(full=True)  # an index can point outside its dictionary
            _require_fitting(path, sum(map(arrow_columns.decoded_bytes, table.columns)), limit)
            yield table


def _require_fitting(path: Path, size: int, limit: int) -> None:
    if size > limit:
        raise PairsError(
            f"{path}: rows decompress to more than {limit:,} bytes; write the set without compression"
        )


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


def _values(column: Any, name: str, path: Path) -> list[Any]:
    """Return the values of a column: encoded images, or numbers and texts."""
    if name in _IMAGES:
        column, kind = arrow_columns.image_fields(column)[0], column.type
        if column is None:
            raise PairsError(
                f"{path}: column {name} has values of type {printable(str(kind))[:100]}; expected bytes, or a struct "
                "of bytes and path"
            )
    else:
        arrow_columns.require_label_type(column.type, name, path)
    return list(column.to_pylist())


def _read_pairs(path: Path, tables: Iterable[Any]) -> tuple[list[bytes], np.ndarray]:
    columns: dict[str, list[Any]] = {}
    for table in tables:
        for name in table.schema.names:
            columns.setdefault(name, []).extend(_values(table.column(name), name, path))
    if not columns or len({len(values) for values in columns.values()}) > 1:
        raise PairsError(f"{path}: the set has no rows, or its files have different columns")
    if "index" in columns:
        try:
            order = np.argsort([int(value) for value in columns["index"]], kind="stable").tolist()
        except (TypeError, ValueError, OverflowError) as error:
            raise PairsError(f"{path}: the column index has a value that is not a number") from error
        columns = {name: [values[row] for row in order] for name, values in columns.items()}
    sides = [columns[name] for name in _IMAGES if name in columns]
    label = next(name for name in _LABELS if name in columns)
    labels, images = columns[label], [image for row in zip(*sides, strict=True) for image in row]
    if not all(images):
        number = next(number for number, image in enumerate(images) if not image)
        raise PairsError(f"{path}: row {number // len(sides)} has no image bytes")
    if not all(value in (0, 1) for value in labels):
        raise PairsError(f"{path}: the column {label} has a value other than 0 and 1")
    if len(sides) == 1:
        if len(labels) % 2 or labels[0::2] != labels[1::2]:
            raise PairsError(f"{path}: the column {label} differs between the two images of a pair")
        labels = labels[0::2]
    return images, np.array(labels, bool)
