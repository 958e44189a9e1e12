"""Files of embeddings with image names and labels: `.npz` (NumPy) and `.parquet`."""

# N images   D embedding

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.errors import DataError, missing_package
from facetrain.files import error_reason, os_errors_as
from facetrain.verify.normalization import l2_normalize

SUFFIXES = (".npz", ".parquet")
_COLUMNS = ("embedding", "name", "label")
_SPARE_BYTES = 1 << 27
_HEADER_BYTES = 1 << 14
_ROWS_PER_PART = 4096


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of images, with their names and labels."""

    embedding: np.ndarray
    """Unit embeddings, float32 (N, D)."""
    name: Sequence[str]
    """Name of each image."""
    label: np.ndarray
    """Class of each image, int (N,); −1 if it has none."""


def save_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write a `.npz` or `.parquet` file, complete or not at all.

    Raises:
        DataError: the suffix is unknown, pyarrow is not installed, or the file cannot be written.
    """
    write = _writer(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with os_errors_as(DataError, path):
            with scratch.open("wb") as file:
                write(file, embeddings)
            os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def require_format(path: Path) -> None:
    """Check that a file with this suffix can be written.

    Raises:
        DataError: the suffix is neither `.npz` nor `.parquet`, or pyarrow is not installed.
    """
    _writer(path)


def load_embeddings(path: Path) -> Embeddings:
    """Read a file that `save_embeddings` or another program wrote, and normalize the embeddings to length 1.

    Raises:
        DataError: the file cannot be read, lacks a column, or its columns do not fit together.
    """
    try:
        embedding, name, label = _read_npz(path) if path.suffix == ".npz" else _read_parquet(path)
    except DataError:
        raise
    except (
        Exception
    ) as error:  # zipfile, zlib, NumPy and pyarrow have many errors for damaged files, without a common base
        raise DataError(f"{path}: not a file of embeddings ({error_reason(error)})") from error
    fits = embedding.ndim == 2 and len(embedding) == len(name) == label.size and label.ndim == 1 and len(name)
    if not fits or not np.isfinite(embedding).all():
        raise DataError(
            f"{path}: {len(name):,} names, {label.size:,} labels and embeddings of shape {embedding.shape}; expected "
            "one name, one label and one row of finite numbers for each image"
        )
    if label.dtype.kind not in "iu" or not all(isinstance(one, str) for one in name):
        raise DataError(f"{path}: the names must be texts, and the labels whole numbers (−1 for none)")
    return Embeddings(l2_normalize(embedding), name, label)


def _writer(path: Path) -> Callable[[BinaryIO, Embeddings], None]:
    if path.suffix == ".npz":
        return _write_npz
    if path.suffix == ".parquet":
        _import_pyarrow(path)
        return _write_parquet
    raise DataError(f"{path}: unknown suffix of a file of embeddings; use {' or '.join(SUFFIXES)}")


def _write_npz(file: BinaryIO, embeddings: Embeddings) -> None:
    names = np.array(list(embeddings.name))
    np.savez(file, embedding=embeddings.embedding, name=names, label=embeddings.label)


def _read_npz(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        _require_fitting(path, sum(_checked_size(archive, f"{name}.npy") for name in _COLUMNS))
    with np.load(path, allow_pickle=False) as arrays:
        embedding = np.asarray(arrays["embedding"], np.float32)
        return embedding, np.atleast_1d(arrays["name"]).tolist(), arrays["label"]


def _require_fitting(path: Path, size: int) -> None:
    """Refuse a file that grows too much when it is decompressed: embeddings hardly compress.

    Raises:
        DataError: `size`, the bytes of its columns in memory, is too large.
    """
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: decompresses to {size:,} bytes, more than the {limit:,} that a file of this size may need"
        )


def _checked_size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the size of an array of a `.npz` file, after a check that its header claims no more than its bytes."""
    with archive.open(name) as file:
        head = io.BytesIO(file.read(_HEADER_BYTES))  # not the whole header, whose length the file claims
        version = np.lib.format.read_magic(head)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read_header(head)
    size = archive.getinfo(name).file_size
    # Otherwise NumPy allocates what the header claims before it reads.
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name} claims the shape {shape} in {size:,} bytes")
    return size


def _write_parquet(file: BinaryIO, embeddings: Embeddings) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    flat = pa.array(np.ascontiguousarray(embeddings.embedding, np.float32).ravel())
    columns = {
        "name": pa.array(list(embeddings.name), pa.string()),
        "label": pa.array(embeddings.label.astype(np.int64)),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, embeddings.embedding.shape[1]),
    }
    pyarrow.parquet.write_table(pa.table(columns), file)


def _read_parquet(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    pa = _import_pyarrow(path)
    import pyarrow.parquet

    try:
        # use_threads=False: pyarrow's idle threads sometimes abort the process when the interpreter exits.
        with path.open("rb") as file:
            # As a dictionary: a few bytes per row can stand for names of any length.
            parquet = pyarrow.parquet.ParquetFile(file, read_dictionary=["name"])
            facts = parquet.metadata
            if facts.num_rows > path.stat().st_size:
                raise ValueError(f"claims {facts.num_rows:,} rows in {path.stat().st_size:,} bytes")
            groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
            _require_fitting(path, sum(group.total_byte_size for group in groups))
            # In parts, after the first row alone: encoded, a million equal numbers need a few bytes. Their number is in
            # the metadata of the columns too, but pyarrow 21 ends the process if that is damaged.
            first = next(parquet.iter_batches(1, columns=["embedding"], use_threads=False))
            _require_fitting(path, first["embedding"].nbytes * facts.num_rows)
            parts, size = [], 0
            for part in parquet.iter_batches(_ROWS_PER_PART, columns=list(_COLUMNS), use_threads=False):
                size += part["embedding"].nbytes
                _require_fitting(path, size)
                parts.append(part)
            table = pa.Table.from_batches(parts).combine_chunks()
        column, names = table["embedding"].chunk(0), table["name"].chunk(0)
        embedding = column.flatten().to_numpy().reshape(len(column), -1)
        if pa.types.is_dictionary(names.type):
            distinct = names.dictionary.to_pylist()
            name = [distinct[at] for at in names.indices.to_pylist()]
        else:
            name = names.to_pylist()
    except StopIteration:
        raise ValueError("no rows") from None
    return np.asarray(embedding, np.float32), name, table["label"].to_numpy()


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: {missing_package(error, 'parquet')}") from error
    return pyarrow
