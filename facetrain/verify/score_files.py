"""Scores and embeddings of other systems: CSV files of scored pairs, and pair lists for files of embeddings.

A score file is a CSV file with a header line and one row for each pair. Columns:

    score        similarity of the pair; higher means more similar, on any scale. Or `distance`: lower is more similar.
    genuine      1 or true for two images of one person, 0 or false for two people
    pair         name of the pair, unique; without it, the number of the row from 0
    subject_1    person on the first image, and `subject_2` on the second, for the bootstrap; both or neither
    quality      quality of the worse image of the pair, or `quality_1` and `quality_2`, for the error-versus-discard
                 curve
    any other    slices, see `slice_table`; NAME_1 and NAME_2, the groups of both people, become one slice NAME

`FILE.csv:COLUMN` takes the score from another column; `FILE.csv:distance` is a distance.

A pair list is a CSV file with the columns `first` and `second`, the names of two images in the file of embeddings,
`genuine`, and the optional columns above.
"""

# P pairs

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin_tables import contradicting_pair
from facetrain.embeddings.dense_ids import dense_ids
from facetrain.embeddings.embedding_files import SUFFIXES, Embeddings, load_embeddings
from facetrain.embeddings.normalization import REJECTED, is_rejected
from facetrain.errors import DataError
from facetrain.files import listed
from facetrain.verify.metrics.score_scale import range_scale, scale_of
from facetrain.verify.metrics.scored_pairs import ScoredPairs
from facetrain.verify.sets.csv_columns import finite_numbers, read_columns
from facetrain.verify.sets.pair_columns import (
    NO_SLICES,
    SUBJECTS,
    pair_slices,
    read_pair_quality,
    score_file_and_column,
)
from facetrain.verify.sets.pair_set import PairSet, known_or_inferred_subjects
from facetrain.verify.sets.subjects import connected_subjects, items_of_pairs, subjects_of_items
from facetrain.verify.verification import score_pairs

_GENUINE = {"1": True, "true": True, "0": False, "false": False}
_PAIRS_AT_ONCE = 1 << 14
"""Pairs whose embeddings are in memory at one time."""


@dataclass(frozen=True)
class ScoreTable:
    """Pairs of a score file, or of a pair list with embeddings."""

    path: Path
    """File that the scores are from, for messages."""
    pair: Sequence[str]
    """Name of each pair, unique."""
    scored: ScoredPairs
    columns: dict[str, np.ndarray]
    """Slices: value of every pair, str (P,), by column."""
    quality: np.ndarray | None = None
    """Quality of every pair, float (P,); None without a column `quality`."""


def is_score_file(path: Path) -> bool:
    """Return whether a path has the suffix of a score file or of a file of embeddings, not of a model."""
    return score_file_and_column(path)[0].suffix == ".csv" or path.suffix in SUFFIXES


def read_scores(path: Path) -> ScoreTable:
    """Read a score file, `FILE.csv`, or one score column of it, `FILE.csv:COLUMN`.

    Raises:
        DataError: the file cannot be read, lacks a column, or a row has a value that is not allowed.
    """
    path, column = score_file_and_column(path)
    texts = read_columns(path)
    scores = {"score", "distance"} & texts.keys() if column is None else {column} & texts.keys()
    if len(scores) != 1:
        raise DataError(
            f"{path}: a score file needs either a column score or a column distance, or give the column to use as "
            f"{path}:COLUMN; the columns are {listed(texts)}"
        )
    (name,) = scores
    is_distance = name == "distance"
    least = "highest distance" if is_distance else "lowest score"
    # Removed from the table: the texts of millions of numbers take seven times their memory.
    score_P = finite_numbers(
        path,
        name,
        texts.pop(name),
        f". Give pairs that the system could not process the {least} of the other rows",
    )
    if is_distance:
        score_P = 0.0 - score_P  # not −0.0 for a distance of 0
    table = _score_table(path, texts, score_P)
    # Distances up to 1 are scores from −1 to 0, but no cosines.
    scale = range_scale(score_P) if is_distance else scale_of(score_P)
    return replace(table, scored=replace(table.scored, scale=scale))


def read_scored_pairs(embeddings: Path, pair_list: Path) -> ScoreTable:
    """Read a pair list, and score its pairs by the cosine of the embeddings of a `.npz` or `.parquet` file.

    Raises:
        DataError: a file cannot be read, or the list names an image that has no embedding, or more than one.
    """
    return score_pair_list(load_embeddings(embeddings), embeddings, pair_list)


