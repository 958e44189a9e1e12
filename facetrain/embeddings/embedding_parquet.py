"""Embeddings in Parquet files: one row per image with `name`, `label` and `embedding`."""

# N images   n images of one batch   D embedding

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.data.formats.parquet_pages import count_values

_COLUMNS = ("embedding", "name", "label")
_READ_ROWS = 4096
_WRITE_ROWS = 1 << 16
"""Rows of a row group: 128 MiB of embeddings of size 512 in float32."""


def write_parquet(
    file: BinaryIO,
    count: int,
    size: int,
    dtype: np.dtype[Any],
    rows: Callable[[slice], tuple[np.ndarray, list[str], np.ndarray]],
) -> None:
    """Write `count` embeddings of `size` numbers in row groups.

    `rows` returns embeddings, names and labels of a slice.
    """
    import pyarrow as pa
    import pyarrow.parquet

    schema = pa.schema(
        {"name": pa.string(), "label": pa.int64(), "embedding": pa.list_(pa.from_numpy_dtype(dtype), size)}
    )
    with pyarrow.parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, count, _WRITE_ROWS):
            embedding_nD, names, label_n = rows(slice(start, start + _WRITE_ROWS))
            flat = pa.array(np.ascontiguousarray(embedding_nD, dtype).ravel())
            columns = [
                pa.array(names, pa.string()),
                pa.array(label_n.astype(np.int64)),
                pa.FixedSizeListArray.from_arrays(flat, size),
            ]
            writer.write_table(pa.table(columns, schema=schema))


def read_batches(
    path: Path, require_fitting: Callable[[int], None]
) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
    """Yield embeddings (n, D), names as an array of pyarrow, possibly a dictionary, and labels (n,), in batches.

    Args:
        path: the file.
        require_fitting: called with the bytes in memory that the file may need, before they are allocated.

    Raises:
        DataError: pyarrow is not installed, or of `require_fitting`.
        ValueError: the file is damaged. pyarrow raises other types too.
    """
    import_pyarrow(path)
    import pyarrow.parquet

    # use_threads=False: pyarrow's idle threads sometimes abort the process when the interpreter exits.
    with path.open("rb") as file:
        # As a dictionary: a few bytes per row can encode names of any length.
        parquet = pyarrow.parquet.ParquetFile(file, read_dictionary=["name"])
        facts = parquet.metadata
        if facts.num_rows > path.stat().st_size:
            raise ValueError(f"claims {facts.num_rows:,} rows in {path.stat().st_size:,} bytes")
        groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
        require_fitting(sum(group.total_byte_size for group in groups))
        # Encoded, billions of equal numbers need a few bytes.
        require_fitting(4 * count_values(path, "embedding"))
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
    return column.flatten().to_numpy().reshape(len(column), -1)
