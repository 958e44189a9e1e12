"""Decoding, resizing and encoding of images."""

from __future__ import annotations

import struct

import cv2
import numpy as np

from facetrain.errors import ImageError

MAX_PIXELS = 1 << 26
"""64 megapixels. The header of a tiny file can claim 100,000 × 100,000 pixels; it is refused before decoding."""

_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
# JPEG markers before the image size: 0xC0 to 0xCF without DHT, JPG and DAC (ITU-T T.81, table B.1).
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def decode_rgb(data: bytes, *, location: str) -> np.ndarray:
    """Decode a JPEG, PNG or BMP to RGB: uint8 (height, width, 3).

    Orientation tags are ignored, as in MXNet; gray becomes RGB, transparency is dropped.

    Raises:
        ImageError: if the data is another format, damaged, or larger than `MAX_PIXELS`; the message begins
            with `location`.
    """
    try:
        return decode(data)
    except NotAnImageError as error:
        raise ImageError(f"{location}: {error}") from None


class NotAnImageError(Exception):
    """Reason why data cannot be decoded, without the location of the data."""


def decode(data: bytes) -> np.ndarray:
    """Decode like `decode_rgb`, for callers that compute the location only after an error.

    Raises:
        NotAnImageError: in the cases of `decode_rgb`'s ImageError.
    """
    size = encoded_image_size(data)
    if size is None:
        raise NotAnImageError(f"its {len(data):,} bytes are not a JPEG, PNG or BMP image")
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise NotAnImageError(f"the image has {width:,} × {height:,} pixels; the limit is {MAX_PIXELS:,}")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _FLAGS)
    except cv2.error as error:
        raise NotAnImageError(f"the image cannot be decoded ({error.err})") from error
    if image is None:
        raise NotAnImageError(f"the image cannot be decoded; its {len(data):,} bytes are damaged")
    # OpenCV decodes the existing part of a truncated JPEG and fills the rest with gray.
    if data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") < 0:
        raise NotAnImageError(f"the JPEG is truncated: its {len(data):,} bytes have no end marker")
    return image


def resize_square(image: np.ndarray, size: int) -> np.ndarray:
    """Resize the short side to `size` and crop the center: uint8 (H, W, 3) -> (size, size, 3), as in InsightFace."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    factor = size / min(height, width)
    resized = max(size, round(width * factor)), max(size, round(height * factor))
    image = cv2.resize(image, resized, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    top, left = (resized[1] - size) // 2, (resized[0] - size) // 2
    return image[top : top + size, left : left + size]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encode RGB, uint8 (height, width, 3), as JPEG of a quality from 1 to 100."""
    _, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return data.tobytes()


def encoded_image_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) from the header of a JPEG, PNG or BMP; None for other data."""
    if data[:2] == b"\xff\xd8":
        return _jpeg_size(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    if data[:2] == b"BM" and len(data) >= 26:
        width, height = struct.unpack("<ii", data[18:26])
        return abs(width), abs(height)
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    position = 2
    while position + 9 <= len(data):
        if data[position] != 0xFF:
            return None
        marker = data[position + 1]
        if marker == 0xFF:  # fill byte before a marker (ITU-T T.81, B.1.1.2)
            position += 1
        elif marker in _START_OF_FRAME:
            height, width = struct.unpack(">HH", data[position + 5 : position + 9])
            return width, height
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None
