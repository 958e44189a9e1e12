"""Names of a packed dataset: tables beside train.rec from record key to file name and from identity to folder name.

Both tables are CSV and optional. names.csv has a line `key,name` for each image, in the order of the keys 1, 2, …;
identities.csv has a line `identity,name` for each identity. Other readers of the .rec ignore them.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, original_name
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError
from facetrain.files import os_errors_as

NAMES_FILE, IDENTITIES_FILE = "names.csv", "identities.csv"
_CHUNK_BYTES = 1 << 24
_MAX_LINE_BYTES = 1 << 16
_PROBED_IMAGES = 1000


class RecordNames:
    """Names of the images and identities of a folder with train.rec; read when the first one is needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the folder."""
        return RecordNames, (self._folder,)

    def image(self, key: int) -> str | None:
        """Return the name of the image with a key; None without names.csv, or if the key has no line.

        Raises:
            DataError: if the line belongs to another key.
        """
        if self._table is None or not 1 <= key < len(self._line_starts) - 1:
            return None
        start, end = self._line_starts[key : key + 2].tolist()
        line = self._table.bytes_at(start, min(end - start, _MAX_LINE_BYTES)).decode("utf-8", "replace")
        try:
            row = next(csv.reader([line]), [])
        except csv.Error:
            row = []
        if len(row) != 2 or row[0] != str(key):
            raise DataError(
                f"{self._table.path}, line {key + 1}: not the name of key {key}; the file does not belong to this "
                "train.rec: remove it, and images are named by their keys"
            )
        return row[1]

    def identity(self, label: int) -> str | None:
        """Return the name of an identity; None without identities.csv, or if it has no line."""
        return self._identities[label] if 0 <= label < len(self._identities) else None

    @cached_property
    def _table(self) -> PositionalFile | None:
        path = self._folder / NAMES_FILE
        return PositionalFile(path) if path.is_file() else None

    @cached_property
    def _line_starts(self) -> np.ndarray:
        """Byte offset of each line, and the end of the file: int64. Line 0 has the names of the columns."""
        assert self._table is not None, "no table"
        starts = [np.zeros(1, np.int64)]
        for offset in range(0, self._table.size, _CHUNK_BYTES):
            chunk = np.frombuffer(self._table.bytes_at(offset, _CHUNK_BYTES), np.uint8)
            starts.append(np.flatnonzero(chunk == ord("\n")) + (offset + 1))
        return np.concatenate(starts)

    @cached_property
    def _identities(self) -> list[str]:
        path = self._folder / IDENTITIES_FILE
        if not path.is_file():
            return []
        names: list[str] = []
        is_valid = True
        with os_errors_as(DataError, path), path.open(encoding="utf-8", errors="replace", newline="") as file:
            try:
                for label, row in enumerate(csv.reader(file), start=-1):
                    is_valid = is_valid and (label < 0 or (len(row) == 2 and row[0] == str(label)))
                    names += row[1:] if is_valid and label >= 0 else ()
            except csv.Error:
                is_valid = False
        if not is_valid:
            raise DataError(
                f"{path}: expected lines `identity,name` for the identities 0, 1, …; remove the file, and identities "
                "are named by their numbers"
            )
        return names


def write_name_tables(
    folder: Path, numbers: np.ndarray, source: FaceDataset, identities: Sequence[int]
) -> None:
    """Write the table of the images if they have names, and the table of the identities if one or the images have.

    Images and identities without a name are named by their numbers in the source. Images count as without names if
    none of 2000 has one: the first 1000 numbers in ascending order, and 1000 spread evenly over all numbers.

    Args:
        folder: the folder with train.rec.
        numbers: numbers in the source of the images with the keys 1, 2, …: (N,).
        source: the dataset that the images come from.
        identities: labels in the source of the identities 0, 1, ….
    """
    has_images = _has_names(source, numbers)
    names = [identity_name(source, label) for label in identities]
    if has_images:
        rows = (
            (key, original_name(source, number) or str(number))
            for key, number in enumerate(numbers.tolist(), 1)
        )
        _write_table(folder / NAMES_FILE, ("key", "name"), rows)
    if has_images or names != [str(label) for label in range(len(names))]:
        _write_table(folder / IDENTITIES_FILE, ("identity", "name"), enumerate(_unique(names)))


def _has_names(source: FaceDataset, numbers: np.ndarray) -> bool:
    # Not all: 17 million take minutes, and a compressed Parquet column would be decoded once more.
    ascending = np.sort(numbers)
    spread = np.linspace(0, len(ascending) - 1, _PROBED_IMAGES).astype(np.int64)
    # In ascending order: some formats decode many neighbors to find one name.
    probed = np.unique(np.concatenate([ascending[:_PROBED_IMAGES], ascending[spread]]))
    return any(original_name(source, number) is not None for number in probed.tolist())


def most_frequent_identities(source: FaceDataset, numbers: np.ndarray, label: np.ndarray) -> list[int]:
    """Return the identity in the source that most images of each new identity had: corrected labels mix them.

    Args:
        source: the dataset that the images come from.
        numbers: numbers of the images in the source: (N,).
        label: new labels of the images, from 0 without gaps: (N,).
    """
    classes = np.int64(source.num_classes)
    pair, count = np.unique(label * classes + source.labels[numbers], return_counts=True)
    order = np.lexsort((-count, pair // classes))
    _, first = np.unique(pair[order] // classes, return_index=True)
    return (pair[order][first] % classes).tolist()


def _unique(names: Sequence[str]) -> list[str]:
    """Add numbers to names that occur more than once, as in ann and ann (2)."""
    taken, seen, unique = set(names), Counter[str](), []
    for name in names:
        seen[name] += 1
        candidate = name
        while seen[name] > 1 and (candidate := f"{name} ({seen[name]})") in taken:
            seen[name] += 1
        taken.add(candidate)
        unique.append(candidate)
    return unique


def _write_table(path: Path, columns: tuple[str, str], rows: Iterable[tuple[int, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)
