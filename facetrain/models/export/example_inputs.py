"""Example inputs of a model: random ones, and faces on which an exported file is compared with the network."""

# N images   H, W height and width   S side in pixels

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.models.embedding_model import EmbeddingModel
from facetrain.models.export.formats import ExportOptions

_CALIBRATION_FACES = 256
"""Faces that are drawn to calibrate an int8 file if no images are given."""
_COMPARED_SHARE = 5
"""One of so many images is not used for calibration: file and network are compared on it."""
_MAX_COMPARED = 64


def inputs_of_file(model: EmbeddingModel, options: ExportOptions, pixels_NHWC: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of the exported file for uint8 RGB images (N, H, W, 3): the images, and example landmarks."""
    image = (pixels_NHWC if options.from_pixels else model.prepare(pixels_NHWC)).contiguous()
    return (image, *example_landmarks(model, len(image)))


def example_pixels(model: EmbeddingModel, count: int) -> Tensor:
    """Return random uint8 images (N, H, W, 3) of the size that a model takes, the same at every call."""
    shape = (count, model.image_size, model.image_size, 3)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def example_landmarks(model: EmbeddingModel, count: int) -> tuple[Tensor, ...]:
    """Return the further inputs of a model: random landmarks (N, 5, 2), the same at every call, if it takes them."""
    if not model.takes_landmarks:
        return ()
    return (torch.rand(count, 5, 2, generator=torch.Generator().manual_seed(1)),)


# Kept: calibration and comparison ask for the same faces.
@lru_cache(maxsize=1)
def drawn_faces(size: int, count: int = 20) -> Tensor:
    """Return drawn faces of different people, uint8 (N, S, S, 3), the same at every call."""
    return decode_faces(
        [(f"drawn face {identity}", draw_jpeg(0, identity, 0, size)) for identity in range(count)], size
    )


def split_images(options: ExportOptions, size: int) -> tuple[Tensor, Tensor]:
    """Return images to calibrate an int8 file, and others to compare it on, uint8 (N, S, S, 3) both.

    All images calibrate if these are few, and the file is compared on drawn faces.
    """
    pixels = drawn_faces(size, _CALIBRATION_FACES) if options.images is None else options.images
    if len(pixels) < 2 * _COMPARED_SHARE:
        return pixels, drawn_faces(size, _MAX_COMPARED)
    # Spread over the images: a dataset lists one person after the other.
    is_compared = torch.arange(len(pixels)) % _COMPARED_SHARE == _COMPARED_SHARE // 2
    return pixels[~is_compared], pixels[is_compared][:_MAX_COMPARED]


def decode_faces(images: Sequence[tuple[str, bytes]], size: int) -> Tensor:
    """Return encoded images, each behind its place for messages, as uint8 (N, S, S, 3) RGB.

    Raises:
        ImageError: an image cannot be decoded; the message begins with its place.
    """
    decoded = [resize_square(decode_rgb(data, location=place), size) for place, data in images]
    return torch.from_numpy(np.stack(decoded))
