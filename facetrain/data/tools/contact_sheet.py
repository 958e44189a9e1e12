"""Contact sheets, which are HTML pages: identities, images of one identity, wrong labels, augmented images, pairs."""

# R images   S side in pixels   C channels

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from facetrain.data.dataset import FaceDataset
from facetrain.data.images.decode import decode_rgb, encode_jpeg, encode_png, resize_square
from facetrain.data.loading.sampler import sample_numbers
from facetrain.data.tools.wrong_labels import WrongLabel
from facetrain.distinct import distinct
from facetrain.errors import DataError
from facetrain.files import os_errors_as, replacing, write_atomically
from facetrain.pages.render import jpeg_image, render
from facetrain.text import count_text

if TYPE_CHECKING:
    from torch import Tensor


Row = tuple[str, Sequence[np.ndarray]]
"""Line of text, and the images below it, uint8 RGB (S, S, 3)."""
_SIDE = 112
"""Pixels a side of an image."""
_MOST_IMAGES, _MOST_OF_IDENTITY = 1000, 100
"""Images of a page of identities, 6 kB each, and of one identity."""
_BATCH_IMAGES, _BATCH_COLUMNS = 32, 8
"""Images of `write_batch_sheet`, and images in a row of it."""
_MOST_FAULTS = 1000
"""Rows of a page of wrong labels: a browser still opens its 30 MB."""
_SHOWN_MEMBERS = 3
"""Images of an identity that a row of `write_wrong_labels_sheet` shows."""


def write_identities_sheet(source: FaceDataset, output: Path) -> None:
    """Write one row for each identity: its name, the number of its images, and the images; at most 1,000 images.

    Raises:
        DataError: an image cannot be decoded, or the file cannot be written; so do the functions below.
    """
    rows = identity_rows(source)
    _write_rows(rows, output, shown_of(rows, source))


def identity_rows(source: FaceDataset) -> list[Row]:
    """Return title and images of all identities, or of as many, in a random order, as 1,000 images show."""
    identities, left = distinct(source.labels), _MOST_IMAGES  # a label may have no image
    rows: list[Row] = []
    for identity in identities[sample_numbers(len(identities), len(identities))].tolist():
        numbers = np.flatnonzero(source.labels == identity).tolist()
        shown = numbers[: min(left, _MOST_OF_IDENTITY)]
        title = f"{_identity_title(source, identity)}: {count_text(len(numbers), 'image')}"
        rows.append((title, _read(source, shown)))
        left -= len(shown)
        if left <= 0:
            break
    return rows


def shown_of(rows: Sequence[Row], source: FaceDataset) -> str:
    """Return which part of a dataset rows show; empty if all of it."""
    images = sum(len(images) for _, images in rows)
    if images == len(source.labels):
        return ""
    return (
        f"{images:,} of {len(source.labels):,} images, of {len(rows):,} of {source.num_classes:,} identities"
    )


def write_wrong_labels_sheet(source: FaceDataset, wrong: Sequence[WrongLabel], output: Path) -> None:
    """Write one row per wrong label, for a decision by eye: the image, images of its identity and of the other one.

    The rows have the numbers of the decisions in the report. Of more than 1,000 the page has the first ones.
    """
    order = np.argsort(source.labels, kind="stable")
    sorted_label = source.labels[order]
    rows: list[Row] = []
    for number, one in enumerate(wrong[:_MOST_FAULTS], 1):
        shown = [one.image]
        for identity in (one.identity, one.target):
            first, end = np.searchsorted(sorted_label, [identity, identity + 1])
            shown += [image for image in order[first:end].tolist() if image != one.image][:_SHOWN_MEMBERS]
        other = _identity_title(source, one.target) if one.target >= 0 else "nobody here"
        title = f"{number}. image {source.image_name(one.image)} of {_identity_title(source, one.identity)}"
        rows.append((f"{title} shows {other}, cosine {one.similarity:.3f}", _read(source, shown)))
    _write_rows(rows or [("no wrong labels", [])], output)


def write_batch_sheet(image_BCSS: Tensor, output: Path) -> None:
    """Write the first images of a batch of network inputs, (B, 3, S, S), as rows of a PNG file.

    Raises:
        DataError: the file cannot be written.
    """
    # Undo the normalization.
    pixel_BCSS = ((image_BCSS[:_BATCH_IMAGES].float() + 1) * 127.5).round().clamp(0, 255).byte()
    cell_BSSC = pixel_BCSS.permute(0, 2, 3, 1).cpu().numpy()
    side, columns = cell_BSSC.shape[1], min(len(cell_BSSC), _BATCH_COLUMNS)
    missing = -len(cell_BSSC) % columns
    cell_BSSC = np.pad(cell_BSSC, ((0, missing), (0, 0), (0, 0), (0, 0)), constant_values=255)
    row_RKSSC = cell_BSSC.reshape(-1, columns, side, side, 3)
    sheet = row_RKSSC.swapaxes(1, 2).reshape(-1, columns * side, 3)
    with os_errors_as(DataError, output), replacing(output) as scratch:
        scratch.write_bytes(encode_png(sheet))


def write_encoded_sheet(rows: Sequence[tuple[str, Sequence[bytes]]], output: Path) -> None:
    """Write rows of encoded images, each with its line of text."""
    decoded = [(title, [_cell(data, f"{output}: {title}") for data in images]) for title, images in rows]
    _write_rows(decoded, output)


def _identity_title(source: FaceDataset, identity: int) -> str:
    name = source.identity_name(identity)
    return f"identity {identity}" + (f" ({name})" if name != str(identity) else "")


def _read(source: FaceDataset, numbers: Sequence[int]) -> list[np.ndarray]:
    return [_cell(source.read(number), source.location(number)) for number in numbers]


def _cell(data: bytes, location: str) -> np.ndarray:
    return resize_square(decode_rgb(data, location=location), _SIDE)


def _write_rows(rows: Sequence[Row], output: Path, note: str = "") -> None:
    with os_errors_as(DataError, output):
        page = render("data/tools/sheet.html.j2", title=output.stem, note=note, rows=html_rows(rows))
        write_atomically(output, page)


def html_rows(rows: Sequence[Row]) -> list[tuple[str, list[Markup]]]:
    """Return the rows of a sheet for a template."""
    return [(title, [jpeg_image(encode_jpeg(pixels, 95)) for pixels in images]) for title, images in rows]
