"""Verification sets in the forms that are handed out, found by path or by name: `NAME.bin` and `NAME.parquet`."""

# P pairs

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.parquet_pairs import read_parquet_set
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.errors import DataError, PairsError

_PARQUET = ".parquet"
SUFFIXES = (".bin", _PARQUET)
"""Suffixes of files, in the order in which they are looked for."""


def is_pair_archive(path: Path) -> bool:
    """Return whether a path is a file with the suffix of a verification set.

    The files `NAME-*.parquet` of a split are the set `NAME.parquet`.
    """
    return (path.is_file() and path.suffix in SUFFIXES) or (path.suffix == _PARQUET and bool(_parts(path)))


def find_pair_archive(name: str, folder: Path) -> Path | None:
    """Return the set of this name in a folder; None if there is none."""
    paths = (folder / f"{name}{suffix}" for suffix in SUFFIXES)
    return next((path for path in paths if is_pair_archive(path)), None)


def read_pair_archive(path: Path) -> tuple[list[bytes], np.ndarray]:
    """Read a set for which `is_pair_archive` is true.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        PairsError: the set cannot be read. No code of a file is run.
    """
    if path.suffix != _PARQUET:
        return read_bin(path)
    parts = [path] if path.is_file() else _parts(path)
    try:
        require_all_shards(parts)
        return read_parquet_set(parts)
    except PairsError:
        raise
    except DataError as error:  # of the readers that datasets of images have, too
        raise PairsError(str(error)) from error


def _parts(path: Path) -> list[Path]:
    """Return the files of a split, `lfw-00000-of-00002.parquet` and so on, in order."""
    return sorted(path.parent.glob(f"{path.stem}-*-of-*{_PARQUET}"))
