"""Rows of CSV files whose quotes all match: one that is not closed would take the rows behind it into one field."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator

QUOTE_ADVICE = (
    'close every quote right before a comma or the line end, and write one inside a field in quotes as ""'
)


def csv_rows(lines: Iterable[str], *, skip_empty: bool = True) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line of each row, from 1, and its fields: none for an empty line, if not skipped.

    Raises:
        csv.Error: the quotes of a row do not match; the message begins with its line.
    """
    line, reader = 1, csv.reader(lines, strict=True)
    try:
        for row in reader:
            if row or not skip_empty:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        raise csv.Error(f"line {line}: {error}; {QUOTE_ADVICE}") from error
