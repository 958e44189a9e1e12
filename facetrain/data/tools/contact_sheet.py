"""Contact sheets as PNG or HTML: identities, images of one identity, label faults, augmented images, pairs."""

# R rows   S side in pixels   C channels

from __future__ import annotations

import re
import unicodedata
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, identity_name, image_name
from facetrain.data.images.decode import decode_rgb, resize_square
from facetrain.data.loading.sampler import permute
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.inspect import image_numbers
from facetrain.data.tools.label_faults import MIXED_IDENTITY, LabelFault
from facetrain.errors import DataError
from facetrain.files import os_errors_as
from facetrain.html_page import escape, html_page

if TYPE_CHECKING:
    from facetrain.data.images.augment import Augment


LABEL_HEIGHT = 16
"""Pixels of the line of text above a row of images."""
_SHOWN_MEMBERS = 3
"""Images of an identity that a row of `write_fault_sheet` shows."""
_HTML_SUFFIXES = (".html", ".htm")
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
    folder: Path, faults: Sequence[LabelFault], output: Path, *, rows: int = 100, size: int = 112
) -> list[Path]:
    """Write one row per label fault, for a decision by eye: the images, images of its identity, of the other identity.

    The rows have the numbers of the decisions in the report. There is one page per `rows` faults: `output`, and
    further files with _2, _3, … after its name. The suffix .html gives pages with all names as text; others a PNG.

    Returns the files.

    Raises:
        DataError: an image cannot be decoded, or a file cannot be written.
    """
    source = open_dataset(folder)
    order = np.argsort(source.labels, kind="stable")
    sorted_label = source.labels[order]
    groups = {fault.target: fault.images for fault in faults if fault.kind == MIXED_IDENTITY}
    written = []
    for start in range(0, max(len(faults), 1), rows):
        grid, labels = [], []
        for number, fault in enumerate(faults[start : start + rows], start + 1):
            shown = list(fault.images[:_SHOWN_MEMBERS])
            for identity in (fault.identity, fault.other):
                if identity >= 0:
                    first, end = np.searchsorted(sorted_label, [identity, identity + 1])
                    members = order[first:end].tolist() if identity < source.num_classes else groups[identity]
                    shown += [image for image in members if image not in fault.images][:_SHOWN_MEMBERS]
            labels.append(f"{fault.number or number}. {_fault_title(source, fault)}")
            grid.append([_read(source, image, size) for image in shown])
        page = output if not start else output.with_stem(f"{output.stem}_{start // rows + 1}")
        _write_grid(grid or [[]], page, size, labels or ["no faults"], min_columns=1 + 2 * _SHOWN_MEMBERS)
        written.append(page)
    return written


def _fault_title(source: FaceDataset, fault: LabelFault) -> str:
    title = f"{fault.kind}: {identity_title(source, fault.identity)}"
    if fault.other >= 0:
        title += f" | {identity_title(source, fault.other)}"
    if fault.images:
        more = "" if len(fault.images) == 1 else f" and {len(fault.images) - 1:,} more"
        title += f", image {image_name(source, fault.images[0])}{more}"
    return f"{title}, cosine {fault.similarity:.3f}"


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
    labels: Sequence[str] = (),
    columns: int = 4,
    size: int = 112,
) -> None:
    """Write the two images of each pair next to each other.

    Args:
        pairs: numbers of the left and the right images.
        read_left: returns an encoded left image by its number.
        read_right: returns an encoded right image by its number.
        output: the PNG or HTML page to write.
        labels: a line of text per pair; each pair then has its own row.
        columns: pairs per row, without labels.
        size: pixels a side of each image.

    Raises:
        DataError: an image cannot be decoded, or the file cannot be written.
    """

    def decode(data: bytes, number: int) -> np.ndarray:
        return resize_square(decode_rgb(data, location=f"{output}: pair {number}"), size)

    decoded = [
        (decode(read_left(left), number), decode(read_right(right), number))
        for number, (left, right) in enumerate(pairs)
    ]
    if labels or output.suffix.lower() in _HTML_SUFFIXES:
        names = labels or [str(number) for number in range(1, len(pairs) + 1)]
        rows_of_images: list[Sequence[np.ndarray]] = [*decoded] or [[]]
        _write_grid(rows_of_images, output, size, names or ["no pairs"], min_columns=7)
        return
    gap = size // 8
    rows = -(-len(pairs) // columns)
    sheet = np.full((max(rows, 1) * (size + gap), columns * (2 * size + gap), 3), 255, np.uint8)
    for number, (left_image, right_image) in enumerate(decoded):
        top, start = number // columns * (size + gap), number % columns * (2 * size + gap)
        for column, image in ((start, left_image), (start + size, right_image)):
            sheet[top : top + size, column : column + size] = image
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
    if output.suffix.lower() in _HTML_SUFFIXES:
        _write_html(rows, output, labels)
        return
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


def _write_html(rows: Sequence[Sequence[np.ndarray]], output: Path, labels: Sequence[str]) -> None:
    """Write a self-contained page with the rows of images, each under its line of text."""
    body = []
    for number, row in enumerate(rows):
        images = (b64encode(cv2.imencode(".jpg", image[:, :, ::-1])[1].tobytes()).decode() for image in row)
        shown = "".join(
            f'<figure><img alt="" src="data:image/jpeg;base64,{image}"></figure>' for image in images
        )
        text = f"<p>{escape(labels[number])}</p>" if labels and labels[number] else ""
        body.append(f'{text}<div class="pairs">{shown}</div>')
    with os_errors_as(DataError, output):
        output.write_text(html_page(output.stem, body), encoding="utf-8")


def _write_text(line: np.ndarray, text: str) -> None:
    """Write black text into a line of a sheet, (LABEL_HEIGHT, W, 3), in place."""
    plain = _ascii(text)
    scale = _FONT_SCALE
    width = cv2.getTextSize(plain, _FONT, scale, 1)[0][0] + 8
    scale *= min(1.0, line.shape[1] / width)
    cv2.putText(line, plain, (4, LABEL_HEIGHT - 4), _FONT, scale, (0, 0, 0), 1, cv2.LINE_AA)


def _ascii(text: str) -> str:
    """Return a text for OpenCV's vector fonts, which have ASCII only: é becomes e.

    Letters without an ASCII form become three dots: the numbers beside names identify them, and .html shows them.
    """
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return re.sub(r"[^\x00-\x7f]+", "...", plain)


def _write_png(image: np.ndarray, output: Path) -> None:
    encoded = cv2.imencode(".png", image[:, :, ::-1])[1]
    with os_errors_as(DataError, output):
        output.write_bytes(encoded.tobytes())
