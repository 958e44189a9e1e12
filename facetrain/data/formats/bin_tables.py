"""Tables beside NAME.bin or NAME.bin.xz with one text for each image, in the order of the `.bin`, below a header line.

`NAME.subjects.csv` has the subject of each image, by which the bootstrap knows the pairs that share a person.
`NAME.groups.csv` has the group of people. Both are slice tables of `facetrain eval`; readers of `.bin` files ignore
them.
"""

# N images, two per pair   P pairs

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from facetrain.data.formats.set_names import set_name
from facetrain.errors import PairsError
from facetrain.files import error_reason, os_errors_as, read_regular_text, write_atomically

_MAX_BYTES_PER_IMAGE = 1024
"""Longest row that is read, so that a wrong file of any size does not fill the memory."""


def groups_path(bin_path: Path) -> Path:
    """Return the path of the table of groups that belongs to a `.bin` file."""
    return bin_path.with_name(f"{set_name(bin_path)}.groups.csv")


def subjects_path(bin_path: Path) -> Path:
    """Return the path of the table of subjects that belongs to a `.bin` file."""
    return bin_path.with_name(f"{set_name(bin_path)}.subjects.csv")


def write_subjects(bin_path: Path, names: Sequence[str]) -> None:
    """Write the subject of each image of a `.bin` file.

    Raises:
        PairsError: the file cannot be written.
    """
    path, content = subjects_path(bin_path), io.StringIO()
    csv.writer(content, lineterminator="\n").writerows([["subject"], *([name] for name in names)])
    with os_errors_as(PairsError, path):
        write_atomically(path, content.getvalue())


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
    path, count = subjects_path(bin_path), 2 * len(same_P)
    if not path.exists():
        return None
    try:
        if path.stat().st_size > (count + 1) * _MAX_BYTES_PER_IMAGE:
            raise ValueError("too large")
        header, *rows = (row for row in csv.reader(io.StringIO(read_regular_text(path), newline="")) if row)
        if header != ["subject"] or len(rows) != count or any(len(row) != 1 for row in rows):
            raise ValueError(f"expected a line `subject`, and then one subject for each of {count:,} images")
        names_N = [name for (name,) in rows]
        if "" in names_N:  # images without a name would count as one person
            raise ValueError(f"the subject of image {names_N.index('')} is empty")
        if contradicting_pair(names_N, same_P.tolist()) is not None:
            raise ValueError("contradicts the labels of the pairs")
    except (OSError, ValueError, csv.Error) as error:
        raise PairsError(
            f"{path}: not the subjects of {bin_path.name} ({error_reason(error)}); remove the table, or convert the "
            "pair list again with `facetrain data pairs`"
        ) from error
    # As objects: an array of str has the length of the longest name in every place.
    return np.unique(np.array(names_N, object), return_inverse=True)[1].astype(np.int64)
