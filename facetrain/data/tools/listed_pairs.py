"""Pairs of a list: the lines of the file, and the checks of the images that they name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from facetrain.data.images.header import IMAGE_SUFFIXES
from facetrain.errors import PairsError
from facetrain.files import error_reason

T = TypeVar("T")


@dataclass(frozen=True)
class ListedPair:
    """Two image files of a pair list."""

    first: Path
    second: Path
    same: bool
    """Whether both show one person."""
    subjects: tuple[str, str]
    """Names of the two people, as far as the form of the list has them."""
    groups: tuple[str, str] | None = None
    """Groups of the two people, for example RFW's four; None if the list has no groups."""


def mix_folds(pairs: list[ListedPair]) -> list[ListedPair]:
    """Return the pairs in an order in which ten runs of consecutive pairs have pairs of both kinds.

    It is the given order if that has them. The lists of CALFW have all genuine pairs first, fold by fold: then fold i
    is the i-th tenth of the genuine pairs, followed by the i-th tenth of the impostor pairs.
    """
    same_P = np.array([pair.same for pair in pairs])
    kinds = [np.flatnonzero(same_P), np.flatnonzero(~same_P)]
    if min(map(len, kinds)) < _FOLDS or all(
        fold.any() and not fold.all() for fold in np.array_split(same_P, _FOLDS)
    ):
        return pairs
    folds = zip(*(np.array_split(kind, _FOLDS) for kind in kinds), strict=True)
    return [pairs[number] for fold in folds for kind in fold for number in kind]


def interleave_folds(groups: list[list[T]]) -> list[T]:
    """Return the pairs of several groups so that fold i of ten has the pairs of fold i of every group."""
    folds: list[list[T]] = [[] for _ in range(_FOLDS)]
    for pairs in groups:
        for fold, rows in zip(folds, np.array_split(np.arange(len(pairs)), _FOLDS), strict=True):
            fold += [pairs[row] for row in rows]
    return [pair for fold in folds for pair in fold]


Line = tuple[str, list[str]]
"""Location of a line for messages, and its words."""
_QUOTED_CHARACTERS = 60
_FOLDS = 10


def read_lines(path: Path) -> list[Line]:
    """Return the lines of a text file that are not empty.

    Raises:
        PairsError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {error_reason(error)}") from error
    numbered = enumerate(text.splitlines(), start=1)
    return [(f"{path}, line {number}", line.split()) for number, line in numbered if line.strip()]


def is_image_name(word: str) -> bool:
    """Return whether a word has the suffix of an image."""
    return Path(word).suffix.lower() in IMAGE_SUFFIXES


def quoted(words: list[str]) -> str:
    """Return the beginning of a line, quoted for a message."""
    return repr(" ".join(words)[:_QUOTED_CHARACTERS])


def read_numbered_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    """Yield the pairs of lines `name i j` and `name i other j`, as in LFW's list.

    Raises:
        PairsError: a line has another form, or there is no such image.
    """
    if lines and len(lines[0][1]) <= 2 and all(word.isdigit() for word in lines[0][1]):
        lines = lines[1:]
    for location, words in lines:
        if len(words) not in (3, 4):
            raise PairsError(f"{location}: {quoted(words)} is neither `name i j` nor `name i other j`")
        other = words[0] if len(words) == 3 else words[2]
        first, second = (
            _find_numbered(images, words[0], words[1], location),
            _find_numbered(images, other, words[-1], location),
        )
        yield ListedPair(first, second, len(words) == 3, (words[0], other))


def _find_numbered(images: Path, name: str, number: str, location: str) -> Path:
    """Return image `number` of a person in a folder per person, `name/name_0001.jpg`.

    Raises:
        PairsError: the name or the number is not valid, or there is no such image.
    """
    if not re.fullmatch("[0-9]{1,18}", number) or Path(name).name != name:
        raise PairsError(f"{location}: {name!r} {number!r} is not a name and the number of an image")
    stem = images / name / f"{name}_{int(number):04d}"
    for suffix in sorted(IMAGE_SUFFIXES):
        path = stem.with_name(stem.name + suffix)
        if path.is_file():
            return path
    raise PairsError(f"{location}: there is no {stem}.jpg (nor .png, .bmp)")


def check_inside(root: Path, path: Path, location: str) -> Path:
    """Return a path of a list after a check that the image exists and is inside `root`.

    Raises:
        PairsError: it does not.
    """
    if "\0" in str(path) or not is_image_name(path.name) or not path.resolve().is_relative_to(root.resolve()):
        raise PairsError(f"{location}: {path} is not an image inside {root}")
    if not path.is_file():
        raise PairsError(f"{location}: there is no {path}")
    return path
