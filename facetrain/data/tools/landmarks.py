"""Facial landmarks (eyes, nose, corners of the mouth): read from a file, or detected by OpenCV's YuNet."""

# N images   F faces detected in one image

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

from facetrain.data.align import ARCFACE_TEMPLATE, TEMPLATE_SIZE
from facetrain.data.tools.near_duplicates import digest
from facetrain.errors import DataError
from facetrain.files import error_reason

LandmarkFinder = Callable[[str, np.ndarray], np.ndarray | None]
"""Takes the name of an image and its pixels, uint8 RGB (H, W, 3); returns x and y of five points, float32 (5, 2), in
pixels, or None if there are no landmarks."""
_LONGEST_SIDE = 640
"""YuNet detects faces of 10 to 300 pixels. Larger images are reduced to this side."""
_MIN_SCORE, _LOW_SCORE = 0.6, 0.3
_PADDING = 0.5
"""Border around an image in a second attempt, in units of its longer side: YuNet misses faces that fill an image."""
PADDED, CENTER_CROP = "padded image, lower score", "center crop"
"""Names of the fallbacks of `YuNet`."""


class LandmarkTable:
    """Landmarks of a file by the names of the images. It stores hashes of the names: 48 bytes per image."""

    def __init__(self, names: list[np.uint64], points: list[list[float]]) -> None:
        """Take the digests of the names, and ten numbers for each: x and y of five points."""
        order = np.argsort(np.array(names, np.uint64))
        self._name_N = np.array(names, np.uint64)[order]
        self._points_N52 = np.array(points, np.float32).reshape(-1, 5, 2)[order]

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks of this name, or None; the image is not used."""
        key = digest(name.encode())
        row = int(np.searchsorted(self._name_N, key))
        return self._points_N52[row] if row < len(self._name_N) and self._name_N[row] == key else None


def read_landmarks(path: Path) -> LandmarkTable:
    """Read CSV with lines `name,x1,y1,…,x5,y5`, or JSON of the form `{"name": [[x, y], … five points], …}`.

    The points are the left eye, the right eye, the nose, and the left and the right corner of the mouth, as seen in
    the image, in pixels.

    Raises:
        DataError: the file cannot be read, or an entry does not have five finite points.
    """
    names, points = [], []
    try:
        for location, name, values in _entries(path):
            try:
                numbers = np.array(values, np.float32).reshape(10)
            except (ValueError, TypeError) as error:
                raise DataError(f"{location}: {name!r} needs ten numbers, x and y of five points") from error
            if not np.isfinite(numbers).all():
                raise DataError(f"{location}: a point of {name!r} is not finite")
            names.append(digest(name.encode()))
            points.append(numbers.tolist())
    except (OSError, UnicodeDecodeError, csv.Error, json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: {error_reason(error)}") from error
    if not names:
        raise DataError(f"{path}: the file has no landmarks")
    return LandmarkTable(names, points)


def _entries(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the location of each entry for messages, its name and its values."""
    if path.suffix.lower() == ".json":
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise DataError(f'{path}: not a JSON object; write {{"name": [[x, y], … five points], …}}')
        yield from ((str(path), name, values) for name, values in content.items())
        return
    with path.open(encoding="utf-8", newline="") as file:
        for number, row in enumerate(csv.reader(file), start=1):
            is_header = number == 1 and len(row) > 1 and not _is_number(row[1])
            if row and not is_header:
                yield f"{path}, line {number}", row[0].strip(), row[1:]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class YuNet:
    """OpenCV's face detector YuNet, with a model file of the user.

    Of several faces it selects the largest one near the center, by area − 2 · squared distance in pixels, as
    InsightFace does when it prepares datasets. If it detects none, it searches again with a border around the image
    and a lower score.
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
        """Images whose face was not detected at first, and what was done: `PADDED` or `CENTER_CROP`."""
        self._creation = threading.Lock()  # OpenCV's log level, which is changed meanwhile, is global
        self._per_thread = threading.local()  # the image size is part of a detector's state
        self._detector()

    def __call__(self, name: str, image: np.ndarray) -> np.ndarray | None:
        """Return the landmarks of the selected face, or None if no face is detected.

        Raises:
            DataError: the model is not a YuNet model.
        """
        points = self._detect(image, _MIN_SCORE)
        if points is not None:
            return points
        height, width = image.shape[:2]
        border = round(_PADDING * max(height, width))
        padded = cv2.copyMakeBorder(image, border, border, border, border, cv2.BORDER_REPLICATE)
        points = self._detect(padded, _LOW_SCORE)
        if points is not None:
            self.fallbacks[name] = PADDED
            return points - np.float32(border)
        if not self._center_crop:
            return None
        self.fallbacks[name] = CENTER_CROP
        side = min(height, width)
        corner = np.array([width - side, height - side]) / 2
        return np.asarray(ARCFACE_TEMPLATE * (side / TEMPLATE_SIZE) + corner, np.float32)

    def _detect(self, image: np.ndarray, min_score: float) -> np.ndarray | None:
        height, width = image.shape[:2]
        factor = min(1.0, _LONGEST_SIDE / max(height, width))
        if factor < 1:
            image = cv2.resize(image, None, fx=factor, fy=factor, interpolation=cv2.INTER_AREA)
        detector = self._detector()
        detector.setInputSize((image.shape[1], image.shape[0]))
        detector.setScoreThreshold(min_score)
        try:
            found_F = detector.detect(np.ascontiguousarray(image[:, :, ::-1]))[1]
        except cv2.error as error:
            raise DataError(
                f"{self._model}: not a YuNet model ({error.err}); take face_detection_yunet from OpenCV's model zoo"
            ) from error
        if found_F is None:
            return None
        corner, size = found_F[:, 0:2], found_F[:, 2:4]
        offset = corner + size / 2 - np.array([image.shape[1], image.shape[0]]) / 2
        best = found_F[(size.prod(1) - 2 * np.square(offset).sum(1)).argmax()]
        return np.asarray(best[4:14].reshape(5, 2) / factor, np.float32)

    def _detector(self) -> Any:
        if not hasattr(self._per_thread, "detector"):
            if not self._model.is_file():
                raise DataError(
                    f"{self._model}: no such file; download face_detection_yunet from OpenCV's model zoo"
                )
            try:
                with self._creation, _without_warnings():
                    self._per_thread.detector = cv2.FaceDetectorYN.create(
                        str(self._model), "", (_LONGEST_SIDE, _LONGEST_SIDE), _MIN_SCORE
                    )
            except cv2.error as error:
                raise DataError(f"{self._model}: not a model that OpenCV can load ({error.err})") from error
        return self._per_thread.detector


@contextmanager
def _without_warnings() -> Iterator[None]:
    # OpenCV 5 prints a warning for every new detector because it does not set a target device.
    logging = cv2.utils.logging
    level = logging.getLogLevel()
    logging.setLogLevel(logging.LOG_LEVEL_ERROR)
    try:
        yield
    finally:
        logging.setLogLevel(level)
