"""Files of embeddings with image names, labels and qualities: `.npz` (NumPy) and `.parquet`.

Embeddings of `.npz` files are read in blocks, from the first to the last, for galleries that do not fit into memory.
These are ordinary file reads: mapped memory would end the process if the file shrinks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from facetrain.data.formats.arrow_columns import import_pyarrow
from facetrain.embeddings.embedding_npz import open_npz, write_npz
from facetrain.embeddings.embedding_parquet import open_parquet, write_parquet
from facetrain.embeddings.embeddings import Embeddings, damage_as_error
from facetrain.errors import DataError
from facetrain.files import new_file, open_regular

SUFFIXES = (".npz", ".parquet")


def open_embeddings(path: Path) -> Embeddings:
    """Open a file of embeddings that `save_embeddings` or another program wrote, without reading its embeddings.

    Raises:
        DataError: the file cannot be read, lacks a column, or its columns do not fit together.
    """
    open_file = open_npz if path.suffix == ".npz" else open_parquet
    with damage_as_error(path):
        os.close(open_regular(path))  # zipfile would wait for the writer of a pipe
        found = open_file(path)
    stored: Any = found.stored
    label = found.label
    fits = len(stored.shape) == 2 and (len(found.name),) == label.shape == stored.shape[:1]
    if not fits or stored.dtype.kind not in "fiu":
        raise DataError(
            f"{path}: {len(found.name):,} names, labels of shape {label.shape} and embeddings {stored.shape} of "
            f"{stored.dtype}; expected one name, one label and one row of numbers for each image"
        )
    if label.dtype.kind not in "iu":
        raise DataError(f"{path}: expected labels that are whole numbers (−1 for none), not {label.dtype}")
    if not all(stored.shape):
        raise DataError(f"{path}: has no embeddings; embed at least one image")
    return found


def save_embeddings(path: Path, embeddings: Embeddings) -> None:
    """Write a `.npz` or `.parquet` file, complete or not at all.

    Raises:
        DataError: the suffix is unknown, pyarrow is not installed, or the file cannot be written.
    """
    require_format(path)
    write = write_npz if path.suffix == ".npz" else write_parquet
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:
        write(file, embeddings)


def require_format(path: Path) -> None:
    """Check that a file with this suffix can be written.

    Raises:
        DataError: the suffix is neither `.npz` nor `.parquet`, or pyarrow is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: unknown suffix of a file of embeddings; use {' or '.join(SUFFIXES)}")
    if path.suffix == ".parquet":
        import_pyarrow(path)
