"""Pair lists of the public verification sets, and their conversion to .bin.

Five forms are read, and the folders of `published_sets`:

LFW: `name i j` is a pair of one person, `name i other j` a pair of two. A first line of one or two numbers, the count
of folds and pairs, is skipped. Image i of a person is `name/name_000i.jpg`.

CALFW and CPLFW: two lines `image.jpg number` are a pair, of two people if the number is 0. The images are in one
folder, or in one folder per person, which has the name of the image up to its last `_`.

AgeDB-30, MLFW and others: `image image 1` is a pair of one person, `image image 0` a pair of two.

SLLFW: two lines `name/name_0001.jpg` are a pair, of one person if the folders are the same.

CFP: a folder Split/FP or Split/FF with 01/same.txt, 01/diff.txt, and so on. Their lines `i,j` refer to line i of
Pair_list_F.txt and to line j of Pair_list_P.txt (for FF, of Pair_list_F.txt as well). Both lists are in the folder
that contains Split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin_groups import read_group_table
from facetrain.data.formats.bin_subjects import read_subjects, subjects_agree
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.formats.pair_archives import read_pair_archive
from facetrain.data.images.decode import decode_rgb, encode_png, resize_square
from facetrain.data.tools.landmarks import LandmarkFinder
from facetrain.data.tools.listed_pairs import (
    Line,
    ListedPair,
    check_inside,
    is_image_name,
    mix_folds,
    quoted,
    read_lines,
    read_numbered_pairs,
)
from facetrain.data.tools.pair_images import PairImages
from facetrain.data.tools.pair_writer import PairsToWrite, group_lines
from facetrain.data.tools.published_sets import (
    find_published_set,
    find_rfw,
    read_rfw,
    read_rfw_landmarks,
)
from facetrain.errors import PairsError

_NUMBERS = re.compile(r"(_\d+)+$")


def is_pair_list(path: Path, images: Path | None) -> bool:
    """Return whether `path` is a pair list and not a dataset.

    It is a list if `images` is given, and if it is a split folder of CFP or the folder of a published set.
    """
    if images is not None or (path / "01" / "same.txt").is_file():
        return True
    return find_rfw(path) is not None or find_published_set(path) is not None


@dataclass(frozen=True)
class PairSource:
    """Pairs of a list, with the folder that the names of their images are relative to."""

    pairs: list[ListedPair]
    images: Path | None
    landmarks: LandmarkFinder | None = None
    """Landmarks that the publisher of the set hands out."""


def open_pair_list(path: Path, images: Path | None, *, originals: bool = False) -> PairSource:
    """Read a list, a split folder of CFP, or the folder of a published set.

    Args:
        path: the list or the folder.
        images: folder of the images; None for CFP and published sets.
        originals: of a published set, take the original images if there are also aligned ones.

    Raises:
        PairsError: as `read_pairs`, or the images of a published set are missing.
    """
    if images is None and (rfw := find_rfw(path)) is not None:
        return PairSource(read_rfw(rfw), rfw, read_rfw_landmarks(rfw))
    if images is None and (published := find_published_set(path, originals=originals)) is not None:
        path, images = published.list_path, published.images
    return PairSource(mix_folds(read_pairs(path, images)), images)


def read_pairs(path: Path, images: Path | None) -> list[ListedPair]:
    """Return the pairs of a list in its order; all image files exist.

    Args:
        path: the list, or a split folder of CFP.
        images: folder of the images. None is allowed for CFP, whose lists contain the paths.

    Raises:
        PairsError: a line has an unknown form, or an image is missing; the message has the line number.
    """
    if path.is_dir():
        pairs = list(_read_cfp(path, images))
    elif images is None:
        raise PairsError(f"{path}: the folder of the images is not known; give it with --images")
    else:
        pairs = list(_read_list(read_lines(path), images))
    if not pairs:
        raise PairsError(f"{path}: the list has no pairs")
    return pairs


def _read_list(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    words = lines[0][1] if lines else []
    if len(words) == 2 and is_image_name(words[0]):
        return _read_two_line_pairs(lines, images)
    if len(words) == 3 and is_image_name(words[0]):
        return _read_path_pairs(lines, images)
    if len(words) == 1 and is_image_name(words[0]):
        return _read_two_path_lines(lines, images)
    return read_numbered_pairs(lines, images)


def _read_two_line_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    if len(lines) % 2:
        raise PairsError(f"{lines[-1][0]}: the second line of the last pair is missing")
    for (location, one), (below, other) in zip(lines[::2], lines[1::2], strict=True):
        for line, words in ((location, one), (below, other)):
            if len(words) != 2 or not is_image_name(words[0]) or not words[1].isdigit():
                raise PairsError(f"{line}: {quoted(words)} is not of the form `image.jpg number`")
        if (one[1] == "0") != (other[1] == "0"):
            raise PairsError(
                f"{below}: the number {other[1]} contradicts {one[1]} in the line before; both are 0, or neither"
            )
        first, second = _find_named(images, one[0], location), _find_named(images, other[0], below)
        yield ListedPair(first, second, one[1] != "0", (_person(one[0]), _person(other[0])))


def _read_path_pairs(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    for location, words in lines:
        if len(words) != 3 or words[2] not in ("0", "1"):
            raise PairsError(f"{location}: {quoted(words)} is neither `image image 1` nor `image image 0`")
        first, second = (check_inside(images, images / word, location) for word in words[:2])
        people = (_person_of_path(images, first), _person_of_path(images, second))
        yield ListedPair(first, second, words[2] == "1", people)


def _person_of_path(images: Path, path: Path) -> str:
    """Return the likely person on an image, because such lists name only files.

    The person is the image's folder, or for one folder of all images the name without the numbers at its end:
    `Ann_Lee_0001_0002.jpg` -> `Ann_Lee`. Only people that agree with all labels are used, see `subjects_agree`.
    """
    return _NUMBERS.sub("", path.stem) if path.parent == images else str(path.parent)


def _read_two_path_lines(lines: list[Line], images: Path) -> Iterator[ListedPair]:
    if len(lines) % 2:
        raise PairsError(f"{lines[-1][0]}: the second line of the last pair is missing")
    paths = []
    for location, words in lines:
        if len(words) != 1 or words[0].count("/") != 1:
            raise PairsError(f"{location}: {quoted(words)} is not of the form `name/image.jpg`")
        paths.append(check_inside(images, images / words[0], location))
    for first, second in zip(paths[::2], paths[1::2], strict=True):
        people = (first.parent.name, second.parent.name)
        yield ListedPair(first, second, people[0] == people[1], people)


def _read_cfp(split: Path, images: Path | None) -> Iterator[ListedPair]:
    protocol = split.parent.parent
    frontal = _cfp_images(protocol / "Pair_list_F.txt", images)
    other = frontal if split.name == "FF" else _cfp_images(protocol / "Pair_list_P.txt", images)
    for fold in sorted(path for path in split.iterdir() if path.is_dir()):
        for name, same in (("same.txt", True), ("diff.txt", False)):
            for location, words in read_lines(fold / name):
                numbers = "".join(words).split(",")
                if len(numbers) != 2 or numbers[0] not in frontal or numbers[1] not in other:
                    raise PairsError(
                        f"{location}: {quoted(words)} is not a pair `i,j` of numbers in the image lists"
                    )
                first, second = frontal[numbers[0]], other[numbers[1]]
                # Paths end in person/pose/image.
                yield ListedPair(first, second, same, (first.parts[-3], second.parts[-3]))


def _cfp_images(path: Path, images: Path | None) -> dict[str, Path]:
    """Return the images of a list by their numbers. The paths in a list end in person/pose/image."""
    numbered = {}
    for location, words in read_lines(path):
        if len(words) != 2 or not words[0].isdigit() or not is_image_name(words[1]):
            raise PairsError(f"{location}: {quoted(words)} is not of the form `number image`")
        root = path.parent.parent if images is None else images
        whole = path.parent / words[1] if images is None else images.joinpath(*Path(words[1]).parts[-3:])
        numbered[words[0]] = check_inside(root, whole, location)
    return numbered


def _find_named(images: Path, name: str, location: str) -> Path:
    if Path(name).name != name:
        raise PairsError(f"{location}: {name!r} is not the name of an image")
    in_folder = images / _person(name) / name
    for path in (images / name, in_folder):
        if path.is_file():
            return path
    raise PairsError(f"{location}: there is no {images / name}, nor {in_folder}")


def _person(name: str) -> str:
    """Return the person's name in the name of an image of CALFW and CPLFW: `Ann_Lee_0001.jpg` -> `Ann_Lee`."""
    return Path(name).stem.rpartition("_")[0]


