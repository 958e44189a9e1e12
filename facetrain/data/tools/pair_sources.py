"""Pairs of a list or of sets in another form, with their images, as they are written to a `.bin`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.bin_tables import contradicting_pair, groups_path, read_subjects
from facetrain.data.formats.image_folder import read_image_file
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.images.decode import decode_rgb, encode_png, resize_square
from facetrain.data.pair_folds import FOLDS, fold_order
from facetrain.data.tools.aligned_images import AlignedImages
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.data.tools.pair_list_reader import read_pairs
from facetrain.data.tools.pair_writer import PairsToWrite, require_readable
from facetrain.errors import PairsError
from facetrain.files import os_errors_as, read_regular_text

_RFW_GROUPS = ("African", "Asian", "Caucasian", "Indian")


def is_pair_list(path: Path, images: Path | None) -> bool:
    """Return whether `path` is a pair list and not a dataset: if `images` is given, or it is a split folder of CFP.

    Raises:
        PairsError: `images` is given for another folder.
    """
    is_split = (path / "01" / "same.txt").is_file()
    if images is not None and path.is_dir() and not is_split:
        raise PairsError(f"{path}: is a folder; --images needs a pair list, or a split folder of CFP")
    return images is not None or is_split


def list_pairs(
    list_path: Path, images: Path | None, *, landmarks: LandmarkFinder | None = None, image_size: int = 112
) -> PairsToWrite:
    """Return the pairs of a list, with the subjects of the images.

    The order is the order of the list, except for lists that are sorted by kind, such as CALFW's, see `fold_order`.
    If the names in the list do not agree with its labels (a list of paths without one folder per person), there are no
    subjects, and evaluation infers them from the genuine pairs.

    Args:
        list_path: the list, or a split folder of CFP.
        images: folder of the images; None is allowed for CFP.
        landmarks: if given, faces are aligned to ArcFace's template; otherwise the images keep their bytes. The name of
            an image is its path inside `images`, or person/pose/image for CFP without `images`.
        image_size: pixels a side of aligned images.

    Raises:
        PairsError: a line has an unknown form, or an image is missing.
    """
    pairs, announced = read_pairs(list_path, images)
    pairs = [pairs[row] for row in fold_order(np.array([pair.same for pair in pairs], bool)).tolist()]
    paths = [path for pair in pairs for path in (pair.first, pair.second)]
    # One row for each file: an image of several pairs is searched for a face once.
    row_of = {path: row for row, path in enumerate(dict.fromkeys(paths))}
    aligned = AlignedImages(landmarks, len(row_of), image_size) if landmarks else None

    def read(number: int) -> bytes:
        path = paths[number]
        data = read_image_file(path)
        if aligned is None:
            return require_readable(data, str(path))
        name = "/".join(path.parts[-3:]) if images is None else os.path.relpath(path, images)
        return aligned.encoded(row_of[path], name, data, str(path))

    same = [pair.same for pair in pairs]
    subjects = [name for pair in pairs for name in pair.subjects]
    agree = contradicting_pair(subjects, same) is None
    remark = ""
    if announced not in (None, len(pairs)):
        remark = (
            f"{list_path}: its first line announces {announced:,} pairs, and it has {len(pairs):,}; if it was cut off, "
            "copy it again"
        )
    return PairsToWrite(same, read, subjects=subjects if agree else None, remark=remark)


def bin_pairs(path: Path, *, reduce_to: int | None = None) -> PairsToWrite:
    """Return the pairs of a `.bin` set, with the tables and landmarks beside it.

    With `reduce_to`, each image is shrunk to so many pixels a side, by the mean of the pixels of each area, and stored
    as PNG: evaluation enlarges it bilinearly. Equal images stay equal, so the people of a published set are still
    recognized.

    Raises:
        PairsError: the set or a table cannot be read.
        DataError: the landmarks cannot be read.
    """
    images, same_P = read_bin(path)
    subject_N, table = read_subjects(path, same_P), groups_path(path)
    with os_errors_as(PairsError, table):
        groups = read_regular_text(table) if table.is_file() else None

    def read(number: int) -> bytes:
        location = f"{path}, image {number}"
        image = decode_rgb(images[number], location=location)
        if reduce_to is None:
            return images[number]
        height, width = image.shape[:2]
        if reduce_to > min(height, width):
            raise PairsError(
                f"{location}: has {width:,} × {height:,} pixels and cannot be reduced to {reduce_to:,}; choose a "
                "smaller number"
            )
        return encode_png(resize_square(image, reduce_to))  # JPEG would blur faces of so few pixels

    return PairsToWrite(
        same_P.tolist(),
        read,
        subjects=None if subject_N is None else [str(subject) for subject in subject_N],
        groups=groups,
        landmarks_N52=read_landmarks_beside(path, len(images)),
    )


def find_group_bins(folder: Path) -> dict[str, Path]:
    """Return RFW's `GROUP_test.bin` by their groups; empty if the folder does not have all four."""
    paths = {group: folder / f"{group}_test.bin" for group in _RFW_GROUPS}
    return paths if all(path.is_file() for path in paths.values()) else {}


def group_bin_pairs(folder: Path) -> PairsToWrite:
    """Return the pairs of RFW's four sets as one, fold by fold, with the groups of the images.

    The tables of subjects and the landmarks beside the sets are kept if all four have them. Without subjects,
    evaluation infers them from the genuine pairs and the repeated images.

    Raises:
        PairsError: a set or a table cannot be read.
        DataError: the landmarks cannot be read.
    """
    sets = {group: bin_pairs(path) for group, path in find_group_bins(folder).items()}
    folds = {group: np.array_split(np.arange(len(each.same)), FOLDS) for group, each in sets.items()}
    order = [(group, pair) for fold in range(FOLDS) for group in sets for pair in folds[group][fold].tolist()]
    places = [(group, 2 * pair + side) for group, pair in order for side in range(2)]

    def read(number: int) -> bytes:
        group, image = places[number]
        return sets[group].read(image)

    subjects = {group: each.subjects for group, each in sets.items() if each.subjects is not None}
    landmarks = {group: each.landmarks_N52 for group, each in sets.items() if each.landmarks_N52 is not None}
    return PairsToWrite(
        [bool(sets[group].same[pair]) for group, pair in order],
        read,
        # A table numbers the people of its group; a few people of RFW are in two.
        subjects=[f"{group} {subjects[group][at]}" for group, at in places]
        if len(subjects) == len(sets)
        else None,
        groups="\n".join(["group", *(group for group, _ in places), ""]),
        landmarks_N52=np.stack([landmarks[group][at] for group, at in places])
        if len(landmarks) == len(sets)
        else None,
    )
