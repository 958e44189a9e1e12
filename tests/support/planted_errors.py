"""Errors that stop no run, planted into face images: the encoded images that a wrong tool would have stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cv2
import numpy as np

from tests.support.exif import turned_jpeg

Plant = Callable[[np.ndarray], bytes]
"""Stores an image, uint8 (H, W, 3) RGB, with an error."""


def jpeg(image: np.ndarray) -> bytes:
    """Store an image without an error."""
    return bytes(cv2.imencode(".jpg", image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])[1])


def png(image: np.ndarray) -> bytes:
    """Store channels in OpenCV's order: gray, BGR or BGRA, with 8 or 16 bits."""
    return bytes(cv2.imencode(".png", image)[1])


def swapped(image: np.ndarray) -> bytes:
    """Store red as blue and blue as red."""
    return jpeg(image[:, :, ::-1])


def turned(turns: int) -> Plant:
    """Store an image after quarter turns counterclockwise."""
    return lambda image: jpeg(np.rot90(image, turns))


def with_exif_turn(image: np.ndarray) -> bytes:
    """Store an image with the EXIF orientation 6."""
    return turned_jpeg(image, 6)


def gray(image: np.ndarray) -> bytes:
    """Store the luma."""
    return jpeg(np.repeat(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)[:, :, None], 3, axis=2))


def cmyk(image: np.ndarray) -> bytes:
    """Store a JPEG with four channels; needs Pillow."""
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).convert("CMYK").save(file, "JPEG", quality=95)
    return file.getvalue()


def with_16_bits(image: np.ndarray) -> bytes:
    """Store a PNG with 16 bits per channel."""
    return png(image[:, :, ::-1].astype(np.uint16) * 257)


def with_alpha(image: np.ndarray) -> bytes:
    """Store a PNG with transparency."""
    return png(np.dstack([image[:, :, ::-1], np.full(image.shape[:2], 200, np.uint8)]))


def stored_as(change: Callable[[np.ndarray], np.ndarray]) -> Plant:
    """Store numbers between -1 and 1 as bytes after a wrong conversion."""
    return lambda image: png(change(image / 127.5 - 1).astype(np.int64).astype(np.uint8)[:, :, ::-1].copy())


def framed(scale: float, right: float = 0.0, down: float = 0.0) -> Plant:
    """Store a face in another size and at another place of its image."""

    def plant(image: np.ndarray) -> bytes:
        half = image.shape[0] / 2
        matrix = np.array(
            [[scale, 0, half - half * scale + right], [0, scale, half - half * scale + down]], np.float32
        )
        return jpeg(cv2.warpAffine(image, matrix, image.shape[1::-1], borderMode=cv2.BORDER_REFLECT))

    return plant


IMAGE_ERRORS: dict[str, tuple[Plant, float, str]] = {
    "red and blue swapped, all": (swapped, 1.0, "more blue than red"),
    "red and blue swapped, half": (swapped, 0.5, "more blue than red"),
    "red and blue swapped, 10 %": (swapped, 0.1, "more blue than red"),
    "a quarter turn, all": (turned(1), 1.0, "turned to the left"),
    "half a turn, all": (turned(2), 1.0, "upside down"),
    "a quarter turn, 10 %": (turned(3), 0.1, "turned to the right"),
    "EXIF rotation, 2 %": (with_exif_turn, 0.02, "EXIF"),
    "gray, all": (gray, 1.0, "gray"),
    "gray, 15 %": (gray, 0.15, "gray"),
    "CMYK, 2 %": (cmyk, 0.02, "CMYK"),
    "16 bits, 2 %": (with_16_bits, 0.02, "more than 8 bits"),
    "alpha, 2 %": (with_alpha, 0.02, "transparency"),
    "normalized to -1 … 1, stored as bytes": (stored_as(lambda x: x), 1.0, "normalized"),
    "normalized to -1 … 1, negative values cut off": (
        stored_as(lambda x: (x * 127.5).clip(0)), 1.0, "normalized",
    ),
    "normalized to 0 … 1, stored as bytes": (stored_as(lambda x: x / 2 + 0.5), 1.0, "normalized"),
    "normalized twice": (stored_as(lambda x: x * 64 + 128), 1.0, "normalized"),
}  # fmt: skip
"""Name of each error: how it is stored, in which share of the images, and words of the finding."""

ALIGNMENT_ERRORS: dict[str, Plant] = {
    "faces at 45 % (full photos)": framed(0.45),
    "faces at 60 %": framed(0.6),
    "faces at 80 % (wide crops)": framed(0.8),
    "faces at 117 % (SphereFace's 112 × 96)": framed(1.17),
    "faces at 140 % (tight crops)": framed(1.4),
    "10 pixels up": framed(1.0, down=-10),
    "10 pixels right": framed(1.0, right=10),
    "85 %, 10 pixels down": framed(0.85, down=10),
}
"""Name of each alignment of a verification set that differs from the training data's."""


def plant(images: Sequence[np.ndarray], error: Plant, share: float) -> list[bytes]:
    """Store images, evenly spread ones of them with an error."""
    step = round(1 / share)
    return [error(image) if number % step == 0 else jpeg(image) for number, image in enumerate(images)]
