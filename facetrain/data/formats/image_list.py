"""A list file: one image a line, and whose it is.

    path <tab> identity                         or the other way round; also with a comma or spaces between
    number <tab> identity … <tab> path          im2rec's .lst; of several labels the first counts
    1 <tab> path <tab> identity                 InsightFace's .lst

Paths begin at the list's folder, or at another that the caller names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import load_columns, save_columns
from facetrain.data.dataset import IMAGE_SUFFIXES
from facetrain.data.positional_file import File
from facetrain.errors import DataError

LIST_SUFFIXES = frozenset({".lst", ".txt", ".csv", ".tsv"})
_MOST_LABEL = 2**31


class ListDataset:
    """Images that a list names. Of a line, its place in the list is held: 16 bytes an image, kept beside it."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self._root = root if root is not None else path.parent
        self._list = File(path)
        name = path.with_name(f".{path.name}.catalog")
        columns = load_columns(name, [path]) or save_columns(name, [path], _catalog(path), {})
        self._offset, self._size = columns.arrays["offset"], columns.arrays["size"]
        self.labels = columns.arrays["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel as the names of the list and the folder."""
        return ListDataset, (self._list.path, self._root)

    def name(self, number: int) -> str:
        """Return an image's path as the list has it."""
        return self._list.bytes_at(int(self._offset[number]), int(self._size[number])).decode("utf-8")

    def read(self, number: int) -> bytes:
        """Return an image as it is encoded."""
        path = self._root / self.name(number)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from error

    def location(self, number: int) -> str:
        """Name the file."""
        return str(self._root / self.name(number))


def _catalog(path: Path) -> dict[str, np.ndarray]:
    offset, size, seen = array("q"), array("i"), array("i")
    number_of: dict[str, int] = {}
    for start, length, identity in _lines(path):
        offset.append(start)
        size.append(length)
        seen.append(number_of.setdefault(identity, len(number_of)))
    if not seen:
        raise DataError(f"{path}: names no images; a line is `path<tab>identity`, or as im2rec writes it")
    label = _labels(list(number_of), path)[np.frombuffer(seen, np.int32)]
    return {"offset": np.array(offset, np.int64), "size": np.array(size, np.int32), "label": label}


def _lines(path: Path) -> Iterator[tuple[int, int, str]]:
    """Yield, for each image, where its path stands in the list, how long it is, and its identity."""
    start = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                text = line.decode("utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(f"{path}, line {number}: not text in UTF-8") from error
            fields = _fields(text)
            place = next((n for n, field in enumerate(fields) if _names_a_image(field)), None)
            if place is not None and len(fields) > 1:
                image = fields[place].encode()
                yield start + line.index(image), len(image), _identity(fields, place)
            elif text and number > 1:  # the first line may hold the columns' names
                raise DataError(
                    f"{path}, line {number}: {text[:60]!r} does not name an image "
                    f"({', '.join(sorted(IMAGE_SUFFIXES))}) and its identity"
                )
            start += len(line)


def _fields(text: str) -> list[str]:
    for separator in ("\t", ","):
        if separator in text:
            return [field.strip() for field in text.split(separator)]
    return text.rsplit(maxsplit=1)


def _names_a_image(field: str) -> bool:
    return field[field.rfind(".") :].lower() in IMAGE_SUFFIXES


def _identity(fields: list[str], place: int) -> str:
    if place == 1:
        return fields[2] if len(fields) > 2 else fields[0]
    return fields[1]


def _labels(identities: list[str], path: Path) -> np.ndarray:
    """Keep identities that are whole numbers, as im2rec's 3.000000 is; number names in their order: int32."""
    try:
        number = np.array(identities, dtype=np.float64)
    except ValueError:
        return np.argsort(np.argsort(np.array(identities))).astype(np.int32)
    wrong = ~((number >= 0) & (number < _MOST_LABEL) & (number == np.floor(number)))
    if wrong.any():
        said = identities[int(np.flatnonzero(wrong)[0])]
        raise DataError(f"{path}: the identity {said} is not a whole number from 0 to 2^31")
    return number.astype(np.int32)
