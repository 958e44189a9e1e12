"""Who is compared with whom in the public verification sets: their own lists, as paths of images.

LFW: `name i j` is a pair of one person, `name i other j` of two; a first line of one or two numbers is
the count of folds and pairs. Image i of a person is `name/name_000i.jpg`.

CALFW and CPLFW: two lines `image.jpg number` make a pair, of two persons if the number is 0. The
images lie in one folder, or in one per person, named like the image before its last `_`.

AgeDB-30, and others in this form: `image image 1` is a pair of one person, 0 of two.

CFP: a folder Split/FP or Split/FF with 01/same.txt, 01/diff.txt, …, whose lines `i,j` are lines of
Pair_list_F.txt and, for FP, of Pair_list_P.txt beside Split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from facetrain.data.align import align
from facetrain.data.dataset import IMAGE_SUFFIXES
from facetrain.data.decode import decode_rgb, encode_jpeg
from facetrain.data.formats.bin import write_bin
from facetrain.data.tools.landmarks import Finder
from facetrain.data.tools.parallel import Progress, counted, in_order, silent
from facetrain.errors import PairsError


@dataclass(frozen=True)
class Pair:
    """Two images, and whether they show one person."""

    first: Path
    second: Path
    same: bool


_Line = tuple[str, list[str]]
"""Where a line stands, and its words."""


def is_pair_list(path: Path, images: Path | None) -> bool:
    """Tell a list of pairs from a dataset: it comes with its images' folder, or is a folder of CFP's splits."""
    return images is not None or (path / "01" / "same.txt").is_file()


def read_pairs(path: Path, images: Path | None) -> list[Pair]:
    """Return the pairs of a list, in its order; every image is there.

    `images` is the folder of the images; CFP's list knows it by itself.

    Raises:
        PairsError: a line is of no form that is known, or an image is missing; the message has the line's number.
    """
    if path.is_dir():
        pairs = list(_of_cfp(path, images))
    elif images is None:
        raise PairsError(f"{path}: in which folder are its images?")
    else:
        pairs = list(_of_list(_lines(path), images))
    if not pairs:
        raise PairsError(f"{path}: holds no pairs")
    return pairs


def _lines(path: Path) -> list[_Line]:
    """Return the lines with something on them."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PairsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    numbered = enumerate(text.splitlines(), start=1)
    return [(f"{path}, line {number}", line.split()) for number, line in numbered if line.strip()]


def _of_list(lines: list[_Line], images: Path) -> Iterator[Pair]:
    words = lines[0][1] if lines else []
    if len(words) == 2 and _names_a_image(words[0]):
        return _of_two_lines(lines, images)
    if len(words) == 3 and _names_a_image(words[0]):
        return _of_two_paths(lines, images)
    return _of_one_line(lines, images)


def _names_a_image(word: str) -> bool:
    return Path(word).suffix.lower() in IMAGE_SUFFIXES


def _of_one_line(lines: list[_Line], images: Path) -> Iterator[Pair]:
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
        yield Pair(first, second, len(words) == 3)


def _of_two_lines(lines: list[_Line], images: Path) -> Iterator[Pair]:
    if len(lines) % 2:
        raise PairsError(f"{lines[-1][0]}: the last pair has one line only")
    for (where, one), (below, other) in zip(lines[::2], lines[1::2], strict=True):
        for place, words in ((where, one), (below, other)):
            if len(words) != 2 or not _names_a_image(words[0]) or not words[1].isdigit():
                raise PairsError(f"{place}: {' '.join(words)[:60]!r} is no `image.jpg number`")
        if (one[1] == "0") != (other[1] == "0"):
            raise PairsError(f"{below}: {other[1]} does not go with the {one[1]} of the line before")
        yield Pair(_named(images, one[0], where), _named(images, other[0], below), one[1] != "0")


def _of_two_paths(lines: list[_Line], images: Path) -> Iterator[Pair]:
    for where, words in lines:
        if len(words) != 3 or words[2] not in ("0", "1"):
            raise PairsError(f"{where}: {' '.join(words)[:60]!r} is no `image image 1`, nor 0")
        first, second = (_inside(images, images / word, where) for word in words[:2])
        yield Pair(first, second, words[2] == "1")


