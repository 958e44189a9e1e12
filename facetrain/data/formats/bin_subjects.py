"""NAME.subjects.csv beside NAME.bin: the subject of each image of a verification set.

A `.bin` file has the labels of its pairs only. The bootstrap over subjects also needs to know which pairs share a
person. The table has a header line `subject` and then one row for each image, in the order of the `.bin`; readers of
`.bin` files do not open it. It is also a valid slice table of `facetrain eval --slices`.
"""

# N images, two per pair   P pairs

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from facetrain.data.formats.image_table import write_image_table
from facetrain.errors import PairsError
from facetrain.files import error_reason

_HEADER = "subject"
_MAX_BYTES_PER_IMAGE = 1024
"""Longest row that is read, so that a wrong file of any size does not fill the memory."""
_ADVICE = "remove the table, or convert the pair list again with `facetrain data pairs`"


def subjects_path(bin_path: Path) -> Path:
    """Return the path of the table that belongs to a `.bin` file."""
    return bin_path.with_suffix(".subjects.csv")


def write_subjects(bin_path: Path, names: Sequence[str]) -> None:
    """Write the subject of each image of a `.bin` file.

    Raises:
        PairsError: the file cannot be written.
    """
    write_image_table(subjects_path(bin_path), _HEADER, names)


def subjects_agree(names_N: Sequence[str], same_P: Sequence[bool]) -> bool:
    """Return whether genuine pairs have equal subjects and impostor pairs different ones."""
    return contradicting_pair(names_N, same_P) is None


def contradicting_pair(names_N: Sequence[str], same_P: Sequence[bool]) -> int | None:
    """Return the first genuine pair of two subjects or impostor pair of one; None if all subjects agree."""
    pairs = enumerate(zip(names_N[0::2], names_N[1::2], same_P, strict=True))
    return next((at for at, (first, second, same) in pairs if (first == second) != bool(same)), None)


def read_subjects(bin_path: Path, same_P: np.ndarray) -> np.ndarray | None:
    """Return the subject id of each image, int64 (N,) from 0 without gaps; None if there is no table.

    Raises:
        PairsError: the table cannot be read, has another number of rows than the `.bin` has images, or contradicts
            the labels of the pairs: it belongs to another set.
    """
    path = subjects_path(bin_path)
    count = 2 * len(same_P)
    if not path.exists():
        return None
    try:
        if not path.is_file() or path.stat().st_size > (count + 1) * _MAX_BYTES_PER_IMAGE:
            raise PairsError(f"{path}: too large for the subjects of {count:,} images; {_ADVICE}")
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PairsError(f"{path}: {error_reason(error)}; {_ADVICE}") from error
    if not rows or rows[0] != [_HEADER] or any(len(row) != 1 for row in rows):
        raise PairsError(f"{path}: expected a header line `{_HEADER}` and one column; {_ADVICE}")
    names_N = [row[0] for row in rows[1:]]
    if len(names_N) != count:
        raise PairsError(
            f"{path}: {len(names_N):,} rows, but {bin_path.name} has {count:,} images; {_ADVICE}"
        )
    if not subjects_agree(names_N, same_P.tolist()):
        raise PairsError(f"{path}: contradicts the labels of {bin_path.name}; {_ADVICE}")
    # As objects: an array of str has the length of the longest name in every place.
    return np.unique(np.array(names_N, object), return_inverse=True)[1].astype(np.int64)
