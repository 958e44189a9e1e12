"""Landmarks in a CSV file, by the names of the images."""

# N images

from __future__ import annotations

import csv
import math
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from facetrain.data.images.align import aligned_landmarks
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.errors import DataError
from facetrain.face_landmarks import ARCFACE_TEMPLATE, MIRRORED_ORDER, TEMPLATE_SIZE
from facetrain.files import error_reason
from facetrain.strict_csv import csv_rows

_LARGEST_FRACTION = 2.0
"""Largest number of a table in fractions of the sides, points outside of the image included; no face is that small."""
_SAMPLED_FACES = 500
_LARGEST_MISFIT = 10.0
"""Pixels from ArcFace's template: 3 on LFW, 6 if its points are stretched by 3 : 2, about 8 at a yaw of 60 degrees."""
_OTHER_ORDERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "left and right, or x and y, exchanged": lambda points_N52: points_N52[:, MIRRORED_ORDER],
    "all x before all y": lambda points_N52: points_N52.reshape(-1, 2, 5).swapaxes(1, 2),
    "each x before its y": lambda points_N52: points_N52.swapaxes(1, 2).reshape(-1, 5, 2),
}
"""Orders of the ten numbers that other programs write. Read as ours, they are 14 to 23 pixels away on LFW."""


class LandmarkTable(dict[str, np.ndarray]):
    """Landmarks of a file by the names of the images in Unicode's NFC, float32 (5, 2); called as a `LandmarkFinder`.

    Names of files that come from macOS are in NFD, where é is two characters.
    """

    in_fractions = False
    """Whether the points are in fractions of the image's sides, not in pixels."""

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks of this name, in any form of Unicode, in pixels, or None."""
        points = self.get(_composed(name))
        if points is None or not self.in_fractions:
            return points
        height, width = image.shape[:2]
        # Pixel n has its center at the fraction (n + 0.5) / side.
        return points * np.array([width, height], np.float32) - np.float32(0.5)


def require_distinct_names(
    finder: LandmarkFinder | None,
    count: int,
    name_of: Callable[[int], str],
    location_of: Callable[[int], str],
) -> None:
    """Check that no two of `count` images have one name in a table: shards and the parts of a mixture repeat names.

    Lines of a list can name one file several times; its location is then the same.

    Raises:
        DataError: two images have one name, and the table has landmarks for it.
    """
    if not isinstance(finder, LandmarkTable):
        return
    first_of: dict[str, int] = {}
    for number in range(count):
        name = _composed(name_of(number))
        first = first_of.setdefault(name, number)
        if first != number and name in finder and location_of(first) != location_of(number):
            raise DataError(
                f"{location_of(number)}: has the name {name!r}, as {location_of(first)}; the file of landmarks has "
                "one entry for both: give them different names, or use --detector"
            )


def read_landmark_table(path: Path) -> LandmarkTable:
    """Read CSV with lines `name,x1,y1,…,x5,y5`.

    The points are the left eye, the right eye, the nose, and the left and the right corner of the mouth, as seen in
    the image, in pixels, or in fractions of the sides, as CVLface's ldmk_5points.csv has them.

    Raises:
        DataError: the file cannot be read, its quotes do not match, an entry does not have five finite points, or an
            image has two entries.
    """
    table = LandmarkTable()
    try:
        for location, name, values in _entries(path):
            try:
                with np.errstate(over="ignore"):  # to infinity, which is refused below
                    points = np.array(values, np.float32).reshape(5, 2)
            except ValueError as error:
                raise DataError(f"{location}: {name!r} needs ten numbers, x and y of five points") from error
            if not np.isfinite(points).all():
                raise DataError(f"{location}: a point of {name!r} is not finite")
            if name in table:
                raise DataError(
                    f"{location}: {name!r} has landmarks in an earlier entry; keep one face per image"
                )
            table[name] = points
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
    if not table:
        raise DataError(f"{path}: the file has no landmarks")
    table.in_fractions = all(points.max() <= _LARGEST_FRACTION for points in table.values())
    require_order(path, np.stack(list(table.values())), "lines `name,x1,y1,…,x5,y5` with")
    return table


def require_order(path: Path, points_N52: np.ndarray, form: str) -> None:
    """Check that no other order fits faces better: what is cut out would not be the faces, without an error.

    Args:
        path: the file of the points, for messages.
        points_N52: landmarks, in pixels or fractions, (N, 5, 2); NaN for images without any.
        form: how the file has them, for messages.

    Raises:
        DataError: another order does; the message names it.
    """
    points_N52 = points_N52[~np.isnan(points_N52[:, 0, 0])]
    if not len(points_N52):
        return
    sample_N52 = points_N52[:: -(-len(points_N52) // _SAMPLED_FACES)]
    given = _misfit(sample_N52)
    for name, reordered in _OTHER_ORDERS.items():
        other = _misfit(reordered(sample_N52))
        if other < _LARGEST_MISFIT and 2 * other < given:
            raise DataError(
                f"{path}: its points are those of faces with {name}; write {form} the left eye, the right eye, the "
                "nose, and the left and the right corner of the mouth, as seen in the image"
            )


def _misfit(points_N52: np.ndarray) -> float:
    """Return how far aligned points are from ArcFace's template in the median, in its pixels."""
    distances = [
        np.linalg.norm(aligned_landmarks(one, TEMPLATE_SIZE) - ARCFACE_TEMPLATE) for one in points_N52
    ]
    return float(np.median(distances)) / math.sqrt(len(ARCFACE_TEMPLATE))


def _entries(path: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the location of each entry for messages, its name in Unicode's NFC and its values."""
    # Excel begins a CSV with a byte order mark, which would become a part of the first name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in csv_rows(file):
            is_header = line == 1 and len(row) > 1 and not _is_number(row[1])
            if not is_header:
                yield f"{path}, line {line}", _composed(row[0].strip()), row[1:]


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
