"""Contact sheets as PNG: identities, the images of one identity, augmented images, pairs of images."""

# R rows   S side in pixels   C channels

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.inspect import image_numbers
from facetrain.errors import DataError
from facetrain.files import os_errors_as

if TYPE_CHECKING:
    from facetrain.data.augment import Augment


def write_identities_sheet(
    folder: Path, output: Path, *, rows: int = 8, columns: int = 8, size: int = 112, seed: int = 0
) -> None:
    """Write one row per identity with its first images; the seed selects the identities.

    Raises:
        DataError: an image cannot be decoded, or the PNG cannot be written.
    """
    source = open_dataset(folder)
    identities = permute(np.arange(min(rows, source.num_classes)), source.num_classes, key_of(seed))
    number_rows = [np.flatnonzero(source.labels == identity)[:columns] for identity in identities]
    _write_grid([[_read(source, int(number), size) for number in row] for row in number_rows], output, size)


def write_identity_sheet(
    folder: Path, identity: int, output: Path, *, columns: int = 8, size: int = 112
) -> None:
    """Write all images of one identity.

    Raises:
        DataError: there is no such identity, an image cannot be decoded, or the PNG cannot be written.
    """
    source = open_dataset(folder)
    images = [_read(source, number, size) for number in image_numbers(source, identity, folder).tolist()]
    _write_grid([images[start : start + columns] for start in range(0, len(images), columns)], output, size)


def write_augmented_sheet(
    folder: Path,
    augment: Augment,
    output: Path,
    *,
    rows: int = 8,
    epochs: int = 7,
    size: int = 112,
    seed: int = 0,
) -> None:
    """Write one row per image: the image, then the network's input in the first epochs.

    Raises:
        DataError: an image cannot be decoded, or the PNG cannot be written.
    """
    import torch

    source = open_dataset(folder)
    number_R = permute(np.arange(min(rows, source.num_images)), source.num_images, key_of(seed))
    image_RSSC = np.stack([_read(source, int(number), size) for number in number_R])
    columns = [image_RSSC]
    for epoch in range(epochs):
        augmented_RCSS = augment(torch.from_numpy(image_RSSC), torch.from_numpy(number_R), epoch)
        pixels = ((augmented_RCSS + 1) * 127.5).round().clamp(0, 255).byte()  # undo the normalization
        columns.append(pixels.permute(0, 2, 3, 1).numpy())
    _write_grid([list(row) for row in zip(*columns, strict=True)], output, size)


def write_pair_sheet(
    pairs: Sequence[tuple[int, int]],
    read_left: Callable[[int], bytes],
    read_right: Callable[[int], bytes],
    output: Path,
    *,
    columns: int = 4,
    size: int = 112,
) -> None:
    """Write the two images of each pair next to each other.

    Args:
        pairs: numbers of the left and the right images.
        read_left: returns an encoded left image by its number.
        read_right: returns an encoded right image by its number.
        output: the PNG to write.
        columns: pairs per row.
        size: pixels a side of each image.

    Raises:
        DataError: an image cannot be decoded, or the PNG cannot be written.
    """
    gap = size // 8
    rows = -(-len(pairs) // columns)
    sheet = np.full((max(rows, 1) * (size + gap), columns * (2 * size + gap), 3), 255, np.uint8)
    for number, (left, right) in enumerate(pairs):
        top, start = number // columns * (size + gap), number % columns * (2 * size + gap)
        for column, data in ((start, read_left(left)), (start + size, read_right(right))):
            image = decode_rgb(data, location=f"{output}: pair {number}")
            sheet[top : top + size, column : column + size] = resize_square(image, size)
    _write_png(sheet, output)


def _read(source: FaceDataset, number: int, size: int) -> np.ndarray:
    return resize_square(decode_rgb(source.read(number), location=source.location(number)), size)


def _write_grid(rows: Sequence[Sequence[np.ndarray]], output: Path, size: int) -> None:
    sheet = np.full((len(rows) * size, max(map(len, rows)) * size, 3), 255, np.uint8)
    for top, row in enumerate(rows):
        for left, image in enumerate(row):
            sheet[top * size : (top + 1) * size, left * size : (left + 1) * size] = image
    _write_png(sheet, output)


def _write_png(image: np.ndarray, output: Path) -> None:
    encoded = cv2.imencode(".png", image[:, :, ::-1])[1]
    with os_errors_as(DataError, output):
        output.write_bytes(encoded.tobytes())
