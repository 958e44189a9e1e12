"""List files: one image path and its identity per line.

    path <tab> identity                         in either order; also separated by a comma or spaces
    number <tab> identity … <tab> path          im2rec's .lst; of several labels, the first counts
    1 <tab> path <tab> identity                 InsightFace's .lst

Fields between commas may be in quotes. Paths are relative to the folder of the list, or to another folder given by the
caller.
"""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from facetrain.data.column_cache import cached_columns
from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError, UnreadableError
from facetrain.files import open_regular, os_errors_as

LIST_SUFFIXES = frozenset({".lst", ".txt", ".csv", ".tsv"})
_MAX_LABEL = 2**31
_LINE_BYTES = 4096
_BYTE_ORDER_MARK = "\ufeff"
"""First character of a text file that some programs of Windows write."""
_SUFFIX = re.compile(r"[a-z][a-z0-9]{1,4}", re.IGNORECASE | re.ASCII)
_INSIGHTFACE_FLAGS = ("0", "1")
"""First field of InsightFace's lists: whether the image is aligned."""
_WHOLE_NUMBER = re.compile(r"\d+(\.0*)?", re.ASCII)
_USUAL_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
"""Number as programs write it, without leading zeros."""


class ListDataset:
    """Images of a list file. Paths stay in the file; its cached catalog has 16 bytes per image.

    Raises:
        DataError: if a line is not understood, or there are no images.
    """

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self._root = root if root is not None else path.parent
        self._list = PositionalFile(path)
        name = path.with_name(f".{path.name}.catalog")
        columns = cached_columns(name, [path], lambda: (_build_catalog(path), {}))
        self._offset, self._size = columns.arrays["offset"], columns.arrays["size"]
        self.labels = columns.arrays["label"]
        self.num_images = len(self.labels)
        self.num_classes = int(self.labels.max()) + 1

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the paths of the list and the root folder."""
        return ListDataset, (self._list.path, self._root)

    def name(self, index: int) -> str:
        """Return the path of an image as written in the list."""
        return self._list.bytes_at(int(self._offset[index]), int(self._size[index])).decode("utf-8")

    def identity_name(self, label: int) -> str:
        """Return the identity as written in the list, in the line of its first image."""
        labels, first = self._first_images
        position = int(np.searchsorted(labels, label))
        if position == len(labels) or labels[position] != label:
            return str(label)
        index = int(first[position])
        offset, size = int(self._offset[index]), int(self._size[index])
        before = self._list.bytes_at(max(offset - _LINE_BYTES, 0), min(offset, _LINE_BYTES))
        after = self._list.bytes_at(offset, size + _LINE_BYTES)
        line = before[before.rfind(b"\n") + 1 :] + after.partition(b"\n")[0]
        fields = _fields(_text(line, "replace"))
        name = _identity(fields, next(n for n, field in enumerate(fields) if _is_image_path(field)))
        return str(label) if _number(name) == label else name

    def read(self, index: int) -> bytes:
        """Return the encoded image.

        Raises:
            UnreadableError: if the file cannot be read.
        """
        path = self._root / self.name(index)
        with os_errors_as(UnreadableError, path), open(path, "rb", opener=open_regular) as file:
            return file.read()

    def location(self, index: int) -> str:
        """Return the path of the file."""
        return str(self._root / self.name(index))

    @cached_property
    def _first_images(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels that images have, ascending, and the index of the first image of each."""
        # Once: a search through the labels of 17 million images for each of 360,000 names would take hours.
        labels, first = np.unique(self.labels, return_index=True)
        return labels, first


def _build_catalog(path: Path) -> dict[str, np.ndarray]:
    """Return offset (int64) and size (int32) of each path in the list file, and the labels (int32)."""
    offset, size, identity_number = array("q"), array("i"), array("i")
    number_of: dict[str, int] = {}
    with path.open("rb") as file:
        for start, image, identity in list_entries(file, str(path)):
            offset.append(start)
            size.append(len(image.encode()))
            identity_number.append(number_of.setdefault(identity, len(number_of)))
    if not identity_number:
        raise DataError(
            f"{path}: contains no images; a line must be `path<tab>identity`, or as im2rec writes it"
        )
    label = number_identities(list(number_of), str(path))[np.frombuffer(identity_number, np.int32)]
    return {"offset": np.array(offset, np.int64), "size": np.array(size, np.int32), "label": label}


