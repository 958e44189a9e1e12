"""Names of a packed dataset: tables beside train.rec from record key to file name and from identity to folder name.

Both tables are CSV and optional. names.csv has a line `key,name` for each image, in the order of the keys 1, 2, …;
identities.csv has a line `identity,name` for each identity. The last line, too, ends with a line feed: it shows whether
a table is whole. Other readers of the .rec ignore the tables.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.beside_dataset import IDENTITIES_FILE, NAMES_FILE
from facetrain.data.dataset import FaceDataset
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError
from facetrain.files import error_reason, os_errors_as

_BLOCK_BYTES = 1 << 14
_MAX_LINE_BYTES = 1 << 16
_PROBED_IMAGES = 2000
_NUMBER = re.compile(r'("?)(?P<number>[0-9]{1,18})\1,')
"""Number at the beginning of a line; some programs write quotes around each field."""


class RecordNames:
    """Names of the images and identities of a folder with train.rec.

    The table of the images has a gigabyte for 20 million, and each reading process would need its own copy: a line is
    found by bisection, and only the lines around it are kept, for the images that follow.
    """

    def __init__(self, folder: Path, last_key: int, last_identity: range) -> None:
        """Take a folder, the last key of its images, and the numbers that the last identity of its table may have."""
        self._folder, self._last_key, self._last_identity = folder, last_key, last_identity
        self._around: tuple[int, list[str]] = (1, [])
        """First key and names of the lines around the one that was found last."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments."""
        return RecordNames, (self._folder, self._last_key, self._last_identity)

    def image(self, key: int) -> str | None:
        """Return the name of the image with a key; None without names.csv, and for a key that no image has.

        Raises:
            DataError: the table does not end with the last key, or the keys of the lines there do not count up.
        """
        if self._table is None or key < 1:
            return None
        first, names = self._around
        if not 0 <= key - first < len(names):
            first, names = self._around = self._names_around(self._table, key)
        return names[key - first] if key - first < len(names) else None

    def identities(self) -> Iterator[str]:
        """Yield the names of the identities 0, 1, …; none without identities.csv.

        Raises:
            DataError: the file has other lines, or does not end with the last identity.
        """
        path = self._folder / IDENTITIES_FILE
        if not path.is_file():
            return
        _open_table(path, self._last_identity)
        with os_errors_as(DataError, path), path.open(encoding="utf-8", errors="replace", newline="") as file:
            file.readline()
            yield from _names(file, 0, path)

    @cached_property
    def _table(self) -> PositionalFile | None:
        path = self._folder / NAMES_FILE
        return _open_table(path, range(self._last_key, self._last_key + 1)) if path.is_file() else None

    def _names_around(self, table: PositionalFile, key: int) -> tuple[int, list[str]]:
        """Return first key and names of the lines of the block with the line of a key, and of one line after it."""
        low, high, first = 0, -(-table.size // _BLOCK_BYTES), 1
        while high - low > 1:
            middle = (low + high) // 2
            begin = _NUMBER.match("".join(_lines(table, middle)[:1]))
            if begin and int(begin["number"]) <= key:
                low, first = middle, int(begin["number"])
            else:
                high = middle
        return first, list(_names(_lines(table, low) + _lines(table, low + 1)[:1], first, table.path))


def _open_table(path: Path, last: range) -> PositionalFile:
    """Open a table, and check that it ends with a whole line whose number is in a range.

    Raises:
        DataError: it does not.
    """
    table = PositionalFile(path)
    end = table.bytes_at(max(table.size - _MAX_LINE_BYTES, 0), _MAX_LINE_BYTES)
    line = end[end.rfind(b"\n", 0, -1) + 1 :].decode("utf-8", "replace")
    begin = _NUMBER.match(line)
    if not begin or int(begin["number"]) not in last:
        raise _other_table(
            path, f"its last line is {line.rstrip()[:60]!r}, and that of {last[0]} is expected"
        )
    if not line.endswith("\n"):
        raise _other_table(path, f"its last line {line[:60]!r} has no line feed")
    return table


def _other_table(path: Path, reason: str) -> DataError:
    advice = "copy both again, or remove the table, and its names are numbers"
    return DataError(f"{path}: is cut, or does not belong to this train.rec ({reason}); {advice}")


def _lines(table: PositionalFile, block: int) -> list[str]:
    """Return the lines of a table that begin in a block, without the one with the names of the columns."""
    data = table.bytes_at(block * _BLOCK_BYTES, _BLOCK_BYTES + _MAX_LINE_BYTES)
    start, last = data.find(b"\n", 0, _BLOCK_BYTES) + 1, data.rfind(b"\n", 0, _BLOCK_BYTES) + 1
    end = data.find(b"\n", last)
    text = data[start : end if end >= 0 else len(data)].decode("utf-8", "replace").rstrip("\n")
    return text.split("\n") if start and text else []


def _names(lines: Iterable[str], first: int, path: Path) -> Iterator[str]:
    """Yield the second field of each line, whose first field counts from `first`."""
    try:
        for number, row in enumerate(csv.reader(lines), start=first):
            if len(row) != 2 or row[0] != str(number):
                raise ValueError(f"a line {','.join(row)[:60]!r} where {number} is expected")
            yield row[1]
    except (csv.Error, ValueError) as error:
        raise _other_table(path, error_reason(error)) from None


def write_name_tables(
    folder: Path, numbers: np.ndarray, source: FaceDataset, identities: Sequence[str]
) -> None:
    """Write the table of the images and that of the identities, if they have names or identities other numbers.

    Images and identities without a name are named by their numbers in the source. Images count as without names if
    none of 2000 has one, which are spread evenly over all numbers.

    Args:
        folder: the folder with train.rec.
        numbers: numbers in the source of the images with the keys 1, 2, …: (N,).
        source: the dataset that the images come from.
        identities: names of the identities 0, 1, …. Two may be equal, as in the source: a name made different
            here could be that of another person in the next dataset, who would begin with this one's class center.
    """
    if _has_names(source, numbers):
        rows = ((key, source.name(number) or str(number)) for key, number in enumerate(numbers.tolist(), 1))
        _write_table(folder / NAMES_FILE, ("key", "name"), rows)
    if source.has_identity_names or list(identities) != [str(label) for label in range(len(identities))]:
        _write_table(folder / IDENTITIES_FILE, ("identity", "name"), enumerate(identities))


def _has_names(source: FaceDataset, numbers: np.ndarray) -> bool:
    # Not all: 17 million take minutes, and a compressed Parquet column would be decoded once more.
    # In ascending order: some formats decode many neighbors to find one name.
    ascending = np.sort(numbers)
    probed = ascending[np.linspace(0, len(ascending) - 1, _PROBED_IMAGES).astype(np.int64)]
    return any(source.name(number) is not None for number in dict.fromkeys(probed.tolist()))


def _write_table(path: Path, columns: tuple[str, str], rows: Iterable[tuple[int, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
