"""Columns of a CSV file with a header line, as scores, pair lists and slices are given."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from facetrain.errors import DataError
from facetrain.files import error_reason
from facetrain.strict_csv import csv_rows
from facetrain.text import listed

_MAX_COLUMNS = 1000
_ROWS_AT_ONCE = 1 << 14
_MAX_SHARED = 1 << 12
"""Most different texts of a column that are looked up, so that equal texts are one object."""


def read_columns(path: Path) -> dict[str, list[str]]:
    """Read a CSV file: return the texts of each column by the name in its header line, without outer spaces.

    Empty lines are skipped, and so are columns without a name: pandas writes its row numbers as one, and spreadsheets
    write several empty ones. Equal texts of a column with few different ones share their memory: a table of millions
    of pairs takes about eight times its file.

    Raises:
        DataError: the file cannot be read, has too many columns or two of one name, or a row has quotes that do not
            match, or another number of fields than the header line.
    """
    try:
        # Spreadsheets write a byte order mark first.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = (row for _, row in csv_rows(file))
            names = next(rows, None)
            if names is None:
                raise DataError(f"{path}: cannot read the table: the file is empty")
            if len(names) > _MAX_COLUMNS:
                raise DataError(f"{path}: has {len(names):,} columns; the limit is {_MAX_COLUMNS:,}")
            names = [name.strip() for name in names]
            if not any(names):
                raise DataError(f"{path}: cannot read the table: no column has a name in the first line")
            if repeated := [name for name, times in Counter(names).items() if name and times > 1]:
                raise DataError(
                    f"{path}: has two columns with the name {listed(repeated[:1])}; rename one of them"
                )
            return _columns(path, names, rows)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot read the table: {error_reason(error)}") from error


def finite_numbers(path: Path, column: str, values: list[str], advice: str = "") -> np.ndarray:
    """Return the numbers of a column, float64 (P,).

    Raises:
        DataError: a text is not a finite number; the message ends with the advice.
    """
    number_P = np.fromiter(map(_number, values), np.float64, len(values))
    wrong = np.flatnonzero(~np.isfinite(number_P))
    if len(wrong):
        raise DataError(
            f"{path}, row {wrong[0] + 2}: {column} is {values[wrong[0]]!r}, not a finite number; {len(wrong):,} of "
            f"{len(number_P):,} rows have no {column}{advice}"
        )
    return number_P


def plain_number(text: str, kind: type[int] | type[float]) -> float:
    """Return the number that a text denotes; Python itself also reads 1_0, which may be a name, as 10.

    Raises:
        ValueError: it is no number of this kind.
    """
    if "_" in text:
        raise ValueError(f"{text[:60]!r} is no number")
    return kind(text)


def _number(text: str) -> float:
    try:
        return plain_number(text, float)
    except ValueError:
        return float("nan")


def _columns(path: Path, names: list[str], rows: Iterator[list[str]]) -> dict[str, list[str]]:
    columns: list[list[str]] = [[] for _ in names]
    shared: list[dict[str, str]] = [{} for _ in names]
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        # Checked before the columns are taken apart: zip would end at the shortest row.
        wrong = next((at for at, row in enumerate(chunk) if len(row) != len(names)), None)
        if wrong is not None:
            raise DataError(
                f"{path}, row {len(columns[0]) + wrong + 2}: {len(chunk[wrong])} fields, but the header line has "
                f"{len(names)}"
            )
        for column, known, texts in zip(columns, shared, zip(*chunk, strict=True), strict=True):
            column += _with_shared_texts(map(str.strip, texts), known)
    return {name: column for name, column in zip(names, columns, strict=True) if name}


def _with_shared_texts(texts: Iterator[str], known: dict[str, str]) -> Iterator[str]:
    """Replace each text by the first equal one; keep it as it is once the column has too many different ones."""
    for text in texts:
        if len(known) < _MAX_SHARED:
            yield known.setdefault(text, text)
        else:
            yield known.get(text, text)
