"""Images of a list of pairs as they are written: unchanged, or aligned, with a record of the detector's attempts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from facetrain.data.images.align import align
from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.tools.landmarks import DETECTED, LandmarkFinder, YuNet
from facetrain.errors import ImageError, UnreadableError
from facetrain.files import os_errors_as

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

    def name(self, number: int) -> str:
        """Return the name of an image in lists: its path inside the folder of the images."""
        path = self._paths[number]
        if self._folder is None:
            return "/".join(path.parts[-3:])
        return path.relative_to(self._folder).as_posix()

    def encoded(self, number: int) -> bytes:
        """Return an image as it is written.

        Raises:
            UnreadableError: the image cannot be read or decoded, or has no landmarks.
        """
        path, name = self._paths[number], self.name(number)
        with os_errors_as(UnreadableError, path):
            data = path.read_bytes()
        image = decode_rgb(data, location=str(path))  # also without landmarks: evaluation must be able to
        if self._landmarks is None:
            return data
        points = self._points[name] if name in self._points else self._landmarks(name, image)
        if points is None:
            raise ImageError(f"{path}: no landmarks for {name!r}")
        self._points[name] = points
        return encode_jpeg(align(image, points, self._size), _QUALITY)

    def attempts(self) -> dict[str, str]:
        """Return the attempt of the detector that found the face of each image; empty without a detector."""
        if not isinstance(self._landmarks, YuNet):
            return {}
        fallbacks = self._landmarks.fallbacks
        return {name: fallbacks.get(name, DETECTED) for name in self._points}
