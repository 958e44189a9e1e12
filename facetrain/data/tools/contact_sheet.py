"""Sheets of images, written as PNG: of many identities, of one, and of what augmentation makes of them."""

# R rows   S a side in pixels

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.inspect import numbers_of
from facetrain.errors import DataError

if TYPE_CHECKING:
    from facetrain.data.augment import Augment


def identities_sheet(
    folder: Path, output: Path, *, rows: int = 8, columns: int = 8, size: int = 112, seed: int = 0
) -> None:
    """Draw one identity a row: chosen by the seed, with the first of their images.

    Raises:
        DataError: an image cannot be decoded, or the PNG not be written.
    """
    source = open_dataset(folder)
    chosen = permute(np.arange(min(rows, source.num_classes)), source.num_classes, key_of(seed))
    pictures = [np.flatnonzero(source.labels == identity)[:columns] for identity in chosen]
    _write([[_image(source, int(number), size) for number in row] for row in pictures], output, size)


def identity_sheet(folder: Path, identity: int, output: Path, *, columns: int = 8, size: int = 112) -> None:
    """Draw all images of one identity.

    Raises:
        DataError: there is no such identity, an image cannot be decoded, or the PNG not be written.
    """
    source = open_dataset(folder)
    images = [_image(source, number, size) for number in numbers_of(source, identity, folder).tolist()]
    _write([images[start : start + columns] for start in range(0, len(images), columns)], output, size)


def augmented_sheet(
    folder: Path,
    augment: Augment,
    output: Path,
    *,
    rows: int = 8,
    epochs: int = 7,
    size: int = 112,
    seed: int = 0,
) -> None:
    """Draw one image a row: as it is, and as the network sees it in the first epochs.

    Raises:
        DataError: an image cannot be decoded, or the PNG not be written.
    """
    import torch

    source = open_dataset(folder)
    number_R = permute(np.arange(min(rows, source.num_images)), source.num_images, key_of(seed))
    plain_RSSC = np.stack([_image(source, int(number), size) for number in number_R])
    drawn = [plain_RSSC]
    for epoch in range(epochs):
        seen_RCSS = augment(torch.from_numpy(plain_RSSC), torch.from_numpy(number_R), epoch)
        pixels = ((seen_RCSS + 1) * 127.5).round().clamp(0, 255).byte()
        drawn.append(pixels.permute(0, 2, 3, 1).numpy())
    _write([list(row) for row in zip(*drawn, strict=True)], output, size)


def write_png(image: np.ndarray, output: Path) -> None:
    """Write uint8 RGB (height, width, 3).

    Raises:
        DataError: the file cannot be written.
    """
    encoded = cv2.imencode(".png", image[:, :, ::-1])[1]
    try:
        output.write_bytes(encoded.tobytes())
    except OSError as error:
        raise DataError(f"{output}: {error.strerror or error}") from error


def _image(source: FaceDataset, number: int, size: int) -> np.ndarray:
    return resize_square(decode_rgb(source.read(number), location=source.location(number)), size)


def _write(rows: Sequence[Sequence[np.ndarray]], output: Path, size: int) -> None:
    sheet = np.full((len(rows) * size, max(map(len, rows)) * size, 3), 255, np.uint8)
    for top, row in enumerate(rows):
        for left, image in enumerate(row):
            sheet[top * size : (top + 1) * size, left * size : (left + 1) * size] = image
    write_png(sheet, output)
