"""Conversion of a dataset to a folder of image files per identity."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, original_name
from facetrain.data.dataset_card import carry_cards
from facetrain.data.images.header import IMAGE_SUFFIXES, read_header, suffix_of
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.rewrite import WrittenDataset
from facetrain.data.unique_names import unique_name
from facetrain.errors import ImageError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress

_FORBIDDEN = re.compile(r"[/\\\x00-\x1f]|^\s+|\s+$")
"""Characters of a name that would lead out of its folder, and those around it, which lists of paths ignore."""


def unpack(
    folder: Path,
    output: Path,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write every image, its bytes unchanged, as OUTPUT/identity/name.

    The names are those of the files that were packed, with the suffix of the format that they have now. Without names,
    they are numbers with leading zeros, so that the order of the names is the order of the dataset. `progress` is
    called after every image.

    Raises:
        ImageError: an image has an unknown format, and its name has no suffix of an image.
        DataError: the dataset cannot be read, or the output cannot be written.
    """
    source = open_dataset(folder)
    number_digits = len(str(source.num_images - 1))
    folder_of, taken = identity_folders(source), set[str]()

    def stem(number: int) -> str:
        original = original_name(source, number)
        digits = f"{number:0{number_digits}d}"
        folder = folder_of[int(source.labels[number])]
        if original is None:
            return unique_name(f"{folder}/{digits}", "", digits, taken) if is_named else f"{folder}/{digits}"
        file = name_inside(original.rpartition("/")[2])
        return unique_name(f"{folder}/{Path(file).stem}", "", digits, taken)

    def write(number: int) -> None:
        data = source.read(number)
        name = stems[number] if stems else stem(number)
        (scratch / (name + _suffix(source, number, data))).write_bytes(data)

    # Names are distributed in the order of the dataset; numbers need no table.
    is_named = any(original_name(source, number) is not None for number in range(source.num_images))
    stems = [stem(number) for number in range(source.num_images)] if is_named else []
    # The threads end before the temporary folder is removed: a late write would fail, or leave a file behind.
    with (
        new_folder(output) as scratch,
        closing(map_in_order(write, range(source.num_images), workers)) as written,
    ):
        for name in folder_of.values():
            (scratch / name).mkdir()
        for _ in report_progress(written, source.num_images, progress):
            pass
        carry_cards([folder], output, scratch, (len(folder_of), source.num_images))
    return WrittenDataset(str(output), len(folder_of), source.num_images)


def identity_folders(source: FaceDataset) -> dict[int, str]:
    """Return a folder name for each identity with images: its name, or its number.

    The numbers have leading zeros if all identities are numbers, so that the order of the names is that of the labels.
    """
    name_of = {label: identity_name(source, label) for label in np.unique(source.labels).tolist()}
    is_numbered = all(name == str(label) for label, name in name_of.items())
    digits, taken = len(str(source.num_classes - 1)), set[str]()
    folder_of: dict[int, str] = {}
    for label, name in name_of.items():
        # One name alone that is equal to the label may be the real one: folders 0, 1, 10, 2 have the labels 0 to 3.
        folder = f"{label:0{digits}d}" if is_numbered else name_inside(name)
        folder_of[label] = unique_name(folder, "", label, taken)
    return folder_of


def _suffix(source: FaceDataset, number: int, data: bytes) -> str:
    """Return the original suffix if the format has not changed or is unknown, otherwise that of the format."""
    original = Path(original_name(source, number) or "").suffix
    if read_header(data) is None and original.lower() in IMAGE_SUFFIXES:
        return original
    suffix = image_suffix(source, number, data)
    is_jpeg = original.lower() in (".jpeg", ".jpe", ".jfif")
    return original if original.lower() == suffix or (suffix == ".jpg" and is_jpeg) else suffix


def image_suffix(source: FaceDataset, number: int, data: bytes) -> str:
    """Return the suffix for the format of an image.

    Raises:
        ImageError: the format is unknown: no reader would take a file without the suffix of an image for one.
    """
    if read_header(data) is None:
        raise ImageError(
            f"{source.location(number)}: neither the name nor the bytes are those of an image; leave out such images "
            "with `facetrain data check DATASET --repair DIR`"
        )
    return suffix_of(data)


def name_inside(name: str) -> str:
    """Return a name without outer white space and characters that lead out of its folder: it comes from anywhere."""
    name = _FORBIDDEN.sub(lambda found: "_" * len(found[0]), name)
    return f"_{name}" if not name or name.startswith(".") else name