def list_entries(lines: Iterable[bytes], place: str) -> Iterator[tuple[int, str, str]]:
    """Yield the byte offset of each image's path in a list, the path, and the identity; errors begin with `place`.

    Raises:
        DataError: a line is not understood.
    """
    start = 0
    for number, line in enumerate(lines, start=1):
        try:
            text = _text(line)
        except UnicodeDecodeError as error:
            raise DataError(f"{place}, line {number}: the text is not UTF-8") from error
        if "\0" in text:
            raise DataError(f"{place}, line {number}: contains a zero byte, which no path can have")
        fields = _fields(text)
        column = next((n for n, field in enumerate(fields) if _is_image_path(field)), None)
        if column is not None and len(fields) > 1:
            offset = line.find(fields[column].encode())
            _check_entry(fields, column, offset, f"{place}, line {number}")
            yield start + offset, fields[column], _identity(fields, column)
        elif text and (number > 1 or not _is_header(text, fields)):
            raise DataError(
                f"{place}, line {number}: {text[:60]!r} does not name an image "
                f"({', '.join(sorted(IMAGE_SUFFIXES))}) and its identity"
            )
        start += len(line)


def _check_entry(fields: list[str], column: int, offset: int, location: str) -> None:
    if offset < 0:
        raise DataError(
            f"{location}: the path {fields[column]!r} contains a quote; separate the columns by tabs"
        )
    if column == 1 and len(fields) > 2 and fields[0] not in _INSIGHTFACE_FLAGS:
        raise DataError(
            f"{location}: it is not clear whether {fields[0][:60]!r} or {fields[2][:60]!r} is the identity; keep two "
            "columns, the path and the identity"
        )
    if not _identity(fields, column):
        raise DataError(f"{location}: {fields[column]!r} has no identity; add it, or remove the line")


def _text(line: bytes, errors: str = "strict") -> str:
    return line.decode("utf-8", errors).strip().removeprefix(_BYTE_ORDER_MARK)


def _fields(text: str) -> list[str]:
    if "\t" in text:
        return [field.strip() for field in text.split("\t")]
    if "," in text:
        return [field.strip() for field in (_quoted_fields(text) if '"' in text else text.split(","))]
    words = text.split()
    is_im2rec = len(words) > 2 and all(map(_WHOLE_NUMBER.fullmatch, words[:-1]))
    return words if is_im2rec else text.rsplit(maxsplit=1)  # a path may contain spaces


def _quoted_fields(text: str) -> list[str]:
    try:
        return next(csv.reader([text], skipinitialspace=True))
    except csv.Error:
        return [text]


def _is_header(text: str, fields: list[str]) -> bool:
    """Return whether the first line, which names no image, is a comment or has the names of columns.

    It is no header if a field has a suffix and before it a slash or a digit, or a slash and a whole number beside it.
    """
    has_path = any("/" in field or "\\" in field for field in fields)
    is_entry = has_path and any(map(_WHOLE_NUMBER.fullmatch, fields))
    return text.startswith("#") or not (is_entry or any(map(_is_file, fields)))


def _is_file(field: str) -> bool:
    stem, _, suffix = field.rpartition(".")
    return _SUFFIX.fullmatch(suffix) is not None and re.search(r"[/\\\d]", stem) is not None


def _is_image_path(field: str) -> bool:
    return field[field.rfind(".") :].lower() in IMAGE_SUFFIXES


def _identity(fields: list[str], path_column: int) -> str:
    if path_column == 1:
        return fields[2] if len(fields) > 2 else fields[0]
    return fields[1]


def _number(identity: str) -> float | None:
    try:
        return float(identity)
    except ValueError:
        return None


def number_identities(identities: list[str], place: str) -> np.ndarray:
    """Return the label of each identity, int32 (N,): the number itself, or the rank of a name in sorted order.

    im2rec writes whole numbers as 3.000000.

    Raises:
        DataError: a number is negative, too large or not whole, or is also written in an unusual way: 7 and 007 may
            be two people. The message begins with `place`.
    """
    try:
        number = np.array(identities, dtype=np.float64)
    except ValueError:
        return np.argsort(np.argsort(np.array(identities))).astype(np.int32)
    wrong = ~((number >= 0) & (number < _MAX_LABEL) & (number == np.floor(number)))
    if wrong.any():
        identity = identities[int(np.flatnonzero(wrong)[0])]
        raise DataError(
            f"{place}: the identity {identity} is not a whole number from 0 to 2^31; use such numbers, or "
            "names for all identities"
        )
    text_of = dict[int, str]()
    for label, text in zip(number.astype(np.int32).tolist(), identities, strict=True):
        other = text_of.setdefault(label, text)
        if other != text and not (_USUAL_NUMBER.fullmatch(other) and _USUAL_NUMBER.fullmatch(text)):
            raise DataError(
                f"{place}: the identities {other} and {text} are different texts of one number; write an identity in "
                "one way, or give all of them names that are not numbers"
            )
    return number.astype(np.int32)
