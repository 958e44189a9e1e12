"""Color model, bit depth and transparency of an encoded image."""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from facetrain.data.images.header import is_cmyk_jpeg


class EncodedColor(NamedTuple):
    """Storage of the colors of an image."""

    model: str
    """RGB, gray or CMYK."""
    bits: int
    """Bits per channel as they are decoded, 8 or 16."""
    has_alpha: bool
    """Whether the image has transparency."""


def encoded_color(data: bytes) -> EncodedColor:
    """Return the color storage of an encoded image; RGB with 8 bits for HEIC, which OpenCV does not read."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        return EncodedColor("RGB", 8, has_alpha=False)
    channels = 1 if image.ndim == 2 else image.shape[2]
    # OpenCV converts CMYK to RGB also if it is asked for the image as it is.
    model = "CMYK" if is_cmyk_jpeg(data) else "gray" if channels < 3 else "RGB"
    return EncodedColor(model, 8 * image.itemsize, channels in (2, 4))
