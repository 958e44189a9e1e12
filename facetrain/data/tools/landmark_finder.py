"""Functions that find the five landmarks of a face in an image."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from facetrain.face_landmarks import ARCFACE_TEMPLATE, TEMPLATE_SIZE

LandmarkFinder = Callable[[str, np.ndarray], np.ndarray | None]
"""Takes the name of an image and its pixels, uint8 RGB (H, W, 3); returns x and y of five points, float32 (5, 2), in
pixels, or None if there are no landmarks."""


def aligned_face_landmarks(name: str, image: np.ndarray) -> np.ndarray:
    """Return the points of ArcFace's template in the square at the center of an aligned face; a `LandmarkFinder`."""
    height, width = image.shape[:2]
    side = min(height, width)
    corner = np.array([width - side, height - side]) / 2
    return (ARCFACE_TEMPLATE * (side / TEMPLATE_SIZE) + corner).astype(np.float32)
