"""Verification sets in any of the forms that are handed out, found by path or by name.

| form | path | module |
|---|---|---|
| InsightFace | `NAME.bin` | `bin` |
| SOTA-Face-Recognition-Train-and-Test, for example Hadrian and Eclipse | `NAME.xz`, a compressed `.bin` | `bin` |
| the same, prepared; AdaFace's memory files | folder `NAME/` | `pixel_pairs` |
| CVLface, other sets of Hugging Face's `datasets` | folder `NAME/`, `NAME.parquet` | `arrow_pairs` |
"""

# P pairs

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.formats.arrow_pairs import is_arrow_set, read_arrow_set, read_parquet_set
from facetrain.data.formats.bin import COMPRESSED, read_bin
from facetrain.data.formats.pixel_pairs import is_pixel_set, read_pixel_set
from facetrain.data.formats.shard_names import require_all_shards
from facetrain.errors import DataError, PairsError

_PARQUET = ".parquet"
SUFFIXES = (".bin", COMPRESSED, _PARQUET)
"""Suffixes of files, in the order in which they are looked for."""


def is_pair_archive(path: Path) -> bool:
    """Return whether a path is a verification set: a file with the suffix of one, or a folder with its files.

    The files `NAME-*.parquet` of a split are the set `NAME.parquet`.
    """
    if path.is_dir():
        return is_pixel_set(path) or is_arrow_set(path)
    return (path.is_file() and path.suffix in SUFFIXES) or (path.suffix == _PARQUET and bool(_parts(path)))


def find_pair_archive(name: str, folder: Path) -> Path | None:
    """Return the set of this name in a folder, files before folders; None if there is none."""
    paths = [*(folder / f"{name}{suffix}" for suffix in SUFFIXES), folder / name]
    return next((path for path in paths if is_pair_archive(path)), None)


def read_pair_archive(path: Path) -> tuple[list[bytes], np.ndarray]:
    """Read a set for which `is_pair_archive` is true.

    Returns:
        The encoded images, two per pair, and whether each pair shows one person: bool (P,).

    Raises:
        PairsError: the set cannot be read. No code of a file is run.
    """
    try:
        if path.suffix == _PARQUET:
            if path.is_file():
                return read_parquet_set([path])
            require_all_shards(_parts(path))
            return read_parquet_set(_parts(path))
        if path.is_dir():
            return read_arrow_set(path) if is_arrow_set(path) else read_pixel_set(path)
        return read_bin(path)
    except PairsError:
        raise
    except DataError as error:  # of the readers that datasets of images have, too
        raise PairsError(str(error)) from error


def _parts(path: Path) -> list[Path]:
    """Return the files of a split, `lfw-00000-of-00002.parquet` and so on, in order."""
    return sorted(path.parent.glob(f"{path.stem}-*-of-*{_PARQUET}"))
