"""Scores of other systems: CSV files of scored pairs.

A score file is a CSV file with a header line and one row for each pair. Columns:

    score        similarity of the pair; higher means more similar, on any scale
    genuine      1 or true for two images of one person, 0 or false for two people
    subject_1    person on the first image, and `subject_2` on the second, for the bootstrap; both or neither
    quality      quality of the worse image of the pair, for the error-versus-discard curve
    any other    slices, see `slice_table`; NAME_1 and NAME_2 are the groups of both images, for the cross-group matrix
"""

# P pairs

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin_tables import contradicting_pair
from facetrain.distinct import dense_ids
from facetrain.errors import DataError
from facetrain.text import count_text, listed
from facetrain.verify.metrics.score_scale import scale_of
from facetrain.verify.metrics.scored_pairs import ScoredPairs
from facetrain.verify.sets.csv_columns import CsvTable, read_columns
from facetrain.verify.sets.pair_set import PairSet, known_or_inferred_subjects
from facetrain.verify.sets.slice_table import QUALITY, SliceTable, pair_values, slice_columns
from facetrain.verify.sets.subjects import connected_subjects

_SUBJECTS = ("subject_1", "subject_2")
_KNOWN_COLUMNS = {"genuine", *_SUBJECTS}
"""Columns with a meaning, which are no slices."""
_GENUINE = {"1": True, "true": True, "0": False, "false": False}


@dataclass(frozen=True)
class ScoreTable:
    """Pairs of a score file."""

    path: Path
    """File that the scores are from, for messages."""
    scored: ScoredPairs
    slices: SliceTable
    """Its `sides` are by column without `_1` and `_2`."""
    people: list[str] | None
    """Names of the people on both sides of each pair, side by side (2P,); None without such columns."""


def is_score_file(path: Path) -> bool:
    """Return whether a path has the suffix of a score file, not of a model."""
    return path.suffix == ".csv"


def read_scores(path: Path) -> ScoreTable:
    """Read a score file.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row has a value that is not allowed.
    """
    table = read_columns(path)
    if "score" not in table.columns:
        raise DataError(
            f"{path}: a score file needs a column score, higher for more similar (a negated distance); the columns "
            f"are {listed(table.columns)}"
        )
    score_P = table.take_numbers(
        "score", ". Give pairs that the system could not process the lowest score of the other rows"
    )
    with np.errstate(over="ignore"):
        is_finite = not len(score_P) or bool(np.isfinite(np.ptp(score_P)))
    if not is_finite:
        raise DataError(
            f"{path}: column score: the differences of such scores are infinite; divide the scores"
        )
    return _score_table(table, score_P)


def scores_of_set(path: Path, target: PairSet) -> ScoredPairs:
    """Read another system's scores of the pairs of a set, in the order of the set.

    Raises:
        DataError: the file cannot be read, or its number of rows, its labels or its people differ from the set.
    """
    table = read_scores(path)
    _require_same_labels(path, table.scored.same_P, target.same, target.name)
    if target.subject is not None and table.people:
        # The set has numbers of people and no names: both are numbered in the order in which they appear.
        ids, expected = dense_ids(table.people), dense_ids(target.subject.tolist())
        _require_same_people(path, ids.tolist(), expected.tolist(), target.name)
    return replace(table.scored, subject_N=known_or_inferred_subjects(target))


def scores_of_same_pairs(table: ScoreTable, other: ScoreTable) -> ScoredPairs:
    """Return the scores of `other`, whose rows have the order of `table`, with the subjects of `table`.

    Raises:
        DataError: the number of rows, the labels or the people differ.
    """
    _require_same_labels(other.path, other.scored.same_P, table.scored.same_P, str(table.path))
    if table.people and other.people:
        _require_same_people(other.path, other.people, table.people, str(table.path))
    return replace(table.scored, score_P=other.scored.score_P, scale=other.scored.scale)


