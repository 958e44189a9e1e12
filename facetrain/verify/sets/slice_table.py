"""Slice table: a CSV file with the groups that the pairs of a set belong to.

It has a header line, and one row for each pair or one row for each image, in the order of the set. With a row for each
image, a pair has the value that both images have, or `a / b`; a column `subject` then holds the person of each image,
for the bootstrap. A column `quality` is not a slice: it gives the error-versus-discard curve, see `discard`.
"""

# P pairs

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin_tables import contradicting_pair
from facetrain.embeddings.dense_ids import dense_ids
from facetrain.errors import DataError
from facetrain.verify.sets.csv_columns import finite_numbers, read_columns

_MAX_VALUES = 12
"""A column with more different numbers than this is divided into its quartiles."""
_NO_NUMBERS = {"", "nan", "na", "n/a", "none", "null"}
"""Texts, in lower case, in place of a number that is not known."""
_MISSING = "missing"
"""Slice of the pairs or people without a number, in a column that is divided into quartiles."""
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
    """Quality of every pair, float (P,), which is the quality of its worse image; None without a column `quality`."""


def read_slice_table(path: Path, same_P: np.ndarray) -> SliceTable:
    """Read the table of a set with these labels, bool (P,).

    Raises:
        DataError: the file cannot be read, or its number of rows or its subjects do not fit the set.
    """
    texts = read_columns(path)
    pairs, rows = len(same_P), len(next(iter(texts.values())))
    if rows not in (pairs, 2 * pairs):
        raise DataError(
            f"{path}: {rows:,} rows, expected one for each of {pairs:,} pairs or of {2 * pairs:,} images"
        )
    subject = texts.pop(_SUBJECT, None)
    quality = finite_numbers(path, QUALITY, texts.pop(QUALITY)) if QUALITY in texts else None
    if quality is not None and rows == 2 * pairs:
        quality = np.minimum(quality[0::2], quality[1::2])
    columns = {name: slice_values(values) for name, values in texts.items()}
    if rows == 2 * pairs:
        # After the quartiles, which are of all images and not of pairs.
        columns = {name: _pair_values(value[0::2], value[1::2]) for name, value in columns.items()}
    return SliceTable(columns, None if subject is None else _subject_ids(path, subject, same_P), quality)


def _subject_ids(path: Path, subject: list[str], same_P: np.ndarray) -> np.ndarray:
    if len(subject) == len(same_P):
        raise DataError(
            f"{path}: the column {_SUBJECT} needs one row for each of {2 * len(same_P):,} images; this table has one "
            "for each pair"
        )
    wrong = contradicting_pair(subject, same_P.tolist())
    if wrong is not None:
        raise DataError(
            f"{path}, row {2 * wrong + 2}: the column {_SUBJECT} contradicts the label of pair {wrong}, which shows "
            f"{'one person' if same_P[wrong] else 'two people'}; the rows must be in the order of the set"
        )
    return dense_ids(subject)


def slice_values(values: list[str]) -> np.ndarray:
    """Return the values, or the quartiles that they belong to if there are many different numbers: str objects (P,)."""
    # Objects: an array of str has the length of the longest value in every place, and one value could fill the memory.
    value_P, number_P = np.array(values, object), _numbers(values)
    if number_P is None:
        return value_P
    is_known = np.isfinite(number_P)
    if len(np.unique(number_P[is_known])) <= _MAX_VALUES:
        return value_P
    # unique: several quartiles of a column with many equal numbers are the same.
    edge = np.unique(np.quantile(number_P[is_known], [0, 0.25, 0.5, 0.75, 1]))
    quartile = np.clip(np.searchsorted(edge, number_P, side="right") - 1, 0, len(edge) - 2)
    names = np.array(
        [*(f"{low} to {high}" for low, high in pairwise(_distinct_texts(edge))), _MISSING], object
    )
    return names[np.where(is_known, quartile, len(names) - 1)]


def _distinct_texts(edge: np.ndarray) -> list[str]:
    """Return the text of each of different numbers: with six digits, or with all if these are not enough."""
    texts = [f"{number:g}" for number in edge]
    if len(set(texts)) < len(texts):
        texts = [repr(number).removesuffix(".0") for number in edge.tolist()]
    return texts


def _numbers(values: list[str]) -> np.ndarray | None:
    """Return the numbers of a column, float64 (P,), NaN for one that is not known; None for a column of texts."""
    try:
        number_P = np.array([np.nan if value.lower() in _NO_NUMBERS else float(value) for value in values])
    except ValueError:
        return None
    return None if np.isinf(number_P).any() else number_P


def _pair_values(first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    """Return the common value of both images, or `a / b` in alphabetical order: Python objects (P,)."""
    low, high = np.where(first_P < second_P, (first_P, second_P), (second_P, first_P))
    return np.where(low == high, low, low + " / " + high)
