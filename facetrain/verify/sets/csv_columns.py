"""Columns of a CSV file with a header line, as scores, pair lists and slices are given."""

from __future__ import annotations

import csv
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class CsvTable:
    """Columns of a CSV file."""

    path: Path
    columns: dict[str, list[str]]
    """Texts of each column, without outer spaces, by the name in the header line."""
    lines: array[int]
    """Line of the file, from 1, in which each row begins."""

    def place(self, row: int) -> str:
        """Return the file and the line of a row, for messages."""
        return f"{self.path}, line {self.lines[row]}"

    def take_numbers(self, column: str, advice: str = "") -> np.ndarray:
        """Remove a column and return its finite numbers, float64 (P,).

        The texts of millions of numbers take seven times their memory.

        Raises:
            DataError: a text is not a finite number; the message ends with the advice.
        """
        values = self.columns.pop(column)
        number_P = np.fromiter(map(_number, values), np.float64, len(values))
        wrong = np.flatnonzero(~np.isfinite(number_P))
        if len(wrong):
            raise DataError(
                f"{self.place(wrong[0])}: {column} is {values[wrong[0]]!r}, not a finite number; {len(wrong):,} of "
                f"{len(number_P):,} rows have no {column}{advice}"
            )
        return number_P


def read_columns(path: Path) -> CsvTable:
    """Read a CSV file.

    Empty lines are skipped, and so are columns without a name: pandas writes its row numbers as one, and spreadsheets
    write several empty ones. In a table of one column, an empty line is an empty value, except at the end. Equal texts
    of a column with few different ones share their memory: a table of millions of pairs takes about eight times its
    file.

    Raises:
        DataError: the file cannot be read, has too many columns or two of one name, or a row has quotes that do not
            match, or another number of fields than the header line.
    """
    try:
        # Spreadsheets write a byte order mark first.
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv_rows(_with_single_ends(file), skip_empty=False)
            names = next((row for _, row in rows if row), None)
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
            return _table(path, names, _filled(rows, has_one_column=len(names) == 1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot read the table: {error_reason(error)}") from error


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


def _with_single_ends(lines: Iterable[str]) -> Iterator[str]:
    """Drop the second end of a line with two: a program that ends lines itself, in a file that Windows ends again."""
    before = ""
    for line in lines:
        if not (line == "\r\n" and before.endswith("\r")):
            yield line
        before = line


def _filled(
    rows: Iterable[tuple[int, list[str]]], *, has_one_column: bool
) -> Iterator[tuple[int, list[str]]]:
    """Drop the empty rows; between the others of one column, replace them by the empty value that they are."""
    empty: list[int] = []
    for line, row in rows:
        if row:
            yield from ((line, [""]) for line in empty)
            empty.clear()
            yield line, row
        elif has_one_column:
            empty.append(line)


def _table(path: Path, names: list[str], rows: Iterator[tuple[int, list[str]]]) -> CsvTable:
    columns: list[list[str]] = [[] for _ in names]
    shared: list[dict[str, str]] = [{} for _ in names]
    lines = array("q")
    while chunk := list(islice(rows, _ROWS_AT_ONCE)):
        # Checked before the columns are taken apart: zip would end at the shortest row.
        for line, row in chunk:
            if len(row) != len(names):
                raise DataError(
                    f"{path}, line {line}: {len(row)} fields, but the header line has {len(names)}"
                )
            lines.append(line)
        for column, known, texts in zip(
            columns, shared, zip(*(row for _, row in chunk), strict=True), strict=True
        ):
            column += _with_shared_texts(map(str.strip, texts), known)
    return CsvTable(path, {name: column for name, column in zip(names, columns, strict=True) if name}, lines)


def _with_shared_texts(texts: Iterator[str], known: dict[str, str]) -> Iterator[str]:
    """Replace each text by the first equal one; keep it as it is once the column has too many different ones."""
    for text in texts:
        if len(known) < _MAX_SHARED:
            yield known.setdefault(text, text)
        else:
            yield known.get(text, text)
