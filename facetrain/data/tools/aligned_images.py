"""Images aligned to ArcFace's template by landmarks, which are found once for each image."""

# N images

from __future__ import annotations

import numpy as np

from facetrain.data.images.align import align, aligned_landmarks
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.skipped_files import SkippedFile
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.data.tools.yunet import YuNet
from facetrain.errors import ImageError, UnreadableError
from facetrain.face_landmarks import normalize_landmarks

QUALITY = 95
"""JPEG quality of images that are encoded again."""


class NoFaceError(ImageError):
    """An image has no landmarks."""


def skipped_image(name: str, error: UnreadableError) -> SkippedFile:
    """Return an image that is left out because of an error."""
    return SkippedFile(name, "no_face" if isinstance(error, NoFaceError) else "unreadable", str(error))


class AlignedImages:
    """Aligned images of a dataset or a list of pairs; safe to use from several threads."""

    def __init__(
        self, find: LandmarkFinder, count: int, size: int, known_N52: np.ndarray | None = None
    ) -> None:
        """Take the landmarks of `count` images, and the pixels a side of the aligned images.

        `known_N52` has the landmarks of some images in pixels, float32 (N, 5, 2), and NaN for those that `find` finds.
        """
        self._find, self._size = find, size
        # Kept, because images are checked before they are written, or are in several pairs: detection takes longer
        # than everything else.
        self.landmarks_N52 = np.full((count, 5, 2), np.nan, np.float32)
        """Landmarks of the images that have been aligned, as fractions of their sides."""
        self._points_N52 = (self.landmarks_N52 if known_N52 is None else known_N52).copy()

    def decode(self, number: int, name: str, data: bytes, location: str) -> np.ndarray:
        """Return the pixels of an image, uint8 RGB (H, W, 3), after its landmarks were found.

        Raises:
            NoFaceError: it has no landmarks.
            ImageError: it cannot be decoded.
        """
        image = decode_rgb(data, location=location)
        if np.isnan(self._points_N52[number, 0, 0]):
            points = self._find(name, image)
            if points is None:
                is_detector = isinstance(self._find, YuNet)
                reason = "the detector finds no face" if is_detector else f"no landmarks for {name!r}"
                raise NoFaceError(f"{location}: {reason}")
            self._points_N52[number] = points
        return image

    def encoded(self, number: int, name: str, data: bytes, location: str) -> bytes:
        """Return the aligned image as JPEG; raises as `decode`."""
        image = self.decode(number, name, data, location)
        points = self._points_N52[number]
        aligned = aligned_landmarks(points, self._size)
        self.landmarks_N52[number] = normalize_landmarks(aligned, self._size, self._size)
        return encode_jpeg(align(image, points, self._size), QUALITY)
