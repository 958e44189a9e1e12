"""Pairs of a list, in the forms of the public verification sets.

LFW: `name i j` is a pair of one person, `name i other j` a pair of two. Image i of a person is `name/name_000i.jpg`.

CALFW and CPLFW: two lines `image.jpg number` are a pair, of two people if the number is 0. The images are in one
folder, or in one folder per person, which has the name of the image up to its last `_`.

AgeDB-30, MLFW and others: `image image 1` or `1 image image` is a pair of one person, with 0 a pair of two.

CFP: a folder Split/FP or Split/FF with 01/same.txt, 01/diff.txt, and so on. Their lines `i,j` refer to line i of
Pair_list_F.txt and to line j of Pair_list_P.txt (for FF, of Pair_list_F.txt as well). Both lists are in the folder
that contains Split.

A first line of one or two numbers, the count of folds and pairs, is skipped. The words of a line are separated by tabs
if it is then of one of these forms, otherwise by any spaces: names of people may have spaces between tabs. The suffix
of an image may be in upper case where a list has lower case, and its name in the other of Unicode's two forms.
"""

from __future__ import annotations

import math
import os
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from facetrain.data.images.header import IMAGE_SUFFIXES, is_image_name
from facetrain.errors import PairsError
from facetrain.files import error_reason

Line = tuple[str, list[str]]
"""Location of a line for messages, and its words."""
_NUMBER = re.compile("[0-9]{1,18}")
_SUFFIXES = (".jpg", *sorted(IMAGE_SUFFIXES - {".jpg"}))
"""Suffixes that an image with a number may have, the usual one first."""


@dataclass(frozen=True)
class ListedPair:
    """Two image files of a pair list."""

    first: Path
    second: Path
    same: bool
    """Whether both show one person."""
    subjects: tuple[str, str]
    """Names of the two people, as far as the form of the list has them."""


def read_pairs(path: Path, images: Path | None) -> tuple[list[ListedPair], int | None]:
    """Return the pairs of a list in its order, and the number of pairs that its first line announces, if it has one.

    All image files exist.

    Args:
        path: the list, or a split folder of CFP.
        images: folder of the images. None is allowed for CFP, whose lists contain the paths.

    Raises:
        PairsError: a line has an unknown form, or an image is missing; the message has the line number.
    """
    announced = None
    if path.is_dir():
        pairs = list(_read_cfp(path, images))
    elif images is None:
        raise PairsError(f"{path}: the folder of the images is not known; give it with --images")
    else:
        lines = _read_lines(path)
        if counts := _counts(lines):
            # So many genuine pairs, and so many impostor pairs.
            announced, lines = 2 * math.prod(counts), lines[1:]
        pairs = list(_reader(lines)(lines, images)) if lines else []
    if not pairs:
        raise PairsError(f"{path}: the list has no pairs")
    return pairs, announced


def _counts(lines: list[Line]) -> list[int]:
    """Return the numbers of folds and of genuine pairs in the first line of a list; empty without them."""
    words = lines[0][1] if lines else []
    return [int(word) for word in words] if len(words) <= 2 and all(map(_NUMBER.fullmatch, words)) else []


def _read_numbered_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    for location, words in lines:
        _require_form(_is_numbered_pair(words), location, words, "`name i j` or `name i other j`")
        people = words[0], words[-2] if len(words) == 4 else words[0]
        if len(words) == 4 and people[0] == people[1]:
            raise PairsError(
                f"{location}: {' '.join(words)[:60]!r} has the form of two people, but is one; write `name i j`"
            )
        first, second = (
            _find_image(images, [images / name / f"{name}_{number:04d}{end}" for end in _SUFFIXES], location)
            for name, number in zip(people, (int(words[1]), int(words[-1])), strict=True)
        )
        yield ListedPair(first, second, len(words) == 3, people)


def _read_two_line_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    if len(lines) % 2:
        raise PairsError(f"{lines[-1][0]}: the second line of the last pair is missing")
    for one, other in zip(lines[::2], lines[1::2], strict=True):
        files, numbers = [], []
        for location, words in (one, other):
            _require_form(_is_half_of_pair(words), location, words, "`image.jpg number`")
            folders = (images, images / _person(words[0]))
            files.append(_find_image(images, [folder / words[0] for folder in folders], location))
            numbers.append(words[1])
        if (numbers[0] == "0") != (numbers[1] == "0"):
            raise PairsError(
                f"{other[0]}: the number {numbers[1]} contradicts {numbers[0]} in the line before; both are 0, or "
                "neither"
            )
        yield ListedPair(files[0], files[1], numbers[0] != "0", (_person(one[1][0]), _person(other[1][0])))


def _read_path_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    for location, words in lines:
        _require_form(
            _is_path_pair(words), location, words, "`image image 1` or `1 image image`, with 0 or 1"
        )
        label, paths = _label_and_paths(words)
        first, second = (_find_image(images, [images / path], location) for path in paths)
        people = _person_of_path(images, first), _person_of_path(images, second)
        yield ListedPair(first, second, label == "1", people)


def _label_and_paths(words: list[str]) -> tuple[str, list[str]]:
    """Return the label of a pair, which is the last word or the first, and the other words."""
    return (words[0], words[1:]) if words[0] in ("0", "1") else (words[-1], words[:-1])


