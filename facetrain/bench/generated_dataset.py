"""Dataset of generated JPEGs, for benchmarks without a dataset at hand."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cv2
import numpy as np

from facetrain.data.beside_dataset import TRAINING_SET
from facetrain.data.dataset import FaceDataset
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.images.decode import encode_jpeg
from facetrain.data.open_dataset import open_dataset

NUM_IMAGES = 4096
_IMAGES_PER_IDENTITY = 8
# A smooth image with noise of this strength, saved at this quality, has about 8 kB at 112 × 112 pixels. An
# aligned face saved at quality 95, as in MS1MV3, has the same size, so it takes as long to read and to decode.
_NOISE_STD = 10
_JPEG_QUALITY = 93


@contextmanager
def open_or_generate(
    folder: Path | None, *, image_size: int = 112, num_images: int = NUM_IMAGES
) -> Iterator[FaceDataset]:
    """Open the dataset in `folder`, or a temporary one of generated images, eight of each identity."""
    if folder is not None:
        yield open_dataset(folder)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_noise(Path(scratch), image_size, num_images)
        yield open_dataset(Path(scratch))


def write_noise(folder: Path, image_size: int, num_images: int = NUM_IMAGES) -> None:
    """Write generated images, eight of each identity."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(0)
    with RecordWriter(folder / TRAINING_SET) as writer:
        for key in range(num_images):
            coarse = random.integers(0, 256, (14, 14, 3), dtype=np.uint8)
            smooth = cv2.resize(coarse, (image_size, image_size))
            noisy = np.clip(smooth + random.normal(0, _NOISE_STD, smooth.shape), 0, 255).astype(np.uint8)
            header = RecordHeader.of_image(key // _IMAGES_PER_IDENTITY, key)
            writer.write(key, header, encode_jpeg(noisy, _JPEG_QUALITY))
