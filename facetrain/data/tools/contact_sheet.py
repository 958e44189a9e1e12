"""Contact sheets as PNG or HTML: identities, images of one identity, label faults, augmented images, pairs."""

# R rows   S side in pixels   C channels

from __future__ import annotations

import re
import unicodedata
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cv2
import numpy as np

from facetrain.counter_rng import key_of
from facetrain.data.dataset import FaceDataset, identity_name, image_name
from facetrain.data.images.decode import decode_rgb, encode_jpeg, encode_png, resize_square
from facetrain.data.loading.sampler import permute
from facetrain.data.tools.label_faults import MIXED_IDENTITY, LabelFault
from facetrain.errors import DataError
from facetrain.files import os_errors_as
from facetrain.html_page import escape, html_page

if TYPE_CHECKING:
    from facetrain.data.images.augment import Augment

Row = tuple[str, Sequence[np.ndarray]]
"""Line of text, and the images below it, uint8 RGB (S, S, 3)."""
LABEL_HEIGHT = 16
"""Pixels of the line of text above a row of images."""
_SIDE = 112
"""Pixels a side of an image."""
_IDENTITIES, _EPOCHS = 8, 7
_SHOWN_MEMBERS = 3
"""Images of an identity that a row of `write_fault_sheet` shows."""
_TEXT_COLUMNS = 7
"""Images whose width is enough for the text of two identities and an image."""
_HTML_SUFFIXES = (".html", ".htm")
_FONT, _FONT_SCALE = cv2.FONT_HERSHEY_SIMPLEX, 0.4


def write_identities_sheet(source: FaceDataset, output: Path, *, columns: int = 8) -> None:
    """Write one row for each of eight identities: its name, the number of its images, and the first of them.

    Raises:
        DataError: an image cannot be decoded, or the file cannot be written; so do the functions below.
    """
    _write_rows(identity_rows(source, columns), output)


def identity_rows(source: FaceDataset, columns: int = 8) -> list[Row]:
    """Return the rows of `write_identities_sheet`."""
    count = source.num_classes
    rows: list[Row] = []
    for identity in permute(np.arange(min(_IDENTITIES, count)), count, key_of(0)).tolist():
        numbers = np.flatnonzero(source.labels == identity).tolist()
        rows.append((_title(source, identity, len(numbers)), _read(source, numbers[:columns])))
    return rows


def write_identity_sheet(
    source: FaceDataset, numbers: Sequence[int], output: Path, *, columns: int = 8
) -> None:
    """Write all images of one identity, given by their numbers; the first row has its name and their number."""
    images = _read(source, numbers)
    titles = [_title(source, int(source.labels[numbers[0]]), len(numbers)), *[""] * len(numbers)]
    starts = range(0, len(images), columns)
    _write_rows(
        [(title, images[start : start + columns]) for title, start in zip(titles, starts, strict=False)],
        output,
    )


def write_fault_sheet(
    source: FaceDataset, faults: Sequence[LabelFault], output: Path, *, rows: int = 100
) -> list[Path]:
    """Write one row per label fault, for a decision by eye: the images, images of its identity, of the other identity.

    The rows have the numbers of the decisions in the report. There is one page per `rows` faults: `output`, and
    further files with _2, _3, … after its name. The suffix .html gives pages with all names as text; others a PNG.

    Returns the files.
    """
    order = np.argsort(source.labels, kind="stable")
    sorted_label = source.labels[order]
    groups = {fault.target: fault.images for fault in faults if fault.kind == MIXED_IDENTITY}
    written = []
    for start in range(0, max(len(faults), 1), rows):
        page: list[Row] = []
        for number, fault in enumerate(faults[start : start + rows], start + 1):
            shown = list(fault.images[:_SHOWN_MEMBERS])
            for identity in (fault.identity, fault.other):
                if identity >= 0:
                    first, end = np.searchsorted(sorted_label, [identity, identity + 1])
                    members = order[first:end].tolist() if identity < source.num_classes else groups[identity]
                    shown += [image for image in members if image not in fault.images][:_SHOWN_MEMBERS]
            page.append((f"{fault.number or number}. {_fault_title(source, fault)}", _read(source, shown)))
        written.append(output if not start else output.with_stem(f"{output.stem}_{start // rows + 1}"))
        _write_rows(page or [("no faults", [])], written[-1], min_columns=_TEXT_COLUMNS)
    return written


def write_augmented_sheet(
    source: FaceDataset, augment: Augment, output: Path, *, size: int, epochs: int = _EPOCHS
) -> None:
    """Write one row for each of eight images: the image, then the network's input in the first epochs."""
    _write_rows(augmented_rows(source, augment, size=size, epochs=epochs), output)


