"""Pairs of a list or of a set in another form, with their images, as they are written to a `.bin`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.bin_tables import read_group_table, read_subjects, subjects_agree
from facetrain.data.formats.landmark_file import read_landmarks_beside
from facetrain.data.images.decode import decode_rgb, encode_png, resize_square
from facetrain.data.tools.aligned_images import AlignedImages
from facetrain.data.tools.landmarks import LandmarkFinder
from facetrain.data.tools.listed_pairs import mix_folds, read_pairs
from facetrain.data.tools.pair_writer import PairsToWrite, require_readable
from facetrain.errors import PairsError, UnreadableError
from facetrain.files import os_errors_as


def is_pair_list(path: Path, images: Path | None) -> bool:
    """Return whether `path` is a pair list and not a dataset: if `images` is given, or it is a split folder of CFP."""
    return images is not None or (path / "01" / "same.txt").is_file()


def list_pairs(
    list_path: Path, images: Path | None, *, landmarks: LandmarkFinder | None = None, image_size: int = 112
) -> PairsToWrite:
    """Return the pairs of a list, with the subjects of the images.

    The order is the order of the list, except for lists whose folds would have pairs of one kind only, see `mix_folds`.
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
    pairs = mix_folds(read_pairs(list_path, images))
    files = _ListedImages(
        [path for pair in pairs for path in (pair.first, pair.second)], images, landmarks, image_size
    )
    same = [pair.same for pair in pairs]
    subjects = [name for pair in pairs for name in pair.subjects]
    return PairsToWrite(
        same,
        files.encoded,
        name=files.name,
        subjects=subjects if subjects_agree(subjects, same) else None,
    )


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
    subject_N, table = read_subjects(path, same_P), read_group_table(path)

    def read(number: int) -> bytes:
        location = f"{path}, image {number}"
        if reduce_to is None:
            return require_readable(images[number], location)
        return _reduced(decode_rgb(images[number], location=location), reduce_to, location)

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
    height, width = image.shape[:2]
    if size > min(height, width):
        raise PairsError(
            f"{location}: has {width:,} × {height:,} pixels and cannot be reduced to {size:,}; choose a smaller number"
        )
    return encode_png(resize_square(image, size))


class _ListedImages:
    """Image files of all pairs, two for each, unchanged or aligned; an image of several pairs occurs several times."""

    def __init__(
        self, paths: list[Path], folder: Path | None, find: LandmarkFinder | None, size: int
    ) -> None:
        self._paths, self._folder = paths, folder
        # One row for each file: an image of several pairs is searched for a face once.
        self._row_of = {path: row for row, path in enumerate(dict.fromkeys(paths))}
        self._aligned = AlignedImages(find, len(self._row_of), size) if find else None

    def name(self, number: int) -> str:
        """Return the name of an image in lists: its path inside the folder of the images."""
        path = self._paths[number]
        return (
            "/".join(path.parts[-3:]) if self._folder is None else path.relative_to(self._folder).as_posix()
        )

    def encoded(self, number: int) -> bytes:
        """Return an image as it is written.

        Raises:
            UnreadableError: the image cannot be read or decoded, or has no landmarks.
        """
        path = self._paths[number]
        with os_errors_as(UnreadableError, path):
            data = path.read_bytes()
        if self._aligned is None:
            return require_readable(data, str(path))
        return self._aligned.encoded(self._row_of[path], self.name(number), data, str(path))
