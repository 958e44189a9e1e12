"""Sample of the images of a dataset, and the measurements from which silent errors of the data are found."""

# N images of the sample   H, W height and width   S side of a pattern

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from facetrain.data.images.decode import decode_rgb
from facetrain.data.images.face_pattern import face_pattern
from facetrain.data.images.header import is_cmyk_jpeg, jpeg_orientation
from facetrain.data.loading.sampler import sample_numbers
from facetrain.errors import DataError

SAMPLE_SIZE = 500
"""Images that are examined of each dataset and each verification set."""
_MAX_SECONDS = 5.0
"""Large photos take longer than face crops: the sample then ends early, and the report has its real size."""
_GRAY_DIFFERENCE = 2.0
"""Largest mean difference between the channels of an image without color; JPEG rounds chroma to this extent."""


@dataclass(frozen=True)
class ImageSample:
    """Measurements of N decoded images, in the order of the dataset."""

    total: int
    """Number of images from which the sample was drawn."""
    errors: list[str]
    """Reasons why other images of the sample cannot be decoded."""
    sizes: Counter[tuple[int, int]]
    """Number of images by width and height."""
    storage: Counter[str]
    """Number of images with each of `storage_faults`."""
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


def draw_sample(
    num_images: int, read: Callable[[int], bytes], locate: Callable[[int], str] = "image {}".format
) -> ImageSample:
    """Read and decode up to `SAMPLE_SIZE` images, always the same ones.

    Args:
        num_images: number of images to draw from.
        read: returns the encoded image of an index.
        locate: returns the place of an index, for messages.
    """
    chosen = sample_numbers(SAMPLE_SIZE, num_images)
    storage: Counter[str] = Counter()
    sizes: Counter[tuple[int, int]] = Counter()
    errors: list[str] = []
    measured: dict[int, tuple[float, bool, np.ndarray]] = {}
    counts = np.zeros(256, np.int64)
    deadline = time.monotonic() + _MAX_SECONDS
    # Not in the order of the file: the deadline must end a random part of the sample.
    for number in chosen.tolist():
        if time.monotonic() > deadline:
            break
        try:
            data = read(number)
            image = decode_rgb(data, location=locate(number))
        except DataError as error:
            errors.append(str(error))
            continue
        height, width = image.shape[:2]
        sizes[width, height] += 1
        storage.update(storage_faults(data))
        middle = image[height // 4 : height - height // 4, width // 4 : width - width // 4]
        red, _, blue = middle.reshape(-1, 3).mean(0)
        spread = image.max(2).astype(np.int16) - image.min(2)
        measured[number] = red - blue, spread.mean() < _GRAY_DIFFERENCE, face_pattern(image)
        # Every third row is enough for a histogram.
        counts += np.bincount(image[::3].reshape(-1), minlength=256)
    rows = [measured[number] for number in sorted(measured)]
    redness, gray, patterns = ([row[column] for row in rows] for column in range(3))
    arrays = np.array(redness), np.array(gray, bool), counts, np.array(patterns, np.float32)
    return ImageSample(num_images, errors, sizes, storage, *arrays)


def storage_faults(data: bytes) -> list[str]:
    """Return how the headers of an encoded image say that it is stored, of what may cost accuracy."""
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    # OpenCV reads no HEIC, and converts CMYK to RGB also if it is asked for the image as it is.
    channels = 1 if image is None or image.ndim == 2 else image.shape[2]
    faults = {
        "have an EXIF rotation": jpeg_orientation(data) != 1,
        "are CMYK": is_cmyk_jpeg(data),
        "have more than 8 bits per channel": image is not None and image.itemsize > 1,
        "have transparency": channels in (2, 4),
    }
    return [fault for fault, applies in faults.items() if applies]
