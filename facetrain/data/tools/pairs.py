"""LFW's pairs.txt and a folder of pictures → a .bin verification set."""

from __future__ import annotations

from pathlib import Path

from facetrain.data.bin import write_bin
from facetrain.data.source import PICTURE_SUFFIXES
from facetrain.errors import PairsError


def build_pairs(pairs_txt: Path, images: Path, output: Path) -> tuple[int, int]:
    """Write the pairs of a list, in its order; return how many there are, and how many of one person.

    A line `name i j` is a pair of one person, `name i other j` of two; a first line of one or two
    numbers is LFW's count of folds and pairs. Picture i of a person is `name/name_000i.jpg`, or of
    another kind that we read.

    Raises:
        PairsError: a line is neither, or a picture is missing; the message has the line's number.
    """
    try:
        lines = pairs_txt.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{pairs_txt}: {getattr(error, 'strerror', None) or error}") from error
    pictures: list[bytes] = []
    same: list[bool] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or (number == 1 and len(words) <= 2 and all(word.isdigit() for word in words)):
            continue
        where = f"{pairs_txt}, line {number}"
        if len(words) not in (3, 4):
            raise PairsError(f"{where}: {line.strip()[:60]!r} is neither `name i j` nor `name i other j`")
        other = words[0] if len(words) == 3 else words[2]
        pictures += [_picture(images, words[0], words[1], where), _picture(images, other, words[-1], where)]
        same.append(len(words) == 3)
    if not same:
        raise PairsError(f"{pairs_txt}: holds no pairs")
    write_bin(output, pictures, same)
    return len(same), sum(same)


def _picture(images: Path, name: str, number: str, where: str) -> bytes:
    if not number.isdigit() or Path(name).name != name:
        raise PairsError(f"{where}: {name!r} {number!r} is no picture of a person")
    for suffix in sorted(PICTURE_SUFFIXES):
        path = images / name / f"{name}_{int(number):04d}{suffix}"
        if path.is_file():
            return path.read_bytes()
    raise PairsError(
        f"{where}: there is no {images / name / f'{name}_{int(number):04d}'}.jpg (nor .png, .bmp)"
    )
