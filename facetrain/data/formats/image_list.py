"""List files: one image path and its identity per line.

    path <tab> identity                         in either order; also separated by a comma or spaces
    number <tab> identity … <tab> path          im2rec's .lst; of several labels between tabs, the first counts
    1 <tab> path <tab> identity                 InsightFace's .lst; 1: the image is an aligned face
    0 <tab> path <tab> identity [<tab> 4 numbers of a box [<tab> x1 … x5 y1 … y5]]    a photo, perhaps with landmarks
    path <space> 0 <space> identity [<space> 0]      MagFace's training list

A line that repeats an image is left out. Fields between commas may be in quotes. Paths are relative to the folder of
the list, or to another folder given by the caller.
"""

# N images

from __future__ import annotations

import contextlib
import csv
import math
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from facetrain.data.column_cache import Columns, cached_columns, path_in_cache_folder
from facetrain.data.formats.base import CatalogDataset, Format, catalog_path
from facetrain.data.formats.image_folder import FileDataset
from facetrain.data.formats.labels import number_identities, require_labels
from facetrain.data.images.header import IMAGE_SUFFIXES, MAX_PIXELS, is_image_name
from facetrain.data.skipped_files import SkippedFile
from facetrain.errors import DataError
from facetrain.files import error_reason
from facetrain.strict_csv import QUOTE_ADVICE
from facetrain.text import printable

_BYTE_ORDER_MARK = "\ufeff"
"""First character of a text file that some programs of Windows write."""
_OTHER_SUFFIXES = {".avif", ".gif", ".heic", ".npy", ".raw"}
_NO_HEADER = re.compile(
    rf"[^#].*([\d\\]|({'|'.join(map(re.escape, sorted(IMAGE_SUFFIXES | _OTHER_SUFFIXES)))})\b).*",
    re.IGNORECASE,
)
"""First line that is neither a comment nor names of columns, which have no digits and no suffixes of images: an entry
that is not understood."""
_PHOTO, _ALIGNED = "0", "1"
"""First field of InsightFace's lists."""
_BOX_NUMBERS, _POINT_NUMBERS = 4, 10
_DIGITS = 19
"""Digits that are a number of 64 bits."""
_WHOLE_NUMBER = re.compile(r"\d+(\.0*)?", re.ASCII)
_USUAL_NUMBER = re.compile(r"(0|[1-9]\d*)(\.\d*)?(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
"""Number as programs write it, without leading zeros."""


class ListDataset(FileDataset):
    """Images of a list file, whose paths stay in the file; the cached catalog has 16 bytes per image."""

    @property
    def photo_landmarks(self) -> np.ndarray | None:
        """Landmarks that the list has."""
        points = self.columns.arrays.get("points")
        return None if points is None else points.reshape(-1, 2, 5).swapaxes(1, 2)


def open_list(path: Path, root: Path | None = None) -> CatalogDataset:
    """Open a list file; its paths are relative to `root`, by default to the folder of the list.

    Raises:
        DataError: if a line is not understood, or there are no images.
    """
    # Not beside the list, which is a file of the user and often among others.
    catalog = path_in_cache_folder(catalog_path(path))
    columns = cached_columns(catalog, [path], partial(_build_catalog, path))
    return ListDataset(path, [path], columns, root=path.parent if root is None else root)


FORMAT = Format("list file", open_list)


def _build_catalog(path: Path) -> Columns:
    offset, size, identity_number = array("q"), array("i"), array("i")
    points, digest, im2rec_number = array("f"), array("q"), array("Q")
    number_of: dict[str, int] = {}
    with path.open("rb") as file:
        for entry in list_entries(file, str(path)):
            if entry.points and not points:
                points.extend([np.nan] * (_POINT_NUMBERS * len(offset)))
            if entry.points or points:
                points.extend(entry.points or [np.nan] * _POINT_NUMBERS)
            offset.append(entry.start)
            size.append(len(entry.path.encode()))
            digest.append(hash(os.path.normpath(entry.path)))
            identity_number.append(number_of.setdefault(entry.identity, len(number_of)))
            if entry.number is not None:
                im2rec_number.append(entry.number)
    _require_different(im2rec_number, path)
    label, identities = label_identities(list(number_of), str(path))
    label = label[np.array(identity_number, np.int32)]
    kept, skipped = _without_repeats(path, offset, size, label, np.array(digest, np.int64))
    columns = (
        {"points": np.array(points, np.float32).reshape(-1, _POINT_NUMBERS)[kept].reshape(-1)}
        if points
        else {}
    )
    return Columns.of(
        label=label[kept], identities=identities, skipped=skipped, **columns,
        name_offset=np.array(offset, np.int64)[kept], name_size=np.array(size, np.int32)[kept],
    )  # fmt: skip


def _require_different(numbers: array[int], path: Path) -> None:
    """Check that im2rec's numbers of images differ: identities in their place, such as before a frame, do not."""
    ordered = np.sort(np.array(numbers))
    repeats = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeats):
        raise DataError(
            f"{path}: two lines begin with the number {repeats[0]}, and im2rec's lists number the images there; "
            "write the path, a tab, and the identity alone"
        )


