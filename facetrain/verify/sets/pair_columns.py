"""Columns of tables of pairs: the score of one of several systems, and groups of both people.

`NAME_1` and `NAME_2` are the groups of the two people of a pair. They become one slice NAME, whose value is the group
that both have, or `a / b`; of many different numbers, the quartiles of both columns together are the groups.
"""

# P pairs

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.verify.sets.slice_table import pair_values, slice_values

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
            if group in texts:
                raise DataError(
                    f"{path}: has the columns {group}, {group}_1 and {group}_2, and the last two would become one "
                    f"column {group}; rename or remove one of them"
                )
            # Both together, so that numbers have the same quartiles on both sides.
            value = slice_values([*values, *texts[sides[1]]])
            slices[group] = pair_values(value[: len(values)], value[len(values) :])
    return slices