def score_pair_list(loaded: Embeddings, embeddings: Path, pair_list: Path) -> ScoreTable:
    """Read a pair list, and score its pairs by the cosine of embeddings that were loaded from `embeddings`.

    Raises:
        DataError: as `read_scored_pairs`.
    """
    texts = read_columns(pair_list)
    first_P, second_P = (
        _rows_of_images(pair_list, side, texts, embeddings, loaded) for side in ("first", "second")
    )
    table = _score_table(pair_list, texts, _cosines(loaded.embedding, first_P, second_P))
    used_N = items_of_pairs(first_P, second_P, len(loaded.embedding))
    rejected = int(is_rejected(loaded.embedding)[used_N].sum())
    scored = replace(table.scored, rejected=rejected)
    if not set(SUBJECTS) <= texts.keys():
        subject_N = _subjects_of_images(loaded, scored.same_P, first_P, second_P, used_N)
        scored = replace(scored, first_P=first_P, second_P=second_P, subject_N=subject_N)
    return replace(table, path=embeddings, scored=scored)


def scores_of_set(path: Path, target: PairSet) -> ScoredPairs:
    """Read another system's scores, or embeddings, of the pairs of a set, in the order of the set.

    Raises:
        DataError: the file cannot be read, or its number of rows or its labels differ from the set.
    """
    subject_N = known_or_inferred_subjects(target)
    if path.suffix in SUFFIXES:
        embedding_ND = load_embeddings(path).embedding
        if len(embedding_ND) != 2 * len(target.same):
            raise DataError(
                f"{path}: {len(embedding_ND):,} embeddings; {target.name} has {2 * len(target.same):,} images, two for "
                "each pair in the order of the set"
            )
        return score_pairs(embedding_ND, target.same, subject_N)
    other = read_scores(path).scored
    _require_same_labels(path, other.same_P, target.same, target.name)
    return replace(other, subject_N=subject_N)


def scores_of_same_pairs(table: ScoreTable, other: ScoreTable) -> ScoredPairs:
    """Return the scores of `other` in the order of the pairs of `table`, with the subjects of `table`.

    Raises:
        DataError: the two have different pairs or labels.
    """
    row = {name: at for at, name in enumerate(other.pair)}
    missing = [name for name in table.pair if name not in row]
    if missing or len(other.pair) != len(table.pair):
        raise DataError(
            f"{other.path}: {len(other.pair):,} pairs, but {table.path} has {len(table.pair):,}, of which "
            f"{len(missing):,} are missing ({listed(missing[:3])}); two systems are compared on the same pairs"
        )
    order_P = np.array([row[name] for name in table.pair])
    scored = other.scored
    _require_same_labels(other.path, scored.same_P[order_P], table.scored.same_P, str(table.path))
    return replace(
        table.scored, score_P=scored.score_P[order_P], scale=scored.scale, rejected=scored.rejected
    )


def _score_table(path: Path, texts: dict[str, list[str]], score_P: np.ndarray) -> ScoreTable:
    same_P = _labels(path, texts)
    pair = texts.get("pair") or [str(number) for number in range(len(same_P))]
    if len(set(pair)) < len(pair):
        [(twice, _)] = Counter(pair).most_common(1)
        raise DataError(f"{path}: the pair {twice!r} occurs more than once in the column pair")
    index_P = np.arange(len(same_P))
    # Scores do not say which images two pairs share: each pair has two images of its own.
    scored = ScoredPairs(score_P, same_P, 2 * index_P, 2 * index_P + 1, _subjects(path, texts, same_P))
    texts = {name: values for name, values in texts.items() if name not in NO_SLICES}
    quality = read_pair_quality(path, texts)
    return ScoreTable(path, pair, scored, pair_slices(path, texts), quality)


