"""Decoding, resizing and encoding of images."""

from __future__ import annotations

import cv2
import numpy as np

from facetrain.data.images.header import (
    FORMAT_SUFFIXES,
    MAX_PIXELS,
    is_complete_jpeg,
    jpeg_orientation,
    read_header,
)
from facetrain.errors import ImageError, missing_package
from facetrain.files import error_reason


def decode_rgb(data: bytes, *, location: str) -> np.ndarray:
    """Decode an image of a format in `FORMAT_SUFFIXES` to RGB: uint8 (height, width, 3).

    The image is turned upright by its orientation tag. Gray and CMYK become RGB, 16 bits per channel become 8,
    transparency is dropped; a TIFF file with it is put on black.

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
    if not data:
        raise NotAnImageError("the file is empty")
    header = read_header(data)
    if header is None:
        raise NotAnImageError(f"its {len(data):,} bytes are not an image ({', '.join(FORMAT_SUFFIXES)})")
    if not 0 < header.width * header.height <= MAX_PIXELS:
        raise NotAnImageError(
            f"the image has {header.width:,} × {header.height:,} pixels; the limit is {MAX_PIXELS:,}"
        )
    if header.format == "HEIC":  # after the check of the size, which libheif would allocate
        return _decode_heic(data)
    try:
        # Without IMREAD_IGNORE_ORIENTATION, OpenCV turns the image upright: photos of telephones are stored turned.
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error as error:
        raise NotAnImageError(f"the image cannot be decoded ({error.err})") from error
    if image is None:
        if not cv2.haveImageWriter(FORMAT_SUFFIXES[header.format][0]):
            raise NotAnImageError(f"the installed OpenCV is built without {header.format}; convert the image")
        raise NotAnImageError(
            f"the {header.format} image cannot be decoded: its {len(data):,} bytes are damaged, or OpenCV does not "
            "know this variant of the format"
        )
    # OpenCV decodes the existing part of a truncated JPEG and fills the rest with gray.
    if header.format == "JPEG" and not is_complete_jpeg(data):
        raise NotAnImageError(f"the JPEG is truncated: its {len(data):,} bytes have no end marker")
    return image


def _decode_heic(data: bytes) -> np.ndarray:
    """Decode the format of iPhones, which OpenCV does not read; libheif turns the image upright."""
    try:
        import pillow_heif
    except ImportError as error:
        reason = missing_package(error, "heic")
        raise NotAnImageError(f"HEIC {reason}, or convert the photos with `heif-convert`") from error
    try:
        image = np.asarray(pillow_heif.open_heif(data, convert_hdr_to_8bit=True))
    except (ValueError, EOFError, SyntaxError, RuntimeError) as error:  # libheif's, by the kind of damage
        raise NotAnImageError(f"the HEIC image cannot be decoded ({error_reason(error)})") from error
    return (
        cv2.cvtColor(image, cv2.COLOR_GRAY2RGB) if image.ndim == 2 else np.ascontiguousarray(image[:, :, :3])
    )


def resize_square(image: np.ndarray, size: int) -> np.ndarray:
    """Resize the short side to `size` and crop the center: uint8 (H, W, 3) -> (size, size, 3), as in InsightFace."""
    height, width = image.shape[:2]
    if (height, width) == (size, size):
        return image
    side = min(height, width)
    factor = size / side
    if factor**2 * height * width > MAX_PIXELS:
        # A line of pixels, whose whole length would fill the memory: crop it first.
        top, left = (height - side) // 2, (width - side) // 2
        image = image[top : top + side, left : left + side]
        height = width = side
    resized = max(size, round(width * factor)), max(size, round(height * factor))
    image = cv2.resize(image, resized, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    top, left = (resized[1] - size) // 2, (resized[0] - size) // 2
    return image[top : top + size, left : left + size]


def encode_jpeg(image: np.ndarray, quality: int) -> bytes:
    """Encode RGB, uint8 (height, width, 3), as JPEG of a quality from 1 to 100."""
    _, data = cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return data.tobytes()


def encode_png(image: np.ndarray) -> bytes:
    """Encode RGB, uint8 (height, width, 3), as PNG."""
    _, data = cv2.imencode(".png", image[:, :, ::-1])
    return data.tobytes()


def is_upright_jpeg(data: bytes) -> bool:
    """Return whether these are the bytes of a complete JPEG that decoders without support of EXIF show upright."""
    return data[:2] == b"\xff\xd8" and is_complete_jpeg(data) and jpeg_orientation(data) == 1