def list_pairs(
    list_path: Path,
    images: Path | None,
    *,
    landmarks: LandmarkFinder | None = None,
    image_size: int = 112,
) -> PairsToWrite:
    """Return the pairs of a list, with the subjects and groups of the images.

    The order is the order of the list, except for lists whose folds would have pairs of one kind only, see `mix_folds`.
    If the names in the list do not agree with its labels (a list of paths without one folder per person), there are no
    subjects, and evaluation infers them from the genuine pairs.

    Args:
        list_path: the list, a split folder of CFP, or the folder of a published set.
        images: folder of the images; None is allowed for CFP and published sets.
        landmarks: if given, faces are aligned to ArcFace's template; otherwise RFW is aligned by the landmarks of its
            publishers, and other images keep their bytes. The name of an image is its path inside `images` or the
            image folder of a published set, or person/pose/image for CFP without `images`.
        image_size: pixels a side of aligned images.

    Raises:
        PairsError: a line has an unknown form, or an image is missing.
    """
    source = open_pair_list(list_path, images, originals=landmarks is not None)
    pairs = source.pairs
    paths = [path for pair in pairs for path in (pair.first, pair.second)]
    listed = PairImages(paths, source.images, landmarks or source.landmarks, image_size)
    same = [pair.same for pair in pairs]
    subjects = [name for pair in pairs for name in pair.subjects]
    groups = [name for pair in pairs if pair.groups for name in pair.groups]
    return PairsToWrite(
        same,
        listed.encoded,
        name=listed.name,
        subjects=subjects if subjects_agree(subjects, same) else None,
        group_lines=group_lines(groups) if len(groups) == len(subjects) else None,
        attempts=listed.attempts,
    )


