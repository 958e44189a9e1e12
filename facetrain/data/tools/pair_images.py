"""Images of a list of pairs as they are written: unchanged, or aligned, with a record of the detector's attempts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_groups import groups_path
from facetrain.data.formats.bin_subjects import subjects_path
from facetrain.data.formats.image_table import remove_image_table
from facetrain.data.formats.landmark_file import remove_landmarks
from facetrain.data.images.align import align
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.tools.landmarks import DETECTED, LandmarkFinder, YuNet
from facetrain.errors import PairsError
from facetrain.files import os_errors_as, write_atomically

_QUALITY = 95


class PairImages:
    """Images of all pairs, two for each; safe to use from several threads."""

    def __init__(
        self, paths: Sequence[Path], folder: Path | None, landmarks: LandmarkFinder | None, size: int
    ) -> None:
        """Take the image files.

        Args:
            paths: images in the order of the pairs; an image of several pairs occurs several times.
            folder: the names of the images are their paths in this folder; None for CFP: person/pose/image.
            landmarks: if given, faces are aligned to ArcFace's template; otherwise images keep their bytes.
            size: pixels a side of aligned images.
        """
        self._paths, self._folder, self._landmarks, self._size = paths, folder, landmarks, size
        # Most images are in several pairs, and detection takes longer than everything else.
        self._points: dict[str, np.ndarray] = {}

    def encoded(self, number: int) -> bytes:
        """Return an image as it is to be written.

        Raises:
            PairsError: the image has no landmarks.
            ImageError: the image cannot be decoded.
        """
        path = self._paths[number]
        data = path.read_bytes()
        if self._landmarks is None:
            return data
        name = (
            "/".join(path.parts[-3:]) if self._folder is None else path.relative_to(self._folder).as_posix()
        )
        image = decode_rgb(data, location=str(path))
        points = self._points[name] if name in self._points else self._landmarks(name, image)
        if points is None:
            raise PairsError(f"{path}: no landmarks for {name!r}")
        self._points[name] = points
        return encode_jpeg(align(image, points, self._size), _QUALITY)

    def write_alignment(self, bin_path: Path) -> None:
        """Write which attempt of the detector found the face of each image; without a detector, write nothing.

        Raises:
            PairsError: the file cannot be written.
        """
        if not isinstance(self._landmarks, YuNet):
            return
        text = io.StringIO()
        attempts = self._landmarks.fallbacks
        rows = [(name, attempts.get(name, DETECTED)) for name in sorted(self._points)]
        csv.writer(text, lineterminator="\n").writerows([("image", "attempt"), *rows])
        with os_errors_as(PairsError, alignment_path(bin_path)):
            write_atomically(alignment_path(bin_path), text.getvalue())


def alignment_path(bin_path: Path) -> Path:
    """Return the path of the table with the detector's attempts for a `.bin` file."""
    return bin_path.with_suffix(".alignment.csv")


def write_set(bin_path: Path, images: Iterable[bytes], same: Sequence[bool]) -> None:
    """Write a `.bin` as `write_bin`; tables and landmarks of an older set of its name do not remain beside it.

    They are removed when all images have been written, because they may be those of the set that is read: LFW.xz and
    LFW.bin share them. If the writing fails, they stay.

    Raises:
        PairsError: the file cannot be written, or a table cannot be removed.
        DataError: the landmarks cannot be removed.
    """

    def all_images() -> Iterator[bytes]:
        yield from images
        for path in (subjects_path(bin_path), groups_path(bin_path), alignment_path(bin_path)):
            remove_image_table(path)
        remove_landmarks(bin_path)

    write_bin(bin_path, all_images(), same)
