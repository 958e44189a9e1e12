"""Detail of face images: the number of pixels from which they look as they do, whatever their size is."""

# N images

from __future__ import annotations

from collections.abc import Iterable

import cv2
import numpy as np

from facetrain.face_landmarks import TEMPLATE_SIZE

_SIZES = (12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96)
_LOST = 0.005
"""Share of an image's variance that reducing and enlarging it may lose if its detail is no finer. Faces of the training
data that were enlarged from 16, 20, 24, 32, 48 and 64 pixels are measured as 16, 20, 24, 32, 40 and 48."""


def face_detail(images: Iterable[np.ndarray]) -> int:
    """Return the width in pixels that the faces of aligned images, uint8 (S, S, 3) RGB, have detail for: the median.

    It is the smallest size to which an image can be reduced without visible loss; the full size for sharp images. A
    face that was enlarged has the detail of the size that it had.
    """
    return round(float(np.median([_detail(image) for image in images])))


def _detail(image: np.ndarray) -> int:
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    gray = cv2.resize(gray, (TEMPLATE_SIZE, TEMPLATE_SIZE), interpolation=cv2.INTER_AREA).astype(np.float32)
    allowed = _LOST * float(gray.var())

    def lost(size: int) -> float:
        small = cv2.resize(gray, (size, size), interpolation=cv2.INTER_AREA)
        large = cv2.resize(small, (TEMPLATE_SIZE, TEMPLATE_SIZE), interpolation=cv2.INTER_CUBIC)
        return float(np.square(gray - large).mean())

    return next((size for size in _SIZES if lost(size) <= allowed), TEMPLATE_SIZE)
