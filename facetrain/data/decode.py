"""From the bytes of an image to pixels, and back."""

from __future__ import annotations

import struct

import cv2
import numpy as np

from facetrain.errors import ImageError

MAX_PIXELS = 1 << 26
"""64 megapixels. A file of a few bytes can claim 100,000 × 100,000; it is refused before it is decoded."""

_FLAGS = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION
# Start-of-frame markers: 0xC0 to 0xCF without DHT, JPG and DAC.
_SOF = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def decode_rgb(data: bytes, *, location: str) -> np.ndarray:
    """Decode a JPEG, PNG or BMP to RGB: uint8 (height, width, 3).

    Orientation tags are left alone, as MXNet leaves them; gray becomes RGB, transparency is dropped.

    Raises:
        ImageError: not such an image, damaged, or larger than `MAX_PIXELS`; the message begins with `location`.
    """
    try:
        return decode(data)
    except NotAnImageError as refused:
        raise ImageError(f"{location}: {refused}") from None


class NotAnImageError(Exception):
    """Why bytes are no image, said where it is not yet known where they lie."""


def decode(data: bytes) -> np.ndarray:
    """Do what `decode_rgb` does, for callers that can say where the bytes lie when something is wrong.

    Raises:
        NotAnImageError: as the ImageError of `decode_rgb`.
    """
    size = encoded_image_size(data)
    if size is None:
        raise NotAnImageError(f"{len(data):,} bytes that are no JPEG, PNG or BMP image")
    width, height = size
    if not 0 < width * height <= MAX_PIXELS:
        raise NotAnImageError(f"an image of {width:,} × {height:,} pixels; at most {MAX_PIXELS:,} are read")
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), _FLAGS)
    except cv2.error as error:
        raise NotAnImageError(f"the image cannot be decoded ({error.err})") from error
    if image is None:
        raise NotAnImageError(f"the image cannot be decoded; its {len(data):,} bytes are damaged")
    # OpenCV decodes what is there of a JPEG and leaves the rest gray.
    if data[:2] == b"\xff\xd8" and data.rfind(b"\xff\xd9") < 0:
        raise NotAnImageError(f"the JPEG is cut off: its {len(data):,} bytes have no end marker")
    return image


def resize_square(image: np.ndarray, size: int) -> np.ndarray:
    """Bring an image to (size, size, 3): the short side to `size`, then the middle, as InsightFace does."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    factor = size / min(height, width)
    resized = max(size, round(width * factor)), max(size, round(height * factor))
    image = cv2.resize(image, resized, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    top, left = (resized[1] - size) // 2, (resized[0] - size) // 2
    return image[top : top + size, left : left + size]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encode uint8 RGB (height, width, 3) as JPEG."""
    _, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return data.tobytes()


def encoded_image_size(data: bytes) -> tuple[int, int] | None:
    """Return (width, height) as the image's own header says; None if it is none of the three formats."""
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
        if marker == 0xFF:  # filler
            position += 1
        elif marker in _SOF:
            height, width = struct.unpack(">HH", data[position + 5 : position + 9])
            return width, height
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return None