def archive_pairs(path: Path, *, reduce_to: int | None = None) -> PairsToWrite:
    """Return the pairs of a set in any form of `pair_archives`, with the tables and landmarks beside it.

    With `reduce_to`, each image is shrunk to so many pixels a side, by the mean of the pixels of each area, and stored
    as PNG: evaluation enlarges it bilinearly. Equal images stay equal, so the people of a published set are still
    recognized.

    Raises:
        PairsError: the set or a table cannot be read.
        DataError: the landmarks cannot be read.
    """
    images, same_P = read_pair_archive(path)
    subject_N, table = read_subjects(path, same_P), read_group_table(path)

    def read(number: int) -> bytes:
        location = f"{path}, image {number}"
        image = decode_rgb(images[number], location=location)
        return images[number] if reduce_to is None else _reduced(image, reduce_to, location)

    return PairsToWrite(
        same_P.tolist(),
        read,
        name=lambda number: f"image {number}",
        subjects=None if subject_N is None else [str(subject) for subject in subject_N],
        group_lines=None if table is None else table.decode("utf-8-sig", "replace").splitlines(),
        landmarks_N52=read_landmarks_beside(path, len(images)),
    )


def _reduced(image: np.ndarray, size: int, location: str) -> bytes:
    """Return an image in `size` × `size` pixels, as PNG, because JPEG would blur faces of so few pixels."""
    if size > min(image.shape[:2]):
        height, width = image.shape[:2]
        raise PairsError(
            f"{location}: has {width:,} × {height:,} pixels and cannot be reduced to {size:,}; choose a smaller number"
        )
    return encode_png(resize_square(image, size))