def _of_cfp(split: Path, images: Path | None) -> Iterator[Pair]:
    protocol = split.parent.parent
    frontal = _cfp_images(protocol / "Pair_list_F.txt", images)
    other = frontal if split.name == "FF" else _cfp_images(protocol / "Pair_list_P.txt", images)
    for fold in sorted(path for path in split.iterdir() if path.is_dir()):
        for name, same in (("same.txt", True), ("diff.txt", False)):
            for where, words in _lines(fold / name):
                numbers = "".join(words).split(",")
                if len(numbers) != 2 or numbers[0] not in frontal or numbers[1] not in other:
                    raise PairsError(f"{where}: {' '.join(words)[:60]!r} is no pair of images of the lists")
                yield Pair(frontal[numbers[0]], other[numbers[1]], same)


def _cfp_images(path: Path, images: Path | None) -> dict[str, Path]:
    """Return the images by their numbers. A list's path is …/person/pose/image."""
    found = {}
    for where, words in _lines(path):
        if len(words) != 2 or not words[0].isdigit() or not _names_a_image(words[1]):
            raise PairsError(f"{where}: {' '.join(words)[:60]!r} is no `number image`")
        root = path.parent.parent if images is None else images
        whole = path.parent / words[1] if images is None else images.joinpath(*Path(words[1]).parts[-3:])
        found[words[0]] = _inside(root, whole, where)
    return found


def _numbered(images: Path, name: str, number: str, where: str) -> Path:
    if not number.isdigit() or Path(name).name != name:
        raise PairsError(f"{where}: {name!r} {number!r} is no image of a person")
    stem = images / name / f"{name}_{int(number):04d}"
    for suffix in sorted(IMAGE_SUFFIXES):
        path = stem.with_name(stem.name + suffix)
        if path.is_file():
            return path
    raise PairsError(f"{where}: there is no {stem}.jpg (nor .png, .bmp)")


def _named(images: Path, name: str, where: str) -> Path:
    if Path(name).name != name:
        raise PairsError(f"{where}: {name!r} is no image's name")
    person = Path(name).stem.rpartition("_")[0]
    for path in (images / name, images / person / name):
        if path.is_file():
            return path
    raise PairsError(f"{where}: there is no {images / name}, nor {images / person / name}")


def _inside(root: Path, path: Path, where: str) -> Path:
    """Follow a path of a list, but not out of the folder of the set."""
    if not _names_a_image(path.name) or not path.resolve().is_relative_to(root.resolve()):
        raise PairsError(f"{where}: {path} is no image below {root}")
    if not path.is_file():
        raise PairsError(f"{where}: there is no {path}")
    return path


_QUALITY = 95


def build_pairs(
    list_path: Path,
    images: Path | None,
    output: Path,
    *,
    landmarks: Finder | None = None,
    image_size: int = 112,
    workers: int | None = None,
    progress: Progress = silent,
) -> tuple[int, int]:
    """Write the pairs of a list, in its order; return how many there are, and how many of one person.

    Images keep their bytes, or are cut out of `image_size` pixels a side by their landmarks; their names
    are their paths below `images` (for CFP without `images`, person/pose/image).

    Raises:
        PairsError: the list cannot be followed, or an image is missing or has no landmarks.
    """
    pairs = read_pairs(list_path, images)
    paths = [path for pair in pairs for path in (pair.first, pair.second)]

    def encoded_image(number: int) -> bytes:
        path = paths[number]
        data = path.read_bytes()
        if landmarks is None:
            return data
        name = path.relative_to(images).as_posix() if images is not None else "/".join(path.parts[-3:])
        image = decode_rgb(data, location=str(path))
        points = landmarks(name, image)
        if points is None:
            raise PairsError(f"{path}: no landmarks of a face ({name})")
        return encode_jpeg(align(image, points, image_size), _QUALITY)

    encoded = counted(in_order(encoded_image, range(len(paths)), workers), len(paths), progress)
    same = [pair.same for pair in pairs]
    write_bin(output, encoded, same)
    return len(same), sum(same)
