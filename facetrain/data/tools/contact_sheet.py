"""Contact sheets as PNG: identities, the images of one identity, label faults, augmented images, pairs of images."""

# R rows   S side in pixels   C channels

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, identity_name
from facetrain.data.decode import decode_rgb, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.inspect import image_numbers
from facetrain.errors import DataError
from facetrain.files import os_errors_as

if TYPE_CHECKING:
    from facetrain.data.augment import Augment
    from facetrain.data.tools.clean import LabelFault


LABEL_HEIGHT = 16
"""Pixels of the line of text above a row of images."""
_SHOWN_MEMBERS = 3
"""Images of an identity that a row of `write_fault_sheet` shows."""
_FONT, _FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.4


def write_identities_sheet(
    folder: Path, output: Path, *, rows: int = 8, columns: int = 8, size: int = 112, seed: int = 0
) -> None:
    """Write one row per identity with its first images, its name and their number; the seed selects the identities.

    Raises:
        DataError: an image cannot be decoded, or the PNG cannot be written.
    """
    source = open_dataset(folder)
    identities = permute(np.arange(min(rows, source.num_classes)), source.num_classes, key_of(seed))
    numbers = [np.flatnonzero(source.labels == identity) for identity in identities]
    labels = [
        f"{identity_title(source, int(identity))}: {len(row):,} images"
        for identity, row in zip(identities, numbers, strict=True)
    ]
    images = [[_read(source, int(number), size) for number in row[:columns]] for row in numbers]
    _write_grid(images, output, size, labels)


def write_identity_sheet(
    folder: Path, identity: int, output: Path, *, columns: int = 8, size: int = 112
) -> None:
    """Write all images of one identity; the first row has its name and their number.

    Raises:
        DataError: there is no such identity, an image cannot be decoded, or the PNG cannot be written.
    """
    source = open_dataset(folder)
    images = [_read(source, number, size) for number in image_numbers(source, identity, folder).tolist()]
    rows = [images[start : start + columns] for start in range(0, len(images), columns)]
    title = f"{identity_title(source, identity)}: {len(images):,} images"
    _write_grid(rows, output, size, [title, *[""] * (len(rows) - 1)])


def write_fault_sheet(
    folder: Path, faults: Sequence[LabelFault], output: Path, *, rows: int = 40, size: int = 112
) -> None:
    """Write one row per label fault, for a decision by eye: the image, images of its identity, of the other identity.

    Raises:
        DataError: an image cannot be decoded, or the PNG cannot be written.
    """
    source = open_dataset(folder)
    grid, labels = [], []
    for fault in faults[:rows]:
        title = identity_title(source, fault.identity)
        text = f"{fault.kind}: {title}" + (
            f" | {identity_title(source, fault.other)}" if fault.other >= 0 else ""
        )
        shown = [fault.image] if fault.image >= 0 else []
        for identity in (fault.identity, fault.other):
            if identity >= 0:
                members = np.flatnonzero(source.labels == identity)
                shown += [number for number in members.tolist() if number != fault.image][:_SHOWN_MEMBERS]
        labels.append(f"{text}, cosine {fault.similarity:.3f}")
        grid.append([_read(source, number, size) for number in shown])
    _write_grid(grid or [[]], output, size, labels or ["no faults"], min_columns=1 + 2 * _SHOWN_MEMBERS)


def identity_title(source: FaceDataset, identity: int) -> str:
    """Return the number and the name of an identity, or its number if it has no name."""
    name = identity_name(source, identity)
    return f"identity {identity}" + (f" ({name})" if name != str(identity) else "")


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


def _write_grid(
    rows: Sequence[Sequence[np.ndarray]],
    output: Path,
    size: int,
    labels: Sequence[str] = (),
    *,
    min_columns: int = 1,
) -> None:
    """Write rows of images, (size, size, 3) each, with a line of text above each row if there are labels."""
    top_label = LABEL_HEIGHT if labels else 0
    height, width = top_label + size, max(min_columns, *map(len, rows), 1) * size
    sheet = np.full((len(rows) * height, width, 3), 255, np.uint8)
    for number, row in enumerate(rows):
        top = number * height
        if labels:
            _write_text(sheet[top : top + LABEL_HEIGHT], labels[number])
        for left, image in enumerate(row):
            sheet[top + top_label : top + height, left * size : (left + 1) * size] = image
    _write_png(sheet, output)


def _write_text(line: np.ndarray, text: str) -> None:
    """Write black text into a line of a sheet, (LABEL_HEIGHT, W, 3), in place."""
    # OpenCV's vector fonts have ASCII only: é becomes e, and other characters a question mark.
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    plain = plain.encode("ascii", "replace").decode()
    scale = _FONT_SCALE
    width = cv2.getTextSize(plain, _FONT, scale, 1)[0][0] + 8
    scale *= min(1.0, line.shape[1] / width)
    cv2.putText(line, plain, (4, LABEL_HEIGHT - 4), _FONT, scale, (0, 0, 0), 1, cv2.LINE_AA)


def _write_png(image: np.ndarray, output: Path) -> None:
    encoded = cv2.imencode(".png", image[:, :, ::-1])[1]
    with os_errors_as(DataError, output):
        output.write_bytes(encoded.tobytes())
