"""Where the eyes, the nose and the corners of the mouth lie: read from a file, or found by OpenCV's YuNet."""

# N images   F faces found in one

from __future__ import annotations

import csv
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.data.tools.near_duplicates import digest
from facetrain.errors import DataError

Finder = Callable[[str, np.ndarray], np.ndarray | None]
"""Takes an image's name and its pixels, uint8 RGB; returns float32 (5, 2), x and y, or None."""
_LONGEST_SIDE = 640
"""YuNet knows faces of 10 to 300 pixels: a larger image is made smaller for it."""
_LEAST_SCORE = 0.6


class ListedLandmarks:
    """Landmarks by the names of their images: 48 bytes an image, however long the names are."""

    def __init__(self, names: list[np.uint64], points: list[list[float]]) -> None:
        order = np.argsort(np.array(names, np.uint64))
        self._name_N = np.array(names, np.uint64)[order]
        self._points = np.array(points, np.float32).reshape(-1, 5, 2)[order]

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks that the file has for this name."""
        wanted = digest(name.encode())
        row = int(np.searchsorted(self._name_N, wanted))
        return self._points[row] if row < len(self._name_N) and self._name_N[row] == wanted else None


def read_landmarks(path: Path) -> ListedLandmarks:
    """Read a CSV of lines `name,x1,y1,…,x5,y5`, or JSON of `{"name": [[x, y], … five times], …}`.

    The points are, as seen in the image: left eye, right eye, nose, left and right corner of the mouth.

    Raises:
        DataError: the file cannot be read, or a line or an entry is something else.
    """
    names, points = [], []
    try:
        for where, name, values in _entries(path):
            try:
                numbers = np.array(values, np.float32).reshape(10)
            except (ValueError, TypeError) as error:
                raise DataError(f"{where}: {name!r} has no ten numbers, x and y of five points") from error
            if not np.isfinite(numbers).all():
                raise DataError(f"{where}: a point of {name!r} is not finite")
            names.append(digest(name.encode()))
            points.append(numbers.tolist())
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        raise DataError(
            f"{path}: {getattr(error, 'strerror', None) or ' '.join(str(error).split())}"
        ) from error
    if not names:
        raise DataError(f"{path}: holds no landmarks")
    return ListedLandmarks(names, points)


def _entries(path: Path) -> Iterator[tuple[str, str, Any]]:
    if path.suffix.lower() == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise DataError(f"{path}: not an object of names and points")
        yield from ((str(path), name, values) for name, values in content.items())
        return
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            is_head = number == 1 and len(row) > 1 and not _is_number(row[1])
            if row and not is_head:
                yield f"{path}, line {number}", row[0].strip(), row[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class YuNet:
    """OpenCV's detector with a model file that the user has: the face that an image is about.

    Of several faces it is the one that is large and near the middle (area − 2 · squared distance, as in
    InsightFace's preparation of datasets).
    """

    def __init__(self, model: Path) -> None:
        self._model = model
        self._creating = threading.Lock()
        self._of_thread = threading.local()  # the size of the image is part of a detector's state
        self._detector()

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Find a face's landmarks."""
        height, width = image.shape[:2]
        factor = min(1.0, _LONGEST_SIDE / max(height, width))
        if factor < 1:
            image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        detector = self._detector()
        detector.setInputSize((image.shape[1], image.shape[0]))
        try:
            found_F = detector.detect(np.ascontiguousarray(image[:, :, ::-1]))[1]
        except cv2.error as error:
            raise DataError(f"{self._model}: not a model of YuNet: {error.err}") from error
        if found_F is None:
            return None
        corner, size = found_F[:, 0:2], found_F[:, 2:4]
        away = corner + size / 2 - np.array([image.shape[1], image.shape[0]]) / 2
        best = found_F[(size.prod(1) - 2 * np.square(away).sum(1)).argmax()]
        return np.asarray(best[4:14].reshape(5, 2) / factor, np.float32)

    def _detector(self) -> Any:
        if not hasattr(self._of_thread, "detector"):
            if not self._model.is_file():
                raise DataError(
                    f"{self._model}: no such file; YuNet's model comes from OpenCV's model zoo "
                    "(face_detection_yunet)"
                )
            try:
                with self._creating, _without_warnings():
                    self._of_thread.detector = cv2.FaceDetectorYN.create(
                        str(self._model), "", (_LONGEST_SIDE, _LONGEST_SIDE), _LEAST_SCORE
                    )
            except cv2.error as error:
                raise DataError(f"{self._model}: not a model that OpenCV can open ({error.err})") from error
        return self._of_thread.detector


@contextmanager
def _without_warnings() -> Iterator[None]:
    # OpenCV 5 warns for every detector that it takes no target, which is the detector's own doing.
    logging = cv2.utils.logging
    level = logging.getLogLevel()
    logging.setLogLevel(logging.LOG_LEVEL_ERROR)
    try:
        yield
    finally:
        logging.setLogLevel(level)
