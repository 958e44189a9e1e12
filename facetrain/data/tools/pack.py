"""A folder per identity → RecordIO."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.dataset import open_source
from facetrain.data.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.data.order import permute
from facetrain.data.records import write_identities
from facetrain.data.source import FaceSource
from facetrain.data.tools.work import Progress, counted, in_order, new_folder, silent
from facetrain.errors import DataError, ImageError


@dataclass(frozen=True)
class Packed:
    """What was written, and what was left out."""

    folder: Path
    identities: int
    images: int
    skipped: list[str]


def pack(
    source_folder: Path,
    output: Path,
    *,
    image_size: int = 112,
    quality: int = 95,
    min_images_per_identity: int = 1,
    shuffle: bool = False,
    seed: int = 0,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: Progress = silent,
) -> Packed:
    """Write a dataset of any layout as train.rec, train.idx and property; the folder appears whole or not at all.

    A picture that is a JPEG of the right size keeps its bytes; any other is brought to `image_size`
    and encoded with `quality`. Identities keep their order, and are numbered without gaps. With
    `shuffle` the images are mixed, as readers that shuffle only a little want them.

    Raises:
        DataError: there is nothing to pack, the output is there already or cannot be written, or a picture cannot be
            decoded and bad ones are not to be skipped.
    """
    source = open_source(source_folder, min_images_per_identity=min_images_per_identity)
    with new_folder(output) as scratch:
        good, skipped = _without_bad(source, workers, skip=skip_bad)
        identity, label = np.unique(source.labels[good], return_inverse=True)
        numbers = np.arange(len(good))
        if shuffle:
            numbers = permute(numbers, len(good), key=seed)
        pictures = in_order(
            lambda number: (int(label[number]), _fitting(source, int(good[number]), image_size, quality)),
            numbers,
            workers,
        )
        told = counted(pictures, len(good), progress)
        write_identities(scratch, np.bincount(label).tolist(), told, image_size)
    return Packed(output, len(identity), len(good), skipped)


def _fitting(source: FaceSource, number: int, size: int, quality: int) -> bytes:
    data = source.read(number)
    image = decode_rgb(data, where=source.where(number))
    if image.shape[:2] == (size, size) and data[:2] == b"\xff\xd8":
        return data
    return encode_jpeg(resize_square(image, size), quality)


def _without_bad(source: FaceSource, workers: int | None, *, skip: bool) -> tuple[np.ndarray, list[str]]:
    """Return the numbers of the pictures that decode, int64, and what is wrong with the others."""
    if not skip:
        return np.arange(source.num_images), []

    def fault(number: int) -> str | None:
        try:
            decode_rgb(source.read(number), where=source.where(number))
        except ImageError as error:
            return str(error)
        return None

    faults = list(in_order(fault, range(source.num_images), workers))
    good = np.flatnonzero([said is None for said in faults])
    if not len(good):
        raise DataError(f"none of the {source.num_images:,} pictures can be decoded; the first: {faults[0]}")
    return good, [said for said in faults if said is not None]
