"""Files of embeddings with image names and labels: `.npz` (NumPy) and `.parquet`."""

# N images   D embedding

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.embeddings.embedding_parquet import read_batches, write_parquet
from facetrain.embeddings.normalization import l2_normalize
from facetrain.errors import DataError
from facetrain.files import error_reason, new_file

SUFFIXES = (".npz", ".parquet")
DTYPES = ("float32", "float16")
"""Types of the numbers in a file: float16 needs half the space, and changes a cosine by about 0.0002."""
COLUMNS = ("embedding", "name", "label")
_SPARE_BYTES = 1 << 27
_HEADER_BYTES = 1 << 14
_LARGEST = 1e15
"""Limit of the numbers of an embedding: in float32, the squares of larger ones may be infinite."""
_WRITE_ROWS = 1 << 16


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of images, with their names and labels."""

    embedding: np.ndarray
    """Unit embeddings, float32 (N, D)."""
    name: Sequence[str]
    """Name of each image."""
    label: np.ndarray
    """Class of each image, int (N,); −1 if it has none."""


def save_embeddings(path: Path, embeddings: Embeddings, dtype: str = "float32") -> None:
    """Write a `.npz` or `.parquet` file in blocks, complete or not at all.

    `dtype` is that of the embeddings in the file, one of `DTYPES`.

    Raises:
        DataError: the suffix is unknown, pyarrow is not installed, or the file cannot be written.
    """
    write = _writer(path)
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:
        write(file, embeddings, np.dtype(dtype))


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
    fits = (
        embedding.ndim == 2
        and len(embedding) == len(name) == label.size
        and label.ndim == 1
        and embedding.size
    )
    if not fits:
        raise DataError(
            f"{path}: {len(name):,} names, {label.size:,} labels and embeddings of shape {embedding.shape}; expected "
            "one name, one label and one row of numbers for each image"
        )
    # A comparison with NaN is false.
    if not -_LARGEST < embedding.min() <= embedding.max() < _LARGEST:
        row = int(np.argmin((np.abs(embedding) < _LARGEST).all(1)))
        raise DataError(
            f"{path}: row {row:,} ({name[row]}) has numbers that are not finite or not below {_LARGEST:g}; embed the "
            "image again, or write zeros if the system cannot process it"
        )
    if label.dtype.kind not in "iu" or not all(isinstance(one, str) for one in name):
        raise DataError(f"{path}: the names must be texts, and the labels whole numbers (−1 for none)")
    return Embeddings(l2_normalize(embedding), name, label)


def _writer(path: Path) -> Callable[[BinaryIO, Embeddings, np.dtype[Any]], None]:
    if path.suffix == ".npz":
        return _write_npz
    if path.suffix == ".parquet":
        import_pyarrow(path)
        return _write_parquet
    raise DataError(f"{path}: unknown suffix of a file of embeddings; use {' or '.join(SUFFIXES)}")


def _write_npz(file: BinaryIO, embeddings: Embeddings, dtype: np.dtype[Any]) -> None:
    """Write what `np.savez` writes, without a second copy of the columns in memory."""
    rows, names = embeddings.embedding, embeddings.name
    width = max((len(name) for name in names), default=1)
    blocks = [slice(start, start + _WRITE_ROWS) for start in range(0, len(rows), _WRITE_ROWS)]
    columns: dict[str, tuple[np.dtype[Any], tuple[int, ...], Callable[[slice], Any]]] = {
        "embedding": (dtype, rows.shape, lambda block: rows[block]),
        "name": (np.dtype(f"<U{max(width, 1)}"), (len(rows),), lambda block: _names(names, block)),
        "label": (embeddings.label.dtype, (len(rows),), lambda block: embeddings.label[block]),
    }
    with zipfile.ZipFile(file, "w") as archive:
        for column, (kind, shape, values) in columns.items():
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            with archive.open(f"{column}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array_header_1_0(member, header)
                for block in blocks:
                    member.write(np.ascontiguousarray(values(block), kind).tobytes())


def _names(names: Sequence[str], block: slice) -> list[str]:
    return [names[row] for row in range(block.start, min(block.stop, len(names)))]


def _read_npz(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        for column in COLUMNS:
            read_array_header(archive, f"{column}.npy")
        require_fitting(path, sum(archive.getinfo(f"{column}.npy").file_size for column in COLUMNS))
    # float64 beyond float32 becomes infinite, which `load_embeddings` reports.
    with np.load(path, allow_pickle=False) as arrays, np.errstate(over="ignore"):
        embedding = np.asarray(arrays["embedding"], np.float32)
        return embedding, np.atleast_1d(arrays["name"]).tolist(), arrays["label"]


def require_fitting(path: Path, size: int) -> None:
    """Refuse a file that grows too much when it is decompressed: embeddings hardly compress.

    Raises:
        DataError: `size`, the bytes of its columns in memory, is too large.
    """
    limit = 2 * path.stat().st_size + _SPARE_BYTES
    if size > limit:
        raise DataError(
            f"{path}: decompresses to {size:,} bytes, more than the {limit:,} that a file of this size may need"
        )


def read_array_header(
    archive: zipfile.ZipFile, name: str
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, Fortran order, dtype and the bytes of the header of an array of a `.npz` file.

    Raises:
        ValueError: the header claims more than the array's bytes, for which NumPy would allocate memory.
    """
    with archive.open(name) as file:
        head = io.BytesIO(file.read(_HEADER_BYTES))  # not the whole header, whose length the file claims
        version = np.lib.format.read_magic(head)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read_header(head)
    size = archive.getinfo(name).file_size
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name} claims the shape {shape} in {size:,} bytes")
    return shape, fortran_order, dtype, head.tell()


def _write_parquet(file: BinaryIO, embeddings: Embeddings, dtype: np.dtype[Any]) -> None:
    rows = embeddings.embedding
    write_parquet(
        file,
        len(rows),
        rows.shape[1],
        dtype,
        lambda block: (rows[block], _names(embeddings.name, block), embeddings.label[block]),
    )


def parquet_batches(path: Path) -> Iterator[tuple[np.ndarray, Any, np.ndarray]]:
    """Yield embeddings, names and labels as `read_batches`.

    Raises:
        DataError: pyarrow is not installed, or the file grows too much when it is decoded.
    """
    return read_batches(path, lambda size: require_fitting(path, size))


def _read_parquet(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    embeddings, names, labels = [], list[str](), []
    for embedding_nD, name, label_n in parquet_batches(path):
        if hasattr(name, "dictionary"):
            distinct = name.dictionary.to_pylist()
            names += [distinct[at] for at in name.indices.to_pylist()]
        else:
            names += name.to_pylist()
        embeddings.append(np.asarray(embedding_nD, np.float32))
        labels.append(label_n)
    if not names:
        raise ValueError("no rows")
    return np.concatenate(embeddings), names, np.concatenate(labels)
