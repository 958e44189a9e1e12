"""Check for whole photos, to which a network for aligned faces gives high scores by chance."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from facetrain.data.images.decode import resize_square
from facetrain.data.images.face_pattern import correlation, face_pattern, upright_face
from facetrain.data.tools.photo_shapes import are_photos, has_photo_shape
from facetrain.telemetry.log import warn

EXAMINED = 256
"""Images that are examined: the first ones of an input."""
_LARGEST_SCALE = 3
"""Side of an image, as a multiple of the network's input, from which it is probably not a crop of a face."""
_LEAST_PATTERN, _PATTERN_SPREAD = 0.15, 0.3
"""Least correlation with an upright face, on average over many images; and two standard deviations of one image.

Aligned faces have 0.30 to 0.41 (CelebA, LFW; drawn faces 0.19), with a standard deviation of 0.15; faces of half the
width of a photo have less than 0.1.
"""
_REASON = "the network needs aligned faces, and gives other images high scores by chance"
_ADVICE = 'give --detector yunet (Python: detector="yunet") to align them'


class PhotoCheck:
    """Resizing of decoded images that notes which of them look like whole photos.

    An instance is a `Crop` of `ImageEmbedder`. It may be called from many threads.

    Args:
        location: returns the place of an image by its index, for messages; by default its number in the input.
    """

    def __init__(self, location: Callable[[int], str] | None = None) -> None:
        self._location = location or "image {}".format
        self._photos: dict[int, str] = {}
        self._correlations: dict[int, float] = {}

    def __call__(self, image: np.ndarray, index: int, size: int) -> np.ndarray:
        """Note whether an image uint8 (H, W, 3) is a photo, and resize it to (size, size, 3)."""
        if index < EXAMINED:
            height, width = image.shape[:2]
            if has_photo_shape(width, height):
                self._photos[index] = f"{width} × {height} pixels, not square"
            elif height > _LARGEST_SCALE * size:
                self._photos[index] = f"{width} × {height} pixels, for an input of {size} × {size}"
            self._correlations[index] = float(correlation(face_pattern(image)[None], upright_face())[0])
        return resize_square(image, size)

    @property
    def all_aligned(self) -> bool:
        """Whether images were examined, and each has the shape and the size of an aligned face."""
        return bool(self._correlations) and not self._photos

    def finding(self) -> str | None:
        """Return that the images are photos, or have no face at the expected place; None if they are aligned faces."""
        examined = len(self._correlations)
        if are_photos(len(self._photos), examined):
            index = min(self._photos)
            return (
                f"{len(self._photos):,} of {examined:,} images look like whole photos ({self._location(index)}: "
                f"{self._photos[index]})"
            )
        average = float(np.mean(list(self._correlations.values()))) if examined else 1.0
        if average < _LEAST_PATTERN - _PATTERN_SPREAD / np.sqrt(max(examined, 1)):
            return "no face pattern at the place of an aligned face"
        return None

    def warn(self, name: str, *, advice: str = _ADVICE) -> None:
        """Warn of what `finding` returns; `name` is the input, and `advice` says what to do, for the message."""
        if finding := self.finding():
            warn(f"{name}: {finding}; {_REASON}; {advice}")
