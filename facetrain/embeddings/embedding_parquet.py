"""Embeddings in Parquet files: one row per image with `name`, `label`, `embedding` and `quality`.

The metadata of the schema have the fingerprint of the model, and `flip`. A file is read as a whole.
"""

# N images   n images of one chunk   D embedding

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.embeddings.embeddings import Embeddings, require_columns, require_fitting
from facetrain.errors import DataError
from facetrain.files import parse_json
from facetrain.text import count_text

_COLUMNS = ["name", "label", "embedding", "quality"]
_MODEL = "facetrain.model"
"""Key of the metadata: the fingerprint of the model, a JSON list."""
_FLIP = "facetrain.flip"
"""Key of the metadata: whether each embedding is the sum of two, of the image and its mirror image; JSON."""


def write_parquet(file: BinaryIO, content: Embeddings) -> None:
    """Write embeddings as float32."""
    import pyarrow as pa
    import pyarrow.parquet

    row_ND = np.ascontiguousarray(content.embedding, np.float32)
    columns: dict[str, Any] = {
        "name": pa.array(list(content.name), pa.string()),
        "label": pa.array(content.label.astype(np.int64)),
        "embedding": pa.FixedSizeListArray.from_arrays(pa.array(row_ND.ravel()), row_ND.shape[1]),
    }
    if content.quality is not None:
        columns["quality"] = pa.array(content.quality.astype(np.float32))
    model = None if content.model is None else content.model.tolist()
    metadata = {
        key: json.dumps(value) for key, value in ((_MODEL, model), (_FLIP, content.flip)) if value is not None
    }
    table = pa.table(columns, metadata=metadata)
    pyarrow.parquet.write_table(table, file, row_group_size=1 << 16, write_page_checksum=True)


def open_parquet(path: Path) -> Embeddings:
    """Return the content of a file.

    Raises:
        DataError: pyarrow is not installed, a column is missing, the file grows too much when it is decoded, the names
            are no texts, or it has no rows.
        ValueError: the file is damaged. pyarrow raises other types too.
    """
    pa = import_pyarrow(path)
    import pyarrow.parquet

    with path.open("rb") as file:
        require_columns(path, pyarrow.parquet.read_schema(file).names)
        # As a dictionary: a few bytes per row can encode names of any length. Pages of other programs may have no
        # checksum.
        parquet = pyarrow.parquet.ParquetFile(file, read_dictionary=["name"], page_checksum_verification=True)
        stored = parquet.schema_arrow.field("name").type
        if not pa.types.is_dictionary(stored):
            raise DataError(f"{path}: the names must be texts, not {stored}")
        _require_fitting_numbers(path, parquet)
        # use_threads=False: pyarrow's idle threads sometimes abort the process when the interpreter exits.
        table = parquet.read(_COLUMNS, use_threads=False)
    if not len(table):
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    require_fitting(path, sum(map(_decoded_bytes, table["name"].chunks)))
    names = table["name"].cast(pa.large_string()).to_pylist()
    if None in names:
        unnamed = count_text(names.count(None), "row has", "rows have")
        raise DataError(f"{path}: {unnamed} no name; write a text into each")
    has_quality = "quality" in table.schema.names and pa.types.is_floating(table.schema.field("quality").type)
    # A missing quality is NaN.
    quality = table["quality"].to_numpy() if has_quality else None
    rows = _rows(table["embedding"].chunks)
    model, flip = _model(table, rows.shape[1]), _flip(table)
    return Embeddings(rows, names, table["label"].to_numpy(), path, quality, model, flip)


def _model(table: Any, size: int) -> np.ndarray | None:
    """Return the fingerprint of the model, (D,); None if the file has none."""
    try:
        model = np.array(_metadata(table, _MODEL), np.float32)
    except (ValueError, TypeError):
        return None
    return model if model.shape == (size,) else None


def _flip(table: Any) -> bool | None:
    flip = _metadata(table, _FLIP)
    return flip if isinstance(flip, bool) else None


def _metadata(table: Any, key: str) -> Any:
    """Return a value of the metadata; None if it is missing or damaged."""
    try:
        return parse_json((table.schema.metadata or {})[key.encode()].decode())
    except (KeyError, ValueError):
        return None


def _require_fitting_numbers(path: Path, parquet: Any) -> None:
    """Refuse a file whose numbers need much more memory than the file: encoded, equal numbers need a few bytes.

    Raises:
        DataError: they do.
        ValueError: the file claims more rows than it has bytes.
    """
    facts = parquet.metadata
    if facts.num_rows > path.stat().st_size:
        raise ValueError(f"claims {facts.num_rows:,} rows in {path.stat().st_size:,} bytes")
    # Decodes all values and keeps none: an error in the description of a column is an exception here, and would end the
    # process in `column` below.
    parquet.scan_contents()
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    stored = [group.column(number) for group in groups for number in range(group.num_columns)]
    read = [each for each in stored if each.path_in_schema.partition(".")[0] in _COLUMNS]
    require_fitting(path, sum(each.total_uncompressed_size for each in read))
    require_fitting(
        path, 4 * sum(each.num_values for each in stored if each.path_in_schema.startswith("embedding"))
    )


def _rows(chunks: Sequence[Any]) -> np.ndarray:
    """Return the embeddings of the chunks of a column, (N, D).

    Raises:
        ValueError: a row is missing, or rows have different lengths.
    """
    import pyarrow.compute

    rows = []
    for chunk in chunks:
        lengths = pyarrow.compute.min_max(pyarrow.compute.list_value_length(chunk))
        if chunk.null_count or lengths["min"] != lengths["max"]:
            raise ValueError("rows without an embedding, or with embeddings of different sizes")
        rows.append(chunk.flatten().to_numpy(zero_copy_only=False).reshape(len(chunk), -1))
    return np.concatenate(rows)


def _decoded_bytes(column: Any) -> int:
    """Return the bytes of texts in a dictionary, as if they had none."""
    import pyarrow.compute

    size = pyarrow.compute.binary_length(column.dictionary).to_numpy(zero_copy_only=False)
    return int(size[column.indices.drop_null().to_numpy(zero_copy_only=False)].sum())
