"""Embeddings in Parquet files: one row per image with `name`, `label` and `embedding`."""

# N images   n images of one batch   D embedding

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.data.formats.arrow_columns import decoded_bytes, import_pyarrow
from facetrain.embeddings.decoded_size import require_fitting
from facetrain.embeddings.row_files import RowFile
from facetrain.errors import DataError

_COLUMNS = ("embedding", "name", "label")
_READ_ROWS = 4096


def write_parquet(
    file: BinaryIO, rows: Any, names: Sequence[str], label: np.ndarray, dtype: np.dtype[Any], block: int
) -> None:
    """Write embeddings in row groups of `block` rows."""
    import pyarrow as pa
    import pyarrow.parquet

    count, size = rows.shape
    schema = pa.schema(
        {"name": pa.string(), "label": pa.int64(), "embedding": pa.list_(pa.from_numpy_dtype(dtype), size)}
    )
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, count, block):
            part = slice(start, min(start + block, count))
            flat = pa.array(np.ascontiguousarray(rows[part], dtype).ravel())
            columns = [
                pa.array([names[row] for row in range(part.start, part.stop)], pa.string()),
                pa.array(label[part].astype(np.int64)),
                pa.FixedSizeListArray.from_arrays(flat, size),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def open_parquet(path: Path) -> tuple[np.ndarray, Sequence[str], np.ndarray]:
    """Return the columns embedding, name and label; the embeddings are copied to a temporary file.

    Raises:
        DataError: pyarrow is not installed, the file grows too much when it is decoded, or it has no rows.
        ValueError: the file is damaged. pyarrow raises other types too.
    """
    pa = import_pyarrow(path)
    labels, names, name_bytes, size = [], [], 0, 0
    rows = RowFile()
    for embedding_nD, name, label_n in _batches(path):
        if size not in (0, embedding_nD.shape[1]):
            raise DataError(
                f"{path}: embeddings of sizes {size} and {embedding_nD.shape[1]}; embed all images with one model"
            )
        size = embedding_nD.shape[1]
        # Before the names are decoded: one long name may belong to many rows.
        name_bytes += decoded_bytes(name)
        require_fitting(path, name_bytes)
        names.append(name.cast(pa.large_string()))
        labels.append(label_n)
        rows.append(embedding_nD)
    if not size:
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    name = pa.chunked_array(names)
    name.validate(full=True)
    if name.null_count:
        raise DataError(f"{path}: {name.null_count:,} rows have no name; write a text into each")
    return rows.array(), _ArrowTexts(name), np.concatenate(labels)


def _batches(path: Path) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
    """Yield embeddings (n, D), names as an array of pyarrow, possibly a dictionary, and labels (n,)."""
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
        columns = [group.column(number) for group in groups for number in range(group.num_columns)]
        numbers = sum(
            column.num_values for column in columns if column.path_in_schema.startswith("embedding")
        )
        require_fitting(path, 4 * numbers)
        # use_threads=False: pyarrow's idle threads sometimes abort the process when the interpreter exits.
        for batch in parquet.iter_batches(_READ_ROWS, columns=list(_COLUMNS), use_threads=False):
            yield _rows(batch["embedding"]), batch["name"], batch["label"].to_numpy()


def _rows(column: Any) -> np.ndarray:
    """Return a column of lists as an array, (n, D).

    Raises:
        ValueError: a row is missing, or rows have different lengths.
    """
    import pyarrow.compute

    lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(column))
    if column.null_count or lengths["min"] != lengths["max"]:
        raise ValueError("rows without an embedding, or with embeddings of different sizes")
    return np.asarray(column.flatten().to_numpy().reshape(len(column), -1))


class _ArrowTexts(Sequence[str]):
    """Texts of a pyarrow column, which need their bytes and an offset in memory."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._column[index].to_pylist()
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._column[int(index)].as_py()