def _without_repeats(
    path: Path, offset: array[int], size: array[int], label: np.ndarray, digest: np.ndarray
) -> tuple[np.ndarray, list[SkippedFile]]:
    """Return the rows of a list without those whose path is in an earlier one, and what is left out."""
    kept, skipped = np.ones(len(digest), bool), []
    order = np.argsort(digest, kind="stable")
    repeats = np.flatnonzero(np.diff(digest[order]) == 0)
    with path.open("rb") as file:

        def name(row: int) -> str:
            file.seek(offset[row])
            return printable(file.read(size[row]).decode())

        for first, row in zip(order[repeats].tolist(), order[repeats + 1].tolist(), strict=True):
            if os.path.normpath(name(first)) != os.path.normpath(name(row)):  # two texts with one hash
                continue
            if label[first] != label[row]:
                raise DataError(f"{path}: {name(row)} has two identities; keep the line with the right one")
            kept[row] = False
            skipped.append(SkippedFile(name(row), "repeated", "an earlier line has the path"))
    return kept, skipped


class ListEntry(NamedTuple):
    """Line of a list."""

    start: int
    """Byte offset of the path in the list."""
    path: str
    identity: str
    points: list[float] | None = None
    """Landmarks of a photo, x1 … x5 y1 … y5, in pixels, or infinite if the list has none; None: of no photo."""
    number: int | None = None
    """First field of a line of im2rec's list: its last digits if it has more than 64 bits."""


def list_entries(lines: Iterable[bytes], place: str) -> Iterator[ListEntry]:
    """Yield the entries of a list; errors begin with `place`.

    Raises:
        DataError: a line is not understood.
    """
    start, has_header = 0, False
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip().removeprefix(_BYTE_ORDER_MARK)
        except UnicodeDecodeError as error:
            raise DataError(f"{place}, line {number}: {error_reason(error)}") from error
        if "\r" in text:  # of line ends CR, which would make the whole list one line
            raise DataError(
                f"{place}, line {number}: has a carriage return (CR) inside; save the list with line ends LF"
            )
        fields = _fields(text)
        column = next((n for n, field in enumerate(fields) if is_image_name(field)), None)
        if column is not None and len(fields) > 1 and "\0" not in text:
            # Of InsightFace's three fields, the last is the identity; of im2rec's and of two fields, the other one.
            identity = fields[1 if column != 1 else 2 if len(fields) > 2 else 0]
            is_photo = column == 1 and len(fields) > 2 and fields[0] == _PHOTO
            is_insightface = is_photo or (column == 1 and len(fields) == 3 and fields[0] == _ALIGNED)
            # A column between them, such as a box, an age or the name of a split, would be taken for the identity.
            is_im2rec = _is_im2rec(fields) and not has_header and (len(fields) == 3 or "\t" in text)
            is_clear = len(fields) == 2 or is_im2rec or is_insightface
            offset = line.find(fields[column].encode())
            if offset < 0 or not identity or not is_clear:
                raise DataError(
                    f"{place}, line {number}: {text[:60]!r} has no clear path and identity; write the path without "
                    "quotes, a tab, and the identity alone"
                )
            try:
                points = _photo_points(fields[3:]) if is_photo else None
            except ValueError as error:
                raise DataError(f"{place}, line {number}: {error}; correct the line, or remove it") from error
            record = int(fields[0].partition(".")[0][-_DIGITS:]) if is_im2rec else None
            yield ListEntry(start + offset, fields[column], identity, points, record)
        elif text and (number > 1 or _NO_HEADER.fullmatch(text)):
            raise DataError(
                f"{place}, line {number}: {text[:60]!r} does not name an image "
                f"({', '.join(sorted(IMAGE_SUFFIXES))}) and its identity{_found(text)}"
            )
        elif text:
            has_header = not text.startswith("#")
        start += len(line)