def _subjects(path: Path, texts: dict[str, list[str]], same_P: np.ndarray) -> np.ndarray:
    """Return the subject id of both sides of each pair, int (2P,): without columns, genuine sides are one subject."""
    given = [texts[name] for name in SUBJECTS if name in texts]
    if len(given) == 1:
        raise DataError(
            f"{path}: has only one of the columns {' and '.join(SUBJECTS)}; give both, or neither"
        )
    if not given:
        index_P = np.arange(len(same_P))
        return connected_subjects(2 * index_P, 2 * index_P + 1, same_P, 2 * len(same_P))
    subjects = [subject for side in zip(*given, strict=True) for subject in side]
    wrong = contradicting_pair(subjects, same_P.tolist())
    if wrong is not None:
        raise DataError(
            f"{path}, row {wrong + 2}: genuine is {texts['genuine'][wrong]}, but the people are "
            f"{subjects[2 * wrong]!r} and {subjects[2 * wrong + 1]!r}; correct one of the columns"
        )
    return dense_ids(subjects)


def _subjects_of_images(
    loaded: Embeddings, same_P: np.ndarray, first_P: np.ndarray, second_P: np.ndarray, used_N: np.ndarray
) -> np.ndarray:
    """Return the subject id of each image, int (N,): its label, or what genuine pairs connect if one has no label."""
    label_N = np.asarray(loaded.label)
    agree = ((label_N[first_P] == label_N[second_P]) == same_P).all()
    if (label_N[used_N] < 0).any() or not agree:
        label_N = connected_subjects(first_P, second_P, same_P, len(label_N))
    return subjects_of_items(label_N, used_N)


def _labels(path: Path, texts: dict[str, list[str]]) -> np.ndarray:
    if not texts.get("genuine"):
        raise DataError(
            f"{path}: no column genuine, or no rows below the header line; it has 1 for two images of one person and 0 "
            "for two people"
        )
    same = [_GENUINE.get(value.lower()) for value in texts["genuine"]]
    if None in same:
        row = same.index(None)
        raise DataError(
            f"{path}, row {row + 2}: genuine is {texts['genuine'][row]!r}; allowed are 1, 0, true and false"
        )
    return np.array(same, bool)


def _rows_of_images(
    path: Path, side: str, texts: dict[str, list[str]], embeddings: Path, loaded: Embeddings
) -> np.ndarray:
    """Return the row of the embedding of each image of a column: int (P,)."""
    if side not in texts:
        raise DataError(f"{path}: no column {side}; a pair list has the columns first, second and genuine")
    row: dict[str, int] = {}
    twice = {name for at, name in enumerate(loaded.name) if row.setdefault(name, at) != at}
    listed = texts[side]
    if listed and listed[0] not in row:
        # Embeddings of a list file are named by whole paths; the pairs may be paths inside the folder of the images.
        inside = [name for name in row if name.endswith(f"/{listed[0]}")]
        folder = inside[0].removesuffix(listed[0]) if len(inside) == 1 else ""
        listed = [folder + name for name in listed]
    for number, name in enumerate(listed, start=2):
        if name not in row or name in twice:
            fault = "more than one embedding" if name in twice else "no embedding"
            raise DataError(f"{path}, row {number}: the image {name!r} has {fault} in {embeddings}")
    return np.array([row[name] for name in listed], np.int64)


def _cosines(unit_ND: np.ndarray, first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    """Return the cosine of the rows of each pair, float64 (P,), computed as for the pairs of a set."""
    unit = np.asarray(unit_ND, np.float64)
    rejected_N = is_rejected(unit)
    unit /= np.where(rejected_N, 1, np.linalg.norm(unit, axis=1))[:, None]
    cosine_P = np.empty(len(first_P))
    for start in range(0, len(first_P), _PAIRS_AT_ONCE):
        at = slice(start, start + _PAIRS_AT_ONCE)
        # From the distance, as `verification.score_pairs` computes it: equal pairs get equal scores.
        cosine_P[at] = 1 - np.square(unit[first_P[at]] - unit[second_P[at]]).sum(1) / 2
    cosine_P[rejected_N[first_P] | rejected_N[second_P]] = REJECTED
    return cosine_P


def _require_same_labels(path: Path, same_P: np.ndarray, expected_P: np.ndarray, name: str) -> None:
    if len(same_P) != len(expected_P):
        raise DataError(f"{path}: {len(same_P):,} pairs, but {name} has {len(expected_P):,}")
    wrong = np.flatnonzero(same_P != expected_P)
    if len(wrong):
        raise DataError(
            f"{path}: genuine differs from the labels of {name} in {len(wrong):,} pairs, first in pair {wrong[0]}; the "
            "rows must be in the order of the set"
        )
