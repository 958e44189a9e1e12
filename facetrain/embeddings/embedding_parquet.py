"""Embeddings in Parquet files: one row per image with `name`, `label`, `embedding` and `quality`."""

# N images   n images of one batch   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.embeddings.streamed_rows import StreamedRows, require_fitting
from facetrain.errors import DataError

_READ_ROWS = 4096


def write_parquet(
    file: BinaryIO, rows: Any, names: Sequence[str], label: np.ndarray, quality: np.ndarray | None, block: int
) -> None:
    """Write embeddings as float32 in row groups of `block` rows."""
    import pyarrow as pa
    import pyarrow.parquet

    size = rows.shape[1]
    schema = pa.schema({"name": pa.string(), "label": pa.int64(), "embedding": pa.list_(pa.float32(), size)})
    if quality is not None:
        schema = schema.append(pa.field("quality", pa.float32()))
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(names), block):
            part = slice(start, start + block)
            flat = pa.array(np.ascontiguousarray(rows[part], np.float32).ravel())
            columns = [
                pa.array(names[part], pa.string()),
                pa.array(label[part].astype(np.int64)),
                pa.FixedSizeListArray.from_arrays(flat, size),
            ]
            if quality is not None:
                columns.append(pa.array(quality[part].astype(np.float32)))
            writer.write_table(pa.table(columns, schema=schema))


def open_parquet(path: Path) -> tuple[StreamedRows, list[str], np.ndarray, np.ndarray | None]:
    """Return the columns embedding, name, label and quality; the embeddings are read on access.

    The quality is None if the file does not have one number for each label.

    Raises:
        DataError: pyarrow is not installed, the file grows too much when it is decoded, or it has no rows.
        ValueError: the file is damaged. pyarrow raises other types too.
    """
    pa = import_pyarrow(path)
    names: list[Any] = []
    labels, qualities, name_bytes = [np.empty(0, np.int64)], [], 0
    for batch in _batches(path, ["name", "label", "quality"]):
        # Before the names are decoded: one long name may belong to many rows.
        name_bytes += _decoded_bytes(batch["name"])
        require_fitting(path, name_bytes)
        names += batch["name"].cast(pa.large_string()).to_pylist()
        labels.append(batch["label"].to_numpy())
        if "quality" in batch.schema.names:
            qualities.append(batch["quality"].to_numpy(zero_copy_only=False))  # a missing one is NaN
    if None in names:
        raise DataError(f"{path}: {names.count(None):,} rows have no name; write a text into each")
    first = next(_embeddings(path), None)
    if first is None:
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    shape = len(names), first.shape[1]
    rows = StreamedRows(shape, first.dtype, partial(_embeddings, path))
    return rows, names, np.concatenate(labels), np.concatenate(qualities) if qualities else None


def _batches(path: Path, columns: list[str]) -> Iterator[Any]:
    """Yield batches of some columns; names are a dictionary. A `quality` that is no number is left out."""
    import pyarrow as pa
    import pyarrow.parquet

    with path.open("rb") as file:
        # As a dictionary: a few bytes per row can encode names of any length.
        parquet = pyarrow.parquet.ParquetFile(file, read_dictionary=["name"])
        facts = parquet.metadata
        if facts.num_rows > path.stat().st_size:
            raise ValueError(f"claims {facts.num_rows:,} rows in {path.stat().st_size:,} bytes")
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        require_fitting(path, sum(group.total_byte_size for group in groups))
        # Encoded, billions of equal numbers need a few bytes.
        stored = [group.column(number) for group in groups for number in range(group.num_columns)]
        numbers = sum(each.num_values for each in stored if each.path_in_schema.startswith("embedding"))
        require_fitting(path, 4 * numbers)
        place = parquet.schema_arrow.get_field_index("quality")  # −1 without it
        if place < 0 or not pa.types.is_floating(parquet.schema_arrow.field(place).type):
            columns = [column for column in columns if column != "quality"]
        # use_threads=False: pyarrow's idle threads sometimes abort the process when the interpreter exits.
        yield from parquet.iter_batches(_READ_ROWS, columns=columns, use_threads=False)


def _embeddings(path: Path) -> Iterator[np.ndarray]:
    """Yield the embeddings, (n, D).

    Raises:
        ValueError: a row is missing, or rows have different lengths.
    """
    import pyarrow.compute

    for batch in _batches(path, ["embedding"]):
        column = batch["embedding"]
        lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(column))
        if column.null_count or lengths["min"] != lengths["max"]:
            raise ValueError("rows without an embedding, or with embeddings of different sizes")
        yield np.asarray(column.flatten().to_numpy().reshape(len(column), -1))


def _decoded_bytes(column: Any) -> int:
    """Return the bytes of a column of texts, which may be in a dictionary, as if it had none."""
    import pyarrow as pa
    import pyarrow.compute

    if not pa.types.is_dictionary(column.type):
        return int(column.nbytes)
    size = pyarrow.compute.binary_length(column.dictionary).to_numpy(zero_copy_only=False)
    return int(size[column.indices.drop_null().to_numpy(zero_copy_only=False)].sum())
