"""Columns of tables of pairs: the score of one of several systems, and groups of both people.

`NAME_1` and `NAME_2` are the groups of the two people of a pair. They become one slice NAME, whose value is the group
that both have, or `a / b`; of many different numbers, the quartiles of both columns together are the groups.
"""

# P pairs

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.verify.sets.csv_columns import finite_numbers
from facetrain.verify.sets.slice_table import QUALITY, pair_values, slice_values

SUBJECTS = ("subject_1", "subject_2")
"""Columns of the people on both images."""
NO_SLICES = {"score", "distance", "genuine", "pair", "first", "second", *SUBJECTS}
"""Columns with a meaning, which are no slices."""


def score_file_and_column(path: Path) -> tuple[Path, str | None]:
    """Split `FILE.csv:COLUMN` into the file and the column; return None for the column if there is none."""
    file, colon, column = str(path).rpartition(":")
    return (Path(file), column) if colon and file.endswith(".csv") and not path.exists() else (path, None)


def pair_slices(path: Path, texts: dict[str, list[str]]) -> dict[str, np.ndarray]:
    """Return the slices of the columns of a table: value of every pair, str (P,), by name.

    Raises:
        DataError: two columns `NAME_1` and `NAME_2` would become a slice that the table already has.
    """
    slices = {}
    for name, values in texts.items():
        group = name[:-2]
        sides = f"{group}_1", f"{group}_2"
        if not group or group in NO_SLICES or name not in sides or not set(sides) <= texts.keys():
            slices[name] = slice_values(values)
        elif name == sides[0]:
            _require_free(path, group, texts)
            # Both together, so that numbers have the same quartiles on both sides.
            value = slice_values([*values, *texts[sides[1]]])
            slices[group] = pair_values(value[: len(values)], value[len(values) :])
    return slices


def read_pair_quality(path: Path, texts: dict[str, list[str]]) -> np.ndarray | None:
    """Remove the quality from the columns of a table, and return the quality of every pair; None if there is none.

    It is the column `quality`, or the lower one of the columns `quality_1` and `quality_2` of both images.

    Raises:
        DataError: a value is not a finite number, or the table has all three columns.
    """
    names = [QUALITY] if QUALITY in texts else []
    sides = [f"{QUALITY}_1", f"{QUALITY}_2"]
    if set(sides) <= texts.keys():
        _require_free(path, QUALITY, texts)
        names = sides
    columns = [finite_numbers(path, name, texts.pop(name)) for name in names]
    return np.min(columns, axis=0) if columns else None


def _require_free(path: Path, name: str, texts: dict[str, list[str]]) -> None:
    """Check that a table with `NAME_1` and `NAME_2` does not have a column NAME too."""
    if name in texts:
        raise DataError(
            f"{path}: has the columns {name}, {name}_1 and {name}_2, and the last two would become one column {name}; "
            "rename or remove one of them"
        )
