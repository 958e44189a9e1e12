"""Error rates by slice: by age gap, pose, sex, skin tone or any other column of a table, at one threshold.

The table is a CSV file with a header line, and one row for each pair or one row for each image, in the order of
the set. With a row for each image, a pair has the value that both images have, or `a / b`; a column `subject`
then holds the person of each image, for the bootstrap. A column `quality` is not a slice: it gives the
error-versus-discard curve, see `discard`.
"""

# P pairs   V values of a column   R draws of subjects

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.verify import bootstrap
from facetrain.verify.csv_columns import read_columns
from facetrain.verify.fold_accuracy import FOLDS, FoldSearch, fold_order
from facetrain.verify.group_summary import RATES, GroupSummary, summarize_groups
from facetrain.verify.pair_blocks import PairBlocks, every_subject_once
from facetrain.verify.pair_columns import pair_values
from facetrain.verify.result import Group
from facetrain.verify.scored_pairs import REPLICATES, ScoredPairs
from facetrain.verify.subjects import dense_ids

_MAX_VALUES = 12
"""A column with more different numbers than this is divided into its quartiles."""
_OUTCOMES = 4
"""Outcomes of a pair: impostor rejected, impostor accepted, genuine accepted, genuine rejected."""
_MAX_TEXT_BYTES = 1 << 26
_SUBJECT = "subject"
QUALITY = "quality"
"""Name of the column with a quality measure, which is a curve and not a slice."""


@dataclass(frozen=True)
class SliceTable:
    """Columns of a slice table, per pair."""

    columns: dict[str, np.ndarray]
    """Value of every pair, str (P,), by column."""
    subject: np.ndarray | None
    """Subject id of each of the 2P images, int from 0 without gaps; None without a column `subject`."""
    quality: np.ndarray | None = None
    """Quality of every pair, float (P,): that of its worse image; None without a column `quality`."""


def read_slice_table(path: Path, pairs: int) -> SliceTable:
    """Read the table of a set with `pairs` pairs.

    Raises:
        DataError: the file cannot be read, or its number of rows does not fit the set.
    """
    texts = read_columns(path)
    rows = len(next(iter(texts.values())))
    if rows not in (pairs, 2 * pairs):
        raise DataError(
            f"{path}: {rows:,} rows, expected one for each of {pairs:,} pairs or of {2 * pairs:,} images"
        )
    subject = texts.pop(_SUBJECT, None)
    quality = read_quality(path, texts)
    if quality is not None and rows == 2 * pairs:
        quality = np.minimum(quality[0::2], quality[1::2])
    columns = {name: slice_values(values) for name, values in texts.items()}
    if rows == 2 * pairs:
        columns = {name: pair_values(value[0::2], value[1::2]) for name, value in columns.items()}
    elif subject is not None:
        raise DataError(
            f"{path}: the column {_SUBJECT} needs one row for each of {2 * pairs:,} images; this table has one for "
            "each pair"
        )
    return SliceTable(columns, None if subject is None else dense_ids(subject), quality)


def read_quality(path: Path, texts: dict[str, list[str]]) -> np.ndarray | None:
    """Remove the column `quality` from the columns of a table, and return its numbers; None if there is no such column.

    Raises:
        DataError: a value is not a finite number.
    """
    texts_of_column = texts.pop(QUALITY, None)
    if texts_of_column is None:
        return None
    for row, text in enumerate(texts_of_column, start=2):
        try:
            finite = np.isfinite(float(text))
        except ValueError:
            finite = False
        if not finite:
            raise DataError(f"{path}, row {row}: {QUALITY} is {text!r}, not a finite number")
    return np.array(texts_of_column, np.float64)


def slice_values(values: list[str]) -> np.ndarray:
    """Return the values, str (P,), or the quartiles that they belong to if there are many different numbers."""
    try:
        number = np.array(values, dtype=np.float64)
    except ValueError:
        return _texts(values)
    if len(np.unique(number)) <= _MAX_VALUES or not np.isfinite(number).all():
        return _texts(values)
    edge = np.unique(np.quantile(number, [0, 0.25, 0.5, 0.75, 1]))
    quartile = np.clip(np.searchsorted(edge, number, side="right") - 1, 0, len(edge) - 2)
    names = np.array([f"{low:g} to {high:g}" for low, high in pairwise(edge)])
    return names[quartile]


def _texts(values: list[str]) -> np.ndarray:
    """Return the values as an array, (P,): of str, or of Python objects if they have very different lengths.

    An array of str has the length of the longest value in every place: one long value could fill the memory.
    """
    size = 4 * len(values) * max(map(len, values), default=0)
    is_wide = size > _MAX_TEXT_BYTES and size > 16 * sum(map(len, values))
    return np.array(values, object if is_wide else None)