def _is_numbered_pair(words: list[str]) -> bool:
    return len(words) in (3, 4) and all(map(_NUMBER.fullmatch, (words[1], words[-1])))


def _is_half_of_pair(words: list[str]) -> bool:
    return len(words) == 2 and is_image_name(words[0]) and _NUMBER.fullmatch(words[1]) is not None


def _is_path_pair(words: list[str]) -> bool:
    label, paths = _label_and_paths(words)
    return label in ("0", "1") and len(paths) == 2 and all(map(is_image_name, paths))


_FORMS: tuple[tuple[Callable[[list[str]], bool], Callable[[list[Line], Path], Iterator[ListedPair]]], ...] = (
    (_is_half_of_pair, _read_two_line_pairs),
    (_is_path_pair, _read_path_pairs),
    (_is_numbered_pair, _read_numbered_pairs),
)
"""Whether the first line of a list has a form, and the reader of the form."""


def _reader(lines: list[Line]) -> Callable[[list[Line], Path], Iterator[ListedPair]]:
    """Return the reader of a list, by its first line."""
    location, words = lines[0]
    for has_form, read in _FORMS:
        if has_form(words):
            return read
    forms = "`name i j`, `name i other j`, `image image 1`, `1 image image` or `image.jpg number`"
    raise _form_error(location, words, forms)


def _read_cfp(split: Path, images: Path | None) -> Iterator[ListedPair]:
    protocol = split.parent.parent
    frontal = _cfp_images(protocol / "Pair_list_F.txt", images)
    other = frontal if split.name == "FF" else _cfp_images(protocol / "Pair_list_P.txt", images)
    for fold in sorted(path for path in split.iterdir() if path.is_dir()):
        for name, same in (("same.txt", True), ("diff.txt", False)):
            for location, words in _read_lines(fold / name):
                numbers = "".join(words).split(",")
                is_pair = len(numbers) == 2 and numbers[0] in frontal and numbers[1] in other
                _require_form(is_pair, location, words, "`i,j` with two numbers in the image lists")
                first, second = frontal[numbers[0]], other[numbers[1]]
                # Paths end in person/pose/image.
                yield ListedPair(first, second, same, (first.parts[-3], second.parts[-3]))


def _cfp_images(path: Path, images: Path | None) -> dict[str, Path]:
    """Return the images of a list by their numbers. The paths in a list end in person/pose/image."""
    numbered = {}
    for location, words in _read_lines(path):
        is_valid = len(words) == 2 and _NUMBER.fullmatch(words[0]) is not None and is_image_name(words[1])
        _require_form(is_valid, location, words, "`number image`")
        root = path.parent.parent if images is None else images
        whole = path.parent / words[1] if images is None else images.joinpath(*Path(words[1]).parts[-3:])
        numbered[words[0]] = _find_image(root, [whole], location)
    return numbered


def _read_lines(path: Path) -> list[Line]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {error_reason(error)}") from error
    numbered = enumerate(text.splitlines(), start=1)
    return [(f"{path}, line {number}", _words(line)) for number, line in numbered if line.strip()]


def _words(line: str) -> list[str]:
    by_tabs = [word.strip() for word in line.strip().split("\t")]
    return by_tabs if any(has_form(by_tabs) for has_form, _ in _FORMS) else line.split()


def _require_form(is_valid: bool, location: str, words: list[str], form: str) -> None:
    if not is_valid:
        raise _form_error(location, words, form)


def _form_error(location: str, words: list[str], form: str) -> PairsError:
    return PairsError(f"{location}: {' '.join(words)[:60]!r} is not of the form {form}")


def _find_image(root: Path, files: Sequence[Path], location: str) -> Path:
    """Return the first of several files that exists, after a check that all are images inside `root`."""
    for path in files:
        # A list comes from anywhere: it may not read other files of the user.
        if (
            "\0" in str(path)
            or not is_image_name(path.name)
            or not path.resolve().is_relative_to(root.resolve())
        ):
            raise PairsError(f"{location}: {path} is not an image inside {root}")
        if found := _existing(path):
            return found
    raise PairsError(f"{location}: there is no {' nor '.join(map(str, files[:2]))}")


def _existing(path: Path) -> Path | None:
    """Return an image file with this path, or one that reads the same.

    Cameras write `.JPG`, and archives of macOS have an accent as a character of its own.
    """
    paths = [path, *(path.with_suffix(suffix) for suffix in (path.suffix.lower(), path.suffix.upper()))]
    if not str(path).isascii():
        paths += [Path(unicodedata.normalize(form, str(each))) for form in ("NFC", "NFD") for each in paths]
    return next(filter(Path.is_file, paths), None)


def _person(name: str) -> str:
    """Return the person's name in the name of an image of CALFW and CPLFW: `Ann_Lee_0001.jpg` -> `Ann_Lee`."""
    return Path(name).stem.rpartition("_")[0]


def _person_of_path(images: Path, path: Path) -> str:
    """Return the likely person on an image, because such lists name only files.

    The person is the image's folder, or for one folder of all images the name without the numbers at its end:
    `Ann_Lee_0001_0002.jpg` -> `Ann_Lee`. Only people that agree with all labels are used, see `contradicting_pair`.
    """
    # Not relative_to: a list may have absolute paths of a folder that is given by a relative one.
    folder = os.path.relpath(path.parent, images)
    return re.sub(r"(_\d+)+$", "", path.stem) if folder == "." else folder
