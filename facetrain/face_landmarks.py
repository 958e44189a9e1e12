"""Five landmarks of a face: eyes, nose, corners of the mouth; their order, their units, and their template.

The points are the left eye, the right eye, the nose, and the left and the right corner of the mouth, as seen in the
image. In pixels, the center of the first pixel is at 0, as in OpenCV. Normalized, x and y are fractions of the image's
width and height from the edge of the image, so they stay the same if the image is resized, and x becomes 1 − x in the
mirror image.
"""

from __future__ import annotations

import numpy as np

ARCFACE_TEMPLATE = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
"""Landmarks (x, y) in the 112 × 112 images that ArcFace models are trained on; from InsightFace."""
TEMPLATE_SIZE = 112
"""Pixels a side of the images of `ARCFACE_TEMPLATE`."""
MIRRORED_ORDER = (1, 0, 2, 4, 3)
"""Points of a face in the order of its mirror image: left and right change places."""


def normalize_landmarks(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Map landmarks (…, 2) in pixels of an image to fractions of its sides, float32."""
    return np.asarray((np.asarray(points, np.float64) + 0.5) / (width, height), np.float32)


NORMALIZED_TEMPLATE = normalize_landmarks(ARCFACE_TEMPLATE, TEMPLATE_SIZE, TEMPLATE_SIZE)
"""Landmarks of an aligned face as fractions of the image's sides, float32 (5, 2)."""