def slice_groups(
    pairs: ScoredPairs,
    columns: dict[str, np.ndarray],
    threshold: float,
    *,
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[list[Group], list[GroupSummary]]:
    """Return accuracy, FMR and FNMR for every value of every column, at one threshold for all, and their spread.

    `fold_accuracy` is the 10-fold accuracy of the value by itself, as published for the groups of RFW.

    FMR is the share of impostor pairs that are accepted, FNMR the share of genuine pairs that are rejected
    (ISO/IEC 19795-1). A rate without pairs is None. One threshold for all groups is what NIST's demographic
    report compares (Grother, Ngan and Hanaoka, NISTIR 8280, 2019): a threshold per group would hide differences.
    """
    groups, summaries = [], []
    for column, value_P in columns.items():
        of_column, summary = _slice_column(pairs, column, value_P, threshold, replicates, seed)
        groups += of_column
        if summary.metrics:
            summaries.append(summary)
    return groups, summaries


def _slice_column(
    pairs: ScoredPairs, column: str, value_P: np.ndarray, threshold: float, replicates: int, seed: int
) -> tuple[list[Group], GroupSummary]:
    values, value_index_P = np.unique(value_P, return_inverse=True)
    wrong_P = (pairs.score_P >= threshold) != pairs.same_P
    first_P, second_P = pairs.sides
    block_P = value_index_P * _OUTCOMES + 2 * pairs.same_P + wrong_P
    blocks = PairBlocks(block_P, len(values) * _OUTCOMES, first_P, second_P)
    folds = GroupFolds(pairs, value_index_P, len(values))

    def rates_in(drawn_RS: np.ndarray) -> dict[str, np.ndarray]:
        return _rates(blocks.counts(drawn_RS)) | {"fold_accuracy": folds.accuracy(drawn_RS)}

    everybody = every_subject_once(pairs.subjects)
    count_1B, rates = blocks.counts(everybody), rates_in(everybody)
    draws = bootstrap.draw_subjects(pairs.subjects, replicates, pairs=len(value_P), seed=seed)
    chunks = [rates_in(drawn_RS) for drawn_RS in draws]
    replicate = {name: np.concatenate([chunk[name] for chunk in chunks]) for name in rates} if chunks else {}
    counts = count_1B.reshape(len(values), _OUTCOMES)
    groups = []
    for at, value in enumerate(values.tolist()):
        metrics = {name: _none_if_nan(rate[0, at]) for name, rate in rates.items()}
        impostors, genuine = float(counts[at, :2].sum()), float(counts[at, 2:].sum())
        metrics |= {"pairs": impostors + genuine, "genuine": genuine, "impostors": impostors}
        members = value_index_P == at
        subjects = len(np.unique(np.concatenate([first_P[members], second_P[members]])))
        found = {
            name: bootstrap.interval(rate[:, at], subjects, float(rates[name][0, at]))
            for name, rate in replicate.items()
            if metrics[name] is not None
        }
        intervals = {name: interval for name, interval in found.items() if interval}
        groups.append(Group(column, str(value), metrics, intervals))
    return groups, _summary(column, rates, replicate, pairs.subjects)


def _summary(
    column: str, rates: dict[str, np.ndarray], replicate: dict[str, np.ndarray], subjects: int
) -> GroupSummary:
    """Summarize the groups of a column that have genuine and impostor pairs; without two such, return no metrics.

    Pairs of people from two groups (`a / b`) are impostor pairs only, and no group of people.
    """
    complete_V = np.isfinite(rates["fmr"][0]) & np.isfinite(rates["fnmr"][0])
    if complete_V.sum() < 2:
        return GroupSummary(column, {}, {})
    found = summarize_groups({name: rates[name][:, complete_V] for name in RATES})
    metrics = {name: _none_if_nan(value[0]) for name, value in found.items()}
    drawn = summarize_groups({name: replicate[name][:, complete_V] for name in RATES}) if replicate else {}
    intervals = {
        name: interval
        for name, value_R in drawn.items()
        if (value := metrics[name]) is not None
        and (interval := bootstrap.interval(value_R, subjects, value)) is not None
    }
    return GroupSummary(column, metrics, intervals)


def _rates(count_RB: np.ndarray) -> dict[str, np.ndarray]:
    """Return each rate of each value from the counts of the outcomes: (R, V), NaN without pairs."""
    true_rejects, false_accepts, true_accepts, false_rejects = np.moveaxis(
        count_RB.reshape(len(count_RB), -1, _OUTCOMES), 2, 0
    )
    impostors, genuine = true_rejects + false_accepts, true_accepts + false_rejects
    return {
        "accuracy": _share(true_rejects + true_accepts, impostors + genuine),
        "fmr": _share(false_accepts, impostors),
        "fnmr": _share(false_rejects, genuine),
    }


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _none_if_nan(rate: float) -> float | None:
    return None if np.isnan(rate) else float(rate)


class GroupFolds:
    """Search for the thresholds of the folds of each group by itself, over all draws of subjects at once.

    This is the protocol of RFW's tables. The folds of a group are runs of its consecutive pairs, as in a set that has
    only this group. A draw is one of all subjects of the set, so that differences between the groups have intervals.
    """

    def __init__(self, pairs: ScoredPairs, group_P: np.ndarray, groups: int) -> None:
        """Sort the pairs of each group; `group_P`, int (P,), is its number from 0."""
        self._searches: list[FoldSearch | None] = []
        distance_P, sides = pairs.scale.distance(pairs.score_P), pairs.sides
        for group in range(groups):
            index = np.flatnonzero(group_P == group)
            same = pairs.same_P[index]
            if len(index) < FOLDS or same.all() or not same.any():
                self._searches.append(None)
                continue
            index = index[fold_order(same)]
            one_side, other_side = (side[index] for side in sides)
            self._searches.append(
                FoldSearch(distance_P[index], pairs.same_P[index], FOLDS, one_side, other_side)
            )

    def accuracy(self, drawn_RS: np.ndarray) -> np.ndarray:
        """Return the mean accuracy of the folds of each group in every draw: float64 (R, V).

        It is NaN for a group with fewer pairs than folds or without pairs of both kinds, and in a draw without its
        pairs.
        """
        means = []
        for search in self._searches:
            if search is None:
                means.append(np.full(len(drawn_RS), np.nan))
                continue
            accuracy_RF = search.accuracy(drawn_RS)[0]
            folds_R = np.isfinite(accuracy_RF).sum(1)
            total_R = np.nansum(accuracy_RF, axis=1)
            means.append(np.divide(total_R, folds_R, out=np.full(len(total_R), np.nan), where=folds_R > 0))
        return np.stack(means, axis=1)