def augmented_rows(source: FaceDataset, augment: Augment, *, size: int, epochs: int = _EPOCHS) -> list[Row]:
    """Return the rows of `write_augmented_sheet`."""
    import torch

    number_R = permute(np.arange(min(_IDENTITIES, source.num_images)), source.num_images, key_of(0))
    image_RSSC = np.stack(_read(source, number_R.tolist(), size))
    columns = [image_RSSC]
    for epoch in range(epochs):
        augmented_RCSS = augment(torch.from_numpy(image_RSSC), torch.from_numpy(number_R), epoch)
        pixels = ((augmented_RCSS + 1) * 127.5).round().clamp(0, 255).byte()  # undo the normalization
        columns.append(pixels.permute(0, 2, 3, 1).numpy())
    return [("", row) for row in zip(*columns, strict=True)]


def write_encoded_sheet(rows: Sequence[tuple[str, Sequence[bytes]]], output: Path) -> None:
    """Write rows of encoded images, each with its line of text."""
    decoded = [
        (title, [_cell(data, f"{output}: {title}", _SIDE) for data in images]) for title, images in rows
    ]
    _write_rows(decoded or [("no pairs", [])], output, min_columns=_TEXT_COLUMNS)


def identity_title(source: FaceDataset, identity: int) -> str:
    """Return the number and the name of an identity, or its number if it has no name."""
    name = identity_name(source, identity)
    return f"identity {identity}" + (f" ({name})" if name != str(identity) else "")


def _title(source: FaceDataset, identity: int, count: int) -> str:
    return f"{identity_title(source, identity)}: {count:,} images"


def _fault_title(source: FaceDataset, fault: LabelFault) -> str:
    title = f"{fault.kind}: {identity_title(source, fault.identity)}"
    if fault.other >= 0:
        title += f" | {identity_title(source, fault.other)}"
    if fault.images:
        more = "" if len(fault.images) == 1 else f" and {len(fault.images) - 1:,} more"
        title += f", image {image_name(source, fault.images[0])}{more}"
    return f"{title}, cosine {fault.similarity:.3f}"


def _read(source: FaceDataset, numbers: Sequence[int], size: int = _SIDE) -> list[np.ndarray]:
    return [_cell(source.read(number), source.location(number), size) for number in numbers]


def _cell(data: bytes, location: str, size: int) -> np.ndarray:
    return resize_square(decode_rgb(data, location=location), size)


def _write_rows(rows: Sequence[Row], output: Path, *, min_columns: int = 1) -> None:
    """Write rows of images of one size as HTML or PNG; there is no space for text if no row has any."""
    is_html = output.suffix.lower() in _HTML_SUFFIXES
    with os_errors_as(DataError, output):
        if is_html:
            output.write_text(html_page(output.stem, map(html_row, rows)), encoding="utf-8")
        else:
            output.write_bytes(encode_png(_draw(rows, min_columns)))


def html_row(row: Row) -> str:
    """Return a row of a sheet as HTML."""
    title, images = row
    encoded = (b64encode(encode_jpeg(image, 95)).decode() for image in images)
    shown = "".join(f'<figure><img alt="" src="data:image/jpeg;base64,{data}"></figure>' for data in encoded)
    return (f"<p>{escape(title)}</p>" if title else "") + f'<div class="pairs">{shown}</div>'


def _draw(rows: Sequence[Row], min_columns: int) -> np.ndarray:
    side = next((len(image) for _, images in rows for image in images), _SIDE)
    label_height = LABEL_HEIGHT if any(title for title, _ in rows) else 0
    columns = max(min_columns, *(len(images) for _, images in rows))
    sheet_RHWC = np.full((len(rows), label_height + side, columns * side, 3), 255, np.uint8)
    for strip, (title, images) in zip(sheet_RHWC, rows, strict=True):
        if title:
            _draw_text(strip[:label_height], title)
        if images:
            strip[label_height:, : len(images) * side] = np.concatenate(images, axis=1)
    return sheet_RHWC.reshape(-1, columns * side, 3)


def _draw_text(line: np.ndarray, text: str) -> None:
    """Write black text into a line of a sheet, (LABEL_HEIGHT, W, 3), in place."""
    plain = _ascii(text)
    width = cv2.getTextSize(plain, _FONT, _FONT_SCALE, 1)[0][0] + 8
    scale = _FONT_SCALE * min(1.0, line.shape[1] / width)
    cv2.putText(line, plain, (4, LABEL_HEIGHT - 4), _FONT, scale, (0, 0, 0), 1, cv2.LINE_AA)


def _ascii(text: str) -> str:
    """Return a text for OpenCV's vector fonts, which have ASCII only: é becomes e.

    Letters without an ASCII form become three dots: the numbers beside names identify them, and .html shows them.
    """
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return re.sub(r"[^\x00-\x7f]+", "...", plain)
