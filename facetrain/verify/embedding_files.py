"""Embeddings with names, in files: .npz for NumPy, .parquet for all else."""

# N images   D embedding

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from facetrain.errors import DataError

SUFFIXES = (".npz", ".parquet")


@dataclass(frozen=True)
class Embeddings:
    """Unit embeddings float32 (N, D), the names of the images, and their labels (−1 where there are none)."""

    embedding: np.ndarray
    name: Sequence[str]
    label: np.ndarray


def save_embeddings(path: Path, found: Embeddings) -> None:
    """Write .npz or .parquet, by the name's end; the file appears whole or not at all.

    Raises:
        DataError: it ends otherwise, or cannot be written.
    """
    write = _writer(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            write(file, found)
        os.replace(scratch, path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)


def require_format(path: Path) -> None:
    """Refuse a name whose end says no format that can be written here.

    Raises:
        DataError: it is neither .npz nor .parquet, or pyarrow is not installed.
    """
    _writer(path)


def load_embeddings(path: Path) -> Embeddings:
    """Read what `save_embeddings` wrote, and bring the embeddings to length 1.

    Raises:
        DataError: it is no such file.
    """
    try:
        embedding, name, label = _read_npz(path) if path.suffix == ".npz" else _read_parquet(path)
    except DataError:
        raise
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        said = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise DataError(f"{path}: not a file of embeddings ({said})") from error
    whole = embedding.ndim == 2 and len(embedding) == len(name) == len(label) and len(name)
    if not whole or not np.isfinite(embedding).all():
        raise DataError(
            f"{path}: {len(name):,} names and embeddings of shape {embedding.shape} do not go together"
        )
    length = np.linalg.norm(embedding, axis=1, keepdims=True)
    return Embeddings(np.asarray(embedding / np.maximum(length, 1e-12), np.float32), name, label)


def _writer(path: Path) -> Callable[[BinaryIO, Embeddings], None]:
    if path.suffix == ".npz":
        return _write_npz
    if path.suffix == ".parquet":
        _arrow(path)
        return _write_parquet
    raise DataError(f"{path}: embeddings are written as {' or '.join(SUFFIXES)}")


def _write_npz(file: BinaryIO, found: Embeddings) -> None:
    np.savez(file, embedding=found.embedding, name=np.array(list(found.name)), label=found.label)


def _read_npz(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    with np.load(path, allow_pickle=False) as found:
        return np.asarray(found["embedding"], np.float32), found["name"].tolist(), found["label"]


def _write_parquet(file: BinaryIO, found: Embeddings) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    flat = pa.array(np.ascontiguousarray(found.embedding, np.float32).ravel())
    columns = {
        "name": pa.array(list(found.name), pa.string()),
        "label": pa.array(found.label.astype(np.int64)),
        "embedding": pa.FixedSizeListArray.from_arrays(flat, found.embedding.shape[1]),
    }
    pyarrow.parquet.write_table(pa.table(columns), file)


def _read_parquet(path: Path) -> tuple[np.ndarray, list[str], np.ndarray]:
    pa = _arrow(path)
    import pyarrow.parquet

    try:
        # Without threads: pyarrow's, still idle when the interpreter ends, now and then abort the process.
        with path.open("rb") as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            table = parquet.read(columns=["name", "label", "embedding"], use_threads=False).combine_chunks()
        column = table["embedding"].chunk(0)
        embedding = column.flatten().to_numpy().reshape(len(column), -1)
    except (pa.ArrowException, IndexError) as error:
        raise ValueError(error) from None
    return np.asarray(embedding, np.float32), table["name"].to_pylist(), table["label"].to_numpy()


def _arrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f"{path}: needs pyarrow: install facetrain[parquet]") from error
    return pyarrow
