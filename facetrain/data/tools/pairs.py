"""A list of pairs and a folder of pictures → a .bin verification set.

LFW's list: `name i j` is a pair of one person, `name i other j` of two; a first line of one or two
numbers is the count of folds and pairs. Picture i of a person is `name/name_000i.jpg`.

CALFW's and CPLFW's: two lines `picture.jpg number` make a pair, of two persons if the number is 0.
The pictures lie in one folder, or in one per person, named like the picture before its last `_`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from facetrain.data.bin import write_bin
from facetrain.data.source import PICTURE_SUFFIXES
from facetrain.errors import PairsError


def build_pairs(list_path: Path, images: Path, output: Path) -> tuple[int, int]:
    """Write the pairs of a list, in its order; return how many there are, and how many of one person.

    Raises:
        PairsError: a line is of neither form, or a picture is missing; the message has the line's number.
    """
    lines = _lines(list_path)
    pictures: list[bytes] = []
    same: list[bool] = []
    form = _of_two_lines if lines and _names_a_picture(lines[0][1]) else _of_one_line
    for first, second, one_person in form(lines, images):
        pictures += [first, second]
        same.append(one_person)
    if not same:
        raise PairsError(f"{list_path}: holds no pairs")
    write_bin(output, pictures, same)
    return len(same), sum(same)


def _lines(path: Path) -> list[tuple[str, list[str]]]:
    """Return where each line with something on it stands, and its words."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    numbered = enumerate(text.splitlines(), start=1)
    return [(f"{path}, line {number}", line.split()) for number, line in numbered if line.strip()]


def _names_a_picture(words: list[str]) -> bool:
    return len(words) == 2 and Path(words[0]).suffix.lower() in PICTURE_SUFFIXES


def _of_one_line(lines: list[tuple[str, list[str]]], images: Path) -> Iterator[tuple[bytes, bytes, bool]]:
    if lines and len(lines[0][1]) <= 2 and all(word.isdigit() for word in lines[0][1]):
        lines = lines[1:]
    for where, words in lines:
        if len(words) not in (3, 4):
            said = " ".join(words)[:60]
            raise PairsError(f"{where}: {said!r} is neither `name i j` nor `name i other j`")
        other = words[0] if len(words) == 3 else words[2]
        first, second = (
            _numbered(images, words[0], words[1], where),
            _numbered(images, other, words[-1], where),
        )
        yield first, second, len(words) == 3


def _of_two_lines(lines: list[tuple[str, list[str]]], images: Path) -> Iterator[tuple[bytes, bytes, bool]]:
    if len(lines) % 2:
        raise PairsError(f"{lines[-1][0]}: the last pair has one line only")
    for (where, one), (below, other) in zip(lines[::2], lines[1::2], strict=True):
        for place, words in ((where, one), (below, other)):
            if not _names_a_picture(words) or not words[1].isdigit():
                raise PairsError(f"{place}: {' '.join(words)[:60]!r} is no `picture.jpg number`")
        if (one[1] == "0") != (other[1] == "0"):
            raise PairsError(f"{below}: {other[1]} does not go with the {one[1]} of the line before")
        yield _named(images, one[0], where), _named(images, other[0], below), one[1] != "0"


def _numbered(images: Path, name: str, number: str, where: str) -> bytes:
    if not number.isdigit() or Path(name).name != name:
        raise PairsError(f"{where}: {name!r} {number!r} is no picture of a person")
    stem = images / name / f"{name}_{int(number):04d}"
    for suffix in sorted(PICTURE_SUFFIXES):
        path = stem.with_name(stem.name + suffix)
        if path.is_file():
            return path.read_bytes()
    raise PairsError(f"{where}: there is no {stem}.jpg (nor .png, .bmp)")


def _named(images: Path, name: str, where: str) -> bytes:
    if Path(name).name != name:
        raise PairsError(f"{where}: {name!r} is no picture's name")
    person = Path(name).stem.rpartition("_")[0]
    for path in (images / name, images / person / name):
        if path.is_file():
            return path.read_bytes()
    raise PairsError(f"{where}: there is no {images / name}, nor {images / person / name}")
