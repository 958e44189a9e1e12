"""Slice table: a CSV file with the groups that the pairs of a set belong to.

It has a header line, and one row for each pair or one row for each image, in the order of the set. With a row for each
image, a pair has the value that both images have, or `a / b`; a column `subject` then holds the person of each image,
for the bootstrap. A pair with an empty value is in no slice. A column `quality` is not a slice: it gives the
error-versus-discard curve, see `discard`.
"""

# P pairs

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin_tables import contradicting_pair
from facetrain.distinct import dense_ids
from facetrain.errors import DataError
from facetrain.telemetry.log import warn
from facetrain.text import listed
from facetrain.verify.sets.csv_columns import CsvTable, read_columns

_MAX_VALUES = 500
"""Largest number of different values in a column; each is a slice."""
_TWO_VALUES = "two values"
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
    sides: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    """Values of the first and of the second images, str (P,) each, by column; empty without a row for each image."""
    quality: np.ndarray | None = None
    """Quality of every pair, float (P,), which is the quality of its worse image; None without a column `quality`."""


NO_SLICES = SliceTable({}, None)


def read_slice_table(path: Path, same_P: np.ndarray) -> SliceTable:
    """Read the table of a set with these labels, bool (P,).

    Raises:
        DataError: the file cannot be read, or its number of rows or its subjects do not fit the set.
    """
    table = read_columns(path)
    pairs, rows = len(same_P), len(table.lines)
    if rows not in (pairs, 2 * pairs):
        raise DataError(
            f"{path}: {rows:,} rows, expected one for each of {pairs:,} pairs or of {2 * pairs:,} images"
        )
    ids = _subject_ids(table, same_P) if _SUBJECT in table.columns else None
    quality = table.take_numbers(QUALITY) if QUALITY in table.columns else None
    if quality is not None and rows == 2 * pairs:
        quality = np.minimum(quality[0::2], quality[1::2])
    columns, sides = slice_columns(path, table.columns), {}
    if rows == 2 * pairs:
        sides = {name: (value[0::2], value[1::2]) for name, value in columns.items()}
        columns = {name: pair_values(*values) for name, values in sides.items()}
    return SliceTable(columns, ids, sides, quality)


def _subject_ids(table: CsvTable, same_P: np.ndarray) -> np.ndarray:
    subject = table.columns.pop(_SUBJECT)
    if len(subject) == len(same_P):
        raise DataError(
            f"{table.path}: the column {_SUBJECT} needs one row for each of {2 * len(same_P):,} images; this table has "
            "one for each pair"
        )
    if "" in subject:  # images without a name would count as one person
        raise DataError(
            f"{table.place(subject.index(''))}: the column {_SUBJECT} is empty; name every person, or remove the "
            "column"
        )
    wrong = contradicting_pair(subject, same_P.tolist())
    if wrong is not None:
        raise DataError(
            f"{table.place(2 * wrong)}: the column {_SUBJECT} contradicts the label of pair {wrong}, which shows "
            f"{'one person' if same_P[wrong] else 'two people'}; the rows must be in the order of the set"
        )
    return dense_ids(subject)


def slice_columns(path: Path, texts: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """Return the columns of a table as arrays of str objects (P,).

    A column with very many different values, such as names, numbers of images or ages, is no slice: it is left out, and
    a warning says so. Another one says how many values are empty.
    """
    many = {name: len(set(values)) for name, values in texts.items()}
    for name, count in many.items():
        if count > _MAX_VALUES:
            warn(
                f"{path}: the column {listed([name])} has {count:,} different values, more than {_MAX_VALUES}, and is "
                "ignored; for a slice, write ranges such as 20-29"
            )
        elif empty := texts[name].count(""):
            warn(
                f"{path}: the column {listed([name])} is empty in {empty:,} of {len(texts[name]):,} rows; their pairs "
                "are in no slice"
            )
    # Objects: an array of str has the length of the longest value in every place, and one value could fill the memory.
    return {name: np.array(values, object) for name, values in texts.items() if many[name] <= _MAX_VALUES}


def pair_values(first_P: np.ndarray, second_P: np.ndarray) -> np.ndarray:
    """Return the common value of both images, or `a / b` in alphabetical order: Python objects (P,).

    With very many different ones, pairs of two values have one value together. If that of an image is empty, so is that
    of the pair.
    """
    low, high = np.where(first_P < second_P, (first_P, second_P), (second_P, first_P))
    value_P = np.where(low == high, low, low + " / " + high)
    if len(set(value_P)) > _MAX_VALUES:
        value_P = np.where(low == high, low, _TWO_VALUES)
    return np.where(low == "", "", value_P)  # no text is before the empty one
