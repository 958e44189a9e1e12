"""Columns of tables of pairs: the score of one of several systems, groups of both people, and the names of BFW.

`NAME_1` and `NAME_2` are the groups of the two people of a pair. They become one slice NAME, whose value is the group
that both have, or `a / b`.

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
from facetrain.verify.slice_table import pair_values

SUBJECTS = ("subject_1", "subject_2")
"""Columns of the people on both images."""
_BFW = {
    "p1": "first", "p2": "second", "label": "genuine",
    "id1": SUBJECTS[0], "id2": SUBJECTS[1], "ids1": SUBJECTS[0], "ids2": SUBJECTS[1],
    "att1": "subgroup_1", "att2": "subgroup_2", "g1": "gender_1", "g2": "gender_2",
    "e1": "ethnicity_1", "e2": "ethnicity_2",
}  # fmt: skip
"""Names of BFW's columns in a pair list."""
_BFW_IGNORED = {"ID", "", "Unnamed: 0", "fold", "a1", "a2"}
"""Row number, the published five folds, and abbreviations of att1 and att2."""


def score_file_and_column(path: Path) -> tuple[Path, str | None]:
    """Split `FILE.csv:COLUMN` into the file and the column; return None for the column if there is none."""
    file, colon, column = str(path).rpartition(":")
    return (Path(file), column) if colon and file.endswith(".csv") and not path.exists() else (path, None)


def unify_columns(
    path: Path, texts: dict[str, list[str]], *, score: str | None, need_score: bool
) -> dict[str, list[str]]:
    """Return the columns of a table with the names of a score file or pair list, and groups as slices.

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
        texts = others | {"score": texts[score]}
    return _merge_groups(texts)


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
    return found if score is None else found | {"score": texts[score]}


def _merge_groups(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Replace columns `NAME_1` and `NAME_2` by one column NAME, except for the subjects."""
    merged = {}
    for name, values in texts.items():
        group, other = name[:-2], f"{name[:-2]}_2"
        if name in SUBJECTS or name[-2:] not in ("_1", "_2") or not {f"{group}_1", other} <= texts.keys():
            merged[name] = values
        elif name.endswith("_1"):
            merged[group] = pair_values(np.array(values, str), np.array(texts[other], str)).tolist()
    return merged