def _score_table(table: CsvTable, score_P: np.ndarray) -> ScoreTable:
    path, same_P = table.path, _labels(table)
    index_P = np.arange(len(same_P))
    people = _people(table, same_P)
    # Scores do not say which images two pairs share: each pair has two images of its own. Without people, the two of a
    # genuine pair are one subject.
    subject_N = (
        dense_ids(people)
        if people
        else connected_subjects(2 * index_P, 2 * index_P + 1, same_P, 2 * len(same_P))
    )
    scored = ScoredPairs(score_P, same_P, 2 * index_P, 2 * index_P + 1, subject_N, scale_of(score_P, same_P))
    quality = table.take_numbers(QUALITY) if QUALITY in table.columns else None
    columns = slice_columns(
        path, {name: values for name, values in table.columns.items() if name not in _KNOWN_COLUMNS}
    )
    names = [name.removesuffix("_1") for name in columns if name.endswith("_1") and name != "_1"]
    names = [name for name in names if f"{name}_2" in columns]
    if both := [name for name in names if name in columns]:
        raise DataError(
            f"{path}: has the columns {both[0]}, {both[0]}_1 and {both[0]}_2; rename the first one"
        )
    sides = {name: (columns.pop(f"{name}_1"), columns.pop(f"{name}_2")) for name in names}
    columns |= {name: pair_values(*values) for name, values in sides.items()}
    return ScoreTable(path, scored, SliceTable(columns, None, sides, quality), people)


def _people(table: CsvTable, same_P: np.ndarray) -> list[str] | None:
    """Return the names of the people on both sides of each pair, (2P,); None without columns."""
    given = [table.columns[name] for name in _SUBJECTS if name in table.columns]
    if len(given) == 1:
        raise DataError(
            f"{table.path}: has only one of the columns {' and '.join(_SUBJECTS)}; give both, or neither"
        )
    if not given:
        return None
    people = [person for sides in zip(*given, strict=True) for person in sides]
    if "" in people:  # rows without a name would count as one person
        row, side = divmod(people.index(""), 2)
        raise DataError(
            f"{table.place(row)}: {_SUBJECTS[side]} is empty; name every person, or remove both columns"
        )
    wrong = contradicting_pair(people, same_P.tolist())
    if wrong is not None:
        raise DataError(
            f"{table.place(wrong)}: genuine is {table.columns['genuine'][wrong]}, but the people are "
            f"{people[2 * wrong]!r} and {people[2 * wrong + 1]!r}; correct one of the columns"
        )
    return people


def _labels(table: CsvTable) -> np.ndarray:
    texts = table.columns.get("genuine")
    if not texts:
        raise DataError(
            f"{table.path}: no column genuine, or no rows below the header line; it has 1 for two images of one person "
            "and 0 for two people"
        )
    same = [_GENUINE.get(text.lower()) for text in texts]
    if None in same:
        row = same.index(None)
        raise DataError(f"{table.place(row)}: genuine is {texts[row]!r}; allowed are 1, 0, true and false")
    return np.array(same, bool)


def _require_same_labels(path: Path, same_P: np.ndarray, expected_P: np.ndarray, name: str) -> None:
    if len(same_P) != len(expected_P):
        raise DataError(f"{path}: {len(same_P):,} pairs, but {name} has {len(expected_P):,}")
    wrong = np.flatnonzero(same_P != expected_P)
    if len(wrong):
        raise DataError(
            f"{path}: genuine differs from the labels of {name} in {count_text(len(wrong), 'pair')}, first in pair "
            f"{wrong[0]}; the rows must be in the order of the set"
        )


def _require_same_people(
    path: Path, people: Sequence[str | int], expected: Sequence[str | int], name: str
) -> None:
    """Check that both sides of each pair show the expected people, (2P,) each."""
    sides = enumerate(zip(people, expected, strict=True))
    wrong = next((side for side, (one, other) in sides if one != other), None)
    if wrong is not None:
        raise DataError(
            f"{path}: the people differ from those of {name}, first in pair {wrong // 2}; the rows must be in the "
            "order of the set"
        )