def _fields(text: str) -> list[str]:
    if "\t" in text:
        return [field.strip() for field in text.split("\t")]
    if "," in text:
        fields = text.split(",")
        if '"' in text:
            try:
                fields = next(csv.reader([text], skipinitialspace=True, strict=True))
            except csv.Error:  # the quotes do not match
                fields = [text]
        return [field.strip() for field in fields]
    words = text.split()
    is_insightface = (
        len(words) > 2
        and words[0] in (_PHOTO, _ALIGNED)
        and is_image_name(words[1])
        and all(map(_is_finite_number, words[2:]))
    )
    if _is_magface(words):
        return [words[0], words[2]]
    # A path may contain spaces.
    return words if _is_im2rec(words) or is_insightface else text.rsplit(maxsplit=1)


def _is_im2rec(fields: list[str]) -> bool:
    """Return whether fields are a line of im2rec's list: number, identity and perhaps further labels, path."""
    return (
        len(fields) > 2
        and is_image_name(fields[-1])
        and _WHOLE_NUMBER.fullmatch(fields[0]) is not None
        and all(map(_is_finite_number, fields[1:-1]))
    )


def _is_magface(words: list[str]) -> bool:
    """Return whether words are a line of MagFace's list: path, 0, identity, and perhaps another 0."""
    # The second field tells: where it is the identity, a later line has another one than 0, and is refused.
    has_zeros = len(words) in (3, 4) and {*words[1:2], *words[3:]} == {"0"}
    return has_zeros and is_image_name(words[0]) and _WHOLE_NUMBER.fullmatch(words[2]) is not None


def _found(text: str) -> str:
    """Return what a line that is not understood has in place of a path and an identity, for a message."""
    words = text.split()
    if any(is_image_name(part.strip(' "')) for part in text.split(";")[:-1]):
        return ": its fields are separated by `;`, write commas or tabs"
    if "," in text and _fields(text) == [text]:  # quotes that do not match
        return f": {QUOTE_ADVICE}"
    if is_image_name(text):
        return ": it has no identity, add one after a tab"
    if is_image_name(words[0]):
        return f": it has {len(words)} fields, write the path, a tab and the identity alone"
    return ""


def _photo_points(values: list[str]) -> list[float]:
    """Return the landmarks of a photo from the fields behind its identity; infinite without any.

    Raises:
        ValueError: they are not a box and landmarks, or one is no number, or farther away than any image is wide: in
            float32 it could become infinite.
    """
    if len(values) not in (0, _BOX_NUMBERS, _BOX_NUMBERS + _POINT_NUMBERS):
        raise ValueError(
            f"a photo, whose line begins with {_PHOTO}, has nothing behind its identity, {_BOX_NUMBERS} numbers of a "
            f"box, or these and {_POINT_NUMBERS} of landmarks, not {len(values)}"
        )
    for text in values:
        if not (_is_finite_number(text) and abs(float(text)) <= MAX_PIXELS):
            raise ValueError(f"{text[:60]!r} is no number of pixels in an image")
    return list(map(float, values[_BOX_NUMBERS:])) or [math.inf] * _POINT_NUMBERS


def _is_finite_number(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return math.isfinite(float(text))
    return False


def label_identities(identities: Sequence[str], place: str) -> tuple[np.ndarray, list[str]]:
    """Return the label of each identity, int32 (N,): the number itself, or the rank of a name in sorted order.

    Also returns the names by label; empty if they are numbers. im2rec writes whole numbers as 3.000000.

    Raises:
        DataError: a number is negative, too large or not whole, or is also written in an unusual way: 7 and 007 may
            be two people. The message begins with `place`.
    """
    if any("_" in identity for identity in identities):  # which NumPy reads as digits of one number
        return number_identities(identities, place)
    try:
        number = np.array(identities, dtype=np.float64)
    except ValueError:
        return number_identities(identities, place)
    label, text_of = require_labels(number, place), dict[int, str]()
    for value, text in zip(label.tolist(), identities, strict=True):
        other = text_of.setdefault(value, text)
        if other != text and not (_USUAL_NUMBER.fullmatch(other) and _USUAL_NUMBER.fullmatch(text)):
            raise DataError(
                f"{place}: the identities {other} and {text} denote one identity; use one spelling, or give all "
                "identities names that are not numbers"
            )
    return label, []
