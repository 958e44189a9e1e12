"""Sample of the images of a dataset, and the measurements from which silent errors of the data are found."""

# N images of the sample   H, W height and width   S side of a pattern

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np

from facetrain.data.images.decode import NotAnImageError, decode
from facetrain.data.images.face_pattern import face_pattern
from facetrain.data.images.header import is_cmyk_jpeg, jpeg_orientation
from facetrain.errors import DataError

SAMPLE_SIZE = 500
"""Images that are examined of each dataset and each verification set."""
_SEED = 0
_MAX_SECONDS = 5.0
"""Large photos take longer than face crops: the sample then ends early, and the report has its real size."""
_GRAY_DIFFERENCE = 2.0
"""Largest mean difference between the channels of an image without color; JPEG rounds chroma to this extent."""


class EncodedColor(NamedTuple):
    """Storage of the colors of an image."""

    model: str
    """RGB, gray or CMYK."""
    bits: int
    """Bits per channel as they are decoded, 8 or 16."""
    has_alpha: bool
    """Whether the image has transparency."""


@dataclass(frozen=True)
class ImageSample:
    """Measurements of N decoded images, in the order of the dataset."""

    total: int
    """Number of images from which the sample was drawn."""
    colors: Counter[EncodedColor]
    """Number of images by the color storage that their headers state."""
    num_rotated_tags: int
    """Number of images whose EXIF orientation is not upright."""
    redness_N: np.ndarray
    """Mean of red minus blue in the middle of each image, -255 to 255."""
    is_gray_N: np.ndarray
    """Whether the decoded image has no color."""
    pixel_counts: np.ndarray
    """Number of values 0 to 255 in all channels of all images: (256,)."""
    patterns_NSS: np.ndarray
    """Patterns of the faces, see `face_pattern`."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.redness_N)


def draw_sample(num_images: int, read: Callable[[int], bytes]) -> ImageSample:
    """Read and decode up to `SAMPLE_SIZE` images, always the same ones; images that cannot be decoded are left out.

    Args:
        num_images: number of images to draw from.
        read: returns the encoded image of an index.
    """
    chosen = np.random.default_rng(_SEED).permutation(num_images)[:SAMPLE_SIZE]
    # In the order of the file, except for the deadline: it must end a random part of the sample.
    colors: Counter[EncodedColor] = Counter()
    index, redness, gray, patterns, rotated = [], [], [], [], 0
    counts = np.zeros(256, np.int64)
    deadline = time.monotonic() + _MAX_SECONDS
    for number in chosen.tolist():
        if time.monotonic() > deadline:
            break
        try:
            data = read(number)
            image = decode(data)
        except (DataError, NotAnImageError):
            # The check of the dataset itself reports these.
            continue
        height, width = image.shape[:2]
        middle = image[height // 4 : height - height // 4, width // 4 : width - width // 4]
        means = middle.reshape(-1, 3).mean(0)
        spread = image.max(2).astype(np.int16) - image.min(2)
        index.append(number)
        colors[encoded_color(data)] += 1
        rotated += jpeg_orientation(data) != 1
        redness.append(means[0] - means[2])
        gray.append(spread.mean() < _GRAY_DIFFERENCE)
        patterns.append(face_pattern(image))
        # Every third value of a row is enough for a histogram.
        counts += np.bincount(image[::3].reshape(-1), minlength=256)
    order = np.argsort(index)
    return ImageSample(
        num_images,
        colors,
        rotated,
        np.array(redness)[order],
        np.array(gray, bool)[order],
        counts,
        np.array(patterns, np.float32)[order],
    )


def encoded_color(data: bytes) -> EncodedColor:
    """Return the color storage of an encoded image; RGB with 8 bits for HEIC, which OpenCV does not read."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None:
        return EncodedColor("RGB", 8, has_alpha=False)
    channels = 1 if image.ndim == 2 else image.shape[2]
    # OpenCV converts CMYK to RGB also if it is asked for the image as it is.
    model = "CMYK" if is_cmyk_jpeg(data) else "gray" if channels < 3 else "RGB"
    return EncodedColor(model, 8 * image.itemsize, channels in (2, 4))
