"""Columns of tables of pairs: the score of one of several systems, groups of both people, and the names of BFW.

`NAME_1` and `NAME_2` are the groups of the two people of a pair. They become one slice NAME, whose value is the group
that both have, or `a / b`; of many different numbers, the quartiles of both columns together are the groups.

The table of BFW ("Balanced Faces in the Wild", Robinson et al., CVPR Workshops 2020) has the columns p1, p2, label,
id1, id2, att1, att2, g1, g2, e1, e2 and a score column for each system. They are read as the two images, `genuine`,
the subjects, and the groups `subgroup`, `gender` and `ethnicity`.
"""

# P pairs

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.files import listed
from facetrain.verify.sets.slice_table import QUALITY, pair_values, read_quality, slice_values

SUBJECTS = ("subject_1", "subject_2")
"""Columns of the people on both images."""
NO_SLICES = {"score", "distance", "genuine", "pair", "first", "second", *SUBJECTS}
"""Columns with a meaning of their own."""
_BFW = {
    "p1": "first", "p2": "second", "label": "genuine",
    "id1": SUBJECTS[0], "id2": SUBJECTS[1], "ids1": SUBJECTS[0], "ids2": SUBJECTS[1],
    "att1": "subgroup_1", "att2": "subgroup_2", "g1": "gender_1", "g2": "gender_2",
    "e1": "ethnicity_1", "e2": "ethnicity_2",
}  # fmt: skip
"""Names of BFW's columns in a pair list."""
_BFW_IGNORED = {"ID", "Unnamed: 0", "fold", "a1", "a2"}
"""Row number, the published five folds, and abbreviations of att1 and att2."""


def score_file_and_column(path: Path) -> tuple[Path, str | None]:
    """Split `FILE.csv:COLUMN` into the file and the column; return None for the column if there is none."""
    file, colon, column = str(path).rpartition(":")
    return (Path(file), column) if colon and file.endswith(".csv") and not path.exists() else (path, None)


def unify_columns(
    path: Path, texts: dict[str, list[str]], *, score: str | None, need_score: bool
) -> dict[str, list[str]]:
    """Return the columns of a table with the names of a score file or pair list.

    Args:
        path: the table, for messages.
        texts: values (P,) by column.
        score: the column of the score; None if it is `score` or `distance`.
        need_score: False for a pair list. The other columns of a table of BFW are then the scores of systems, and
            dropped.

    Raises:
        DataError: there is no such column, or a table of BFW has scores and none of them is selected.
    """
    if score is not None and score not in texts:
        raise DataError(f"{path}: no column {score!r}; the columns are {listed(texts)}")
    if {"p1", "p2", "label"} <= texts.keys():
        texts = _from_bfw(path, texts, score, need_score)
    elif score is not None:
        others = {name: values for name, values in texts.items() if name not in ("score", "distance", score)}
        texts = others | {_kind_of_score(score): texts[score]}
    return texts


def _from_bfw(
    path: Path, texts: dict[str, list[str]], score: str | None, need_score: bool
) -> dict[str, list[str]]:
    systems = [name for name in texts if name not in _BFW and name not in _BFW_IGNORED]
    if need_score and score is None and "score" in systems:
        score = "score"
    if need_score and score is None:
        raise DataError(
            f"{path}: has the scores of several systems; select one as {path}:COLUMN, where COLUMN is "
            f"{' or '.join(systems)}"
        )
    found = {_BFW[name]: values for name, values in texts.items() if name in _BFW}
    return found if score is None else found | {_kind_of_score(score): texts[score]}


def _kind_of_score(column: str) -> str:
    """Return the name of a selected column in a score file: a column `distance` keeps its meaning."""
    return column if column == "distance" else "score"


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
    """Remove the quality from the columns of a table, and return that of every pair; None if there is none.

    It is the column `quality`, or the lower one of the columns `quality_1` and `quality_2` of both images.

    Raises:
        DataError: a value is not a finite number, or the table has all three columns.
    """
    sides = f"{QUALITY}_1", f"{QUALITY}_2"
    if not set(sides) <= texts.keys():
        return read_quality(path, texts) if QUALITY in texts else None
    _require_free(path, QUALITY, texts)
    first_P, second_P = (read_quality(path, texts, side) for side in sides)
    return np.minimum(first_P, second_P)


def _require_free(path: Path, name: str, texts: dict[str, list[str]]) -> None:
    """Check that a table with `NAME_1` and `NAME_2` does not have a column NAME too."""
    if name in texts:
        raise DataError(
            f"{path}: has the columns {name}, {name}_1 and {name}_2, and the last two would become one column {name}; "
            "rename or remove one of them"
        )
