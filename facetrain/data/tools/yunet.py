"""OpenCV's face detector YuNet, as a finder of landmarks."""

# F faces detected in one image

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from facetrain.data.images.header import MAX_PIXELS
from facetrain.data.tools.landmark_finder import aligned_face_landmarks
from facetrain.errors import DataError

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
