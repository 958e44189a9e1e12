"""Facial landmarks (eyes, nose, corners of the mouth): read from a file, or detected by OpenCV's YuNet."""

# N images   F faces detected in one image

from __future__ import annotations

import csv
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.data.images.align import aligned_landmarks
from facetrain.data.images.header import MAX_PIXELS
from facetrain.errors import DataError
from facetrain.face_landmarks import ARCFACE_TEMPLATE, MIRRORED_ORDER, TEMPLATE_SIZE
from facetrain.files import error_reason
from facetrain.strict_csv import csv_rows

LandmarkFinder = Callable[[str, np.ndarray], np.ndarray | None]
"""Takes the name of an image and its pixels, uint8 RGB (H, W, 3); returns x and y of five points, float32 (5, 2), in
pixels, or None if there are no landmarks."""
_LONGEST_SIDE = 640
"""YuNet detects faces of 10 to 300 pixels. Larger images are reduced to this side."""
_CLOSE_UP_SIDE = 320
"""Longest side to which an image that one face fills is enlarged or reduced. Measured against the points of CFP's
publishers, the landmarks of such faces are 15 to 20 % more precise than in the image as it is, see
docs/log/log.md."""
_CLOSE_UP_SHARE = 0.5
"""Least share of the image's longer side that the face of a close-up has."""
_MIN_SCORE, _LOW_SCORE = 0.6, 0.3
_LEAST_SHARE = 0.6
"""Least score and least width of a face that is compared by its place, as shares of the best score and the width of
the largest face."""
_PADDING = 0.5
"""Border around an image in a second attempt, in units of its longer side: YuNet misses faces that fill an image."""
_MAX_PADDED_PIXELS = 4 * MAX_PIXELS
"""Pixels of a square image of `MAX_PIXELS` with its border; a long image with its border would fill the memory."""
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
    """Landmarks of a file by the names of the images, float32 (5, 2) each; called as a `LandmarkFinder`."""

    in_fractions = False
    """Whether the points are in fractions of the image's sides, not in pixels."""

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks of this name in pixels, or None."""
        points = self.get(name)
        if points is None or not self.in_fractions:
            return points
        height, width = image.shape[:2]
        # Pixel n has its center at the fraction (n + 0.5) / side.
        return points * np.array([width, height], np.float32) - np.float32(0.5)


def aligned_face_landmarks(name: str, image: np.ndarray) -> np.ndarray:
    """Return the points of ArcFace's template in the square at the center of an aligned face; a `LandmarkFinder`."""
    height, width = image.shape[:2]
    side = min(height, width)
    corner = np.array([width - side, height - side]) / 2
    return (ARCFACE_TEMPLATE * (side / TEMPLATE_SIZE) + corner).astype(np.float32)


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
        name = name_of(number)
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
    """Yield the location of each entry for messages, its name and its values."""
    # Excel begins a CSV with a byte order mark, which would become a part of the first name.
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in csv_rows(file):
            is_header = line == 1 and len(row) > 1 and not _is_number(row[1])
            if not is_header:
                yield f"{path}, line {line}", row[0].strip(), row[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class _Face:
    """Detected face, in pixels of the image."""

    points: np.ndarray
    """x and y of five landmarks, float32 (5, 2)."""
    size: float
    """Longer side of the box."""
    rivals: int
    """Number of the other faces of similar size and score, which are farther from the center."""


def select_face(face_F15: np.ndarray, width: int, height: int) -> tuple[np.ndarray, int]:
    """Select the largest face near the center of an image, among faces of similar size and score.

    Faces with less than 0.6 of the best score are left out first, then faces with less than 0.6 of the largest width.
    Of the others it takes the face with the largest area − 2 · squared distance to the center, in pixels, as
    InsightFace does when it prepares datasets. That value alone is negative for a large face off the center, and would
    prefer a small face in the background.

    Args:
        face_F15: detected faces as YuNet returns them, float32 (F, 15): corner, width, height, five points, score.
        width: width of the image in pixels.
        height: height of the image in pixels.

    Returns:
        The selected row, (15,), and the number of the other faces that were compared by their place.
    """
    face_F15 = face_F15[face_F15[:, 14] >= _LEAST_SHARE * face_F15[:, 14].max()]
    face_F15 = face_F15[face_F15[:, 2] >= _LEAST_SHARE * face_F15[:, 2].max()]
    corner, size = face_F15[:, 0:2], face_F15[:, 2:4]
    offset = corner + size / 2 - np.array([width, height]) / 2
    return face_F15[(size.prod(1) - 2 * np.square(offset).sum(1)).argmax()], len(face_F15) - 1


class YuNet:
    """OpenCV's face detector YuNet, with a model file of the user.

    Of several faces it takes the one that `select_face` selects. If it detects none, it searches again with a border
    around the image, then with a lower score, then with both: a border does not bring false faces, a lower score may.
    """

    def __init__(self, model: Path, *, center_crop: bool = False) -> None:
        """Load the ONNX file.

        Args:
            model: the ONNX file.
            center_crop: for an image without a detected face, return the landmarks of a face that fills the center.

        Raises:
            DataError: there is no such file, or OpenCV cannot load it.
        """
        self._model, self._center_crop = model, center_crop
        self.fallbacks: dict[str, str] = {}
        """Images whose face was not detected at first, and the attempt that found it."""
        self.several_faces: dict[str, int] = {}
        """Images with several faces of similar size, and their number; the largest one near the center was taken."""
        self._creation = threading.Lock()  # OpenCV's log level, which is changed meanwhile, is global
        self._per_thread = threading.local()  # the image size is part of a detector's state
        self._detector()

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks of the selected face, or None if no face is detected.

        Raises:
            DataError: the model is not a YuNet model.
        """
        for attempt, detect, score in (
            ("", self._detect_in_place, _MIN_SCORE),
            ("padded image", self._detect_padded, _MIN_SCORE),
            ("lower score", self._detect_in_place, _LOW_SCORE),
            ("padded image, lower score", self._detect_padded, _LOW_SCORE),
        ):
            face = detect(image, score)
            if face is not None:
                if attempt:
                    self.fallbacks[name] = attempt
                if face.rivals:
                    self.several_faces[name] = face.rivals + 1
                return face.points
        if not self._center_crop:
            return None
        self.fallbacks[name] = "center crop"
        return aligned_face_landmarks(name, image)

    def _detect_in_place(self, image: np.ndarray, min_score: float) -> _Face | None:
        longest = max(image.shape[:2])
        face = self._detect(image, min_score, factor=_CLOSE_UP_SIDE / longest)
        # Enlarging does not help for a face that does not fill the image.
        if face is not None and face.size >= _CLOSE_UP_SHARE * longest:
            return face
        return self._detect(image, min_score)

    def _detect_padded(self, image: np.ndarray, min_score: float) -> _Face | None:
        """Return the selected face of an image with a border that repeats its edge."""
        longest = max(image.shape[:2])
        is_large = math.prod(side + 2 * _PADDING * longest for side in image.shape[:2]) > _MAX_PADDED_PIXELS
        factor = _LONGEST_SIDE / longest if is_large else 1.0
        resized = _resized(image, factor)
        if resized is None:
            return None
        border = round(_PADDING * max(resized.shape[:2]))
        padded = cv2.copyMakeBorder(resized, border, border, border, border, cv2.BORDER_REPLICATE)
        face = self._detect(padded, min_score)
        if face is None:
            return None
        return _Face((face.points - np.float32(border)) / np.float32(factor), face.size / factor, face.rivals)

    def _detect(self, image: np.ndarray, min_score: float, *, factor: float | None = None) -> _Face | None:
        """Return the selected face of an image that is resized by `factor`, by default reduced to 640 pixels."""
        factor = factor or min(1.0, _LONGEST_SIDE / max(image.shape[:2]))
        resized = _resized(image, factor)
        if resized is None:
            return None
        height, width = resized.shape[:2]
        detector = self._detector()
        detector.setInputSize((width, height))
        detector.setScoreThreshold(min_score)
        try:
            face_F15 = detector.detect(np.ascontiguousarray(resized[:, :, ::-1]))[1]
        except cv2.error as error:
            raise DataError(
                f"{self._model}: not a YuNet model ({error.err}); take the file of `facetrain get yunet`"
            ) from error
        if face_F15 is None:
            return None
        face, rivals = select_face(face_F15, width, height)
        points = np.asarray(face[4:14].reshape(5, 2) / factor, np.float32)
        return _Face(points, float(face[2:4].max() / factor), rivals)

    def _detector(self) -> Any:
        if not hasattr(self._per_thread, "detector"):
            if not self._model.is_file():
                raise DataError(f"{self._model}: no such file; `facetrain get yunet` downloads the model")
            # OpenCV 5 prints a warning for every new detector because it does not set a target device. OpenCV 4 has
            # neither the warning nor this module.
            logging = getattr(cv2.utils, "logging", None)
            with self._creation:
                level = logging.setLogLevel(logging.LOG_LEVEL_ERROR) if logging else None
                try:
                    self._per_thread.detector = cv2.FaceDetectorYN.create(
                        str(self._model), "", (_LONGEST_SIDE, _LONGEST_SIDE), _MIN_SCORE
                    )
                except cv2.error as error:
                    raise DataError(
                        f"{self._model}: not a model that OpenCV can load ({error.err})"
                    ) from error
                finally:
                    if logging:
                        logging.setLogLevel(level)
        return self._per_thread.detector


def _resized(image: np.ndarray, factor: float) -> np.ndarray | None:
    """Return an image of `factor` times the size; None if a side has less than half a pixel, too few for a face."""
    if factor == 1:
        return image
    if round(min(image.shape[:2]) * factor) < 1:
        return None
    method = cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR
    return cv2.resize(image, None, fx=factor, fy=factor, interpolation=method)
