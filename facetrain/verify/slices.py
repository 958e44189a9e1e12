"""Error rates by age gap, pose, sex, skin tone or any other column of a table, at one threshold for all.

The table is a CSV with a line of names on top, and either a row for each pair of the set or a row for each
image, in the set's order. By images, a pair belongs to the value that both have, or to `a / b`; and a
column `subject` says who is in each, for the bootstrap.
"""

# P pairs   V values of a column   R draws of subjects

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.verify import bootstrap
from facetrain.verify.pair_blocks import PairBlocks, every_subject_once
from facetrain.verify.result import Group
from facetrain.verify.scored_pairs import REPLICATES, ScoredPairs
from facetrain.verify.subjects import dense_ids

_VALUES = 12
"""A column of numbers with more values than this is cut into four ranges with as many rows each."""
_KINDS = 4
_SUBJECT = "subject"


@dataclass(frozen=True)
class SliceTable:
    """What a CSV says of a set of pairs."""

    columns: dict[str, np.ndarray]
    """The value of every pair (P,), by column."""
    subject: np.ndarray | None
    """Who is in each of the 2P images, from 0 without gaps, where the table says it."""


def read_slice_table(path: Path, pairs: int) -> SliceTable:
    """Read a table for a set of so many pairs.

    Raises:
        DataError: the file cannot be read, or has another number of rows; the message says which are right.
    """
    names, rows = _rows(path)
    if len(rows) not in (pairs, 2 * pairs):
        raise DataError(
            f"{path}: {len(rows):,} rows; a row for each of {pairs:,} pairs or {2 * pairs:,} images is needed"
        )
    texts = {name: [row[at].strip() for row in rows] for at, name in enumerate(names)}
    subject = texts.pop(_SUBJECT, None)
    columns = {name: _ranges(values) for name, values in texts.items()}
    if len(rows) == 2 * pairs:
        columns = {name: _of_pairs(value[0::2], value[1::2]) for name, value in columns.items()}
    elif subject is not None:
        raise DataError(
            f"{path}: a column {_SUBJECT} needs a row for each of {2 * pairs:,} images, not for each pair"
        )
    return SliceTable(columns, None if subject is None else dense_ids(subject))


def _rows(path: Path) -> tuple[list[str], list[list[str]]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names, *rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error, ValueError) as error:
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error or 'is empty'}") from error
    wrong = next((number for number, row in enumerate(rows, start=2) if len(row) != len(names)), None)
    if wrong:
        raise DataError(f"{path}, row {wrong}: {len(rows[wrong - 2])} fields under {len(names)} names")
    return [name.strip() for name in names], rows


def _ranges(values: list[str]) -> np.ndarray:
    """Return the values, or the ranges that they fall into where they are many numbers."""
    try:
        number = np.array(values, dtype=np.float64)
    except ValueError:
        return np.array(values)
    if len(np.unique(number)) <= _VALUES or not np.isfinite(number).all():
        return np.array(values)
    edge = np.unique(np.quantile(number, [0, 0.25, 0.5, 0.75, 1]))
    part = np.clip(np.searchsorted(edge, number, side="right") - 1, 0, len(edge) - 2)
    names = np.array([f"{low:g} to {high:g}" for low, high in pairwise(edge)])
    return names[part]


def _of_pairs(first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    low, high = np.where(first_P < second_P, (first_P, second_P), (second_P, first_P))
    return np.where(low == high, low, np.char.add(np.char.add(low, " / "), high))


def slice_groups(
    pairs: ScoredPairs,
    columns: dict[str, np.ndarray],
    threshold: float,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> list[Group]:
    """Return accuracy, FMR and FNMR of every value of every column where a cosine of `threshold` accepts a pair.

    FMR is the share of impostor pairs that are accepted, FNMR that of genuine pairs that are not. A group
    without pairs of a kind has None there.
    """
    return [
        group
        for column, value_P in columns.items()
        for group in _column(pairs, column, value_P, threshold, replicates, seed)
    ]


def _column(
    pairs: ScoredPairs, column: str, value_P: np.ndarray, threshold: float, replicates: int, seed: int
) -> list[Group]:
    values, number_P = np.unique(value_P, return_inverse=True)
    wrong_P = (pairs.score_P >= threshold) != pairs.same_P
    first_P, second_P = pairs.sides
    cells = PairBlocks(
        number_P * _KINDS + 2 * pairs.same_P + wrong_P, len(values) * _KINDS, first_P, second_P
    )
    known = _rates(cells.sums(every_subject_once(pairs.subjects)))
    drawn = bootstrap.draw_subjects(pairs.subjects, replicates, pairs=len(value_P), seed=seed)
    parts = [_rates(cells.sums(drawn_RS)) for drawn_RS in drawn]
    replicate = {name: np.concatenate([part[name] for part in parts]) for name in known} if parts else {}
    counts = cells.sums(every_subject_once(pairs.subjects)).reshape(len(values), _KINDS)
    groups = []
    for at, value in enumerate(values.tolist()):
        metrics = {name: _told(rate[0, at]) for name, rate in known.items()}
        impostors, genuine = float(counts[at, :2].sum()), float(counts[at, 2:].sum())
        metrics |= {"pairs": impostors + genuine, "genuine": genuine, "impostors": impostors}
        mine = number_P == at
        subjects = len(np.unique(np.concatenate([first_P[mine], second_P[mine]])))
        spans = {name: bootstrap.interval(rate[:, at], subjects) for name, rate in replicate.items()}
        groups.append(
            Group(column, str(value), metrics, {name: span for name, span in spans.items() if span})
        )
    return groups


def _rates(sums_RC: np.ndarray) -> dict[str, np.ndarray]:
    """Return each rate of each value, (R, V), NaN where no pair tells it."""
    right_impostor, wrong_impostor, right_genuine, wrong_genuine = np.moveaxis(
        sums_RC.reshape(len(sums_RC), -1, _KINDS), 2, 0
    )
    impostors, genuine = right_impostor + wrong_impostor, right_genuine + wrong_genuine
    return {
        "accuracy": _share(right_impostor + right_genuine, impostors + genuine),
        "fmr": _share(wrong_impostor, impostors),
        "fnmr": _share(wrong_genuine, genuine),
    }


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _told(rate: float) -> float | None:
    return None if np.isnan(rate) else float(rate)
