"""A dataset of any layout → RecordIO, its faces upright where their landmarks are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from facetrain.data.align import align
from facetrain.data.dataset import FaceDataset, image_name
from facetrain.data.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.open_dataset import open_dataset
from facetrain.data.sampler import permute
from facetrain.data.tools.landmarks import Finder
from facetrain.data.tools.parallel import Progress, counted, in_order, new_folder, silent
from facetrain.errors import DataError, ImageError


@dataclass(frozen=True)
class Packed:
    """What was written, and what was left out."""

    folder: Path
    identities: int
    images: int
    skipped: list[str]


def pack(
    source_path: Path,
    output: Path,
    *,
    images: Path | None = None,
    image_size: int = 112,
    quality: int = 95,
    min_images_per_identity: int = 1,
    landmarks: Finder | None = None,
    shuffle: bool = False,
    seed: int = 0,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: Progress = silent,
) -> Packed:
    """Write a dataset of any layout as train.rec, train.idx and property; the folder appears whole or not at all.

    An image that is a JPEG of the right size keeps its bytes; any other is brought to `image_size`
    and encoded with `quality`. Identities keep their order, and are numbered without gaps.

    Args:
        source_path: the dataset.
        output: where to.
        images: where the paths of a list file begin; its own folder if None.
        image_size: pixels a side.
        quality: of images that are encoded anew, 1 to 100.
        min_images_per_identity: leave out identities with fewer.
        landmarks: tells where a face's eyes, nose and mouth lie; faces are turned and cut out by them.
        shuffle: mix the images of all identities, as readers that shuffle only a little want them.
        seed: another one mixes otherwise.
        skip_bad: leave out images that cannot be decoded, or have no landmarks, and list them.
        workers: threads; one per core if None.
        progress: told after every image.

    Raises:
        DataError: there is nothing to pack, the output is there already or cannot be written, or an image is bad and
            bad ones are not to be skipped.
    """
    source = open_dataset(source_path, min_images_per_identity=min_images_per_identity, root=images)
    faces = _Faces(source, image_size, quality, landmarks)
    total = source.num_images * (2 if skip_bad else 1)
    with new_folder(output) as scratch:
        good, skipped = np.arange(source.num_images), list[str]()
        if skip_bad:
            good, skipped = _without_bad(faces, source.num_images, workers, total, progress)
        identity, label = np.unique(source.labels[good], return_inverse=True)
        order = permute(np.arange(len(good)), len(good), key=seed) if shuffle else np.arange(len(good))
        pictures = in_order(lambda row: (int(label[row]), faces.fitting(int(good[row]))), order, workers)
        told = counted(pictures, total, progress, done=total - len(good))
        write_identities(scratch, np.bincount(label).tolist(), told, image_size)
    return Packed(output, len(identity), len(good), skipped)


class _Faces:
    """The images of a source as they are to be written."""

    def __init__(self, source: FaceDataset, size: int, quality: int, find: Finder | None) -> None:
        self._source, self._size, self._quality, self._find = source, size, quality, find
        # Kept from the examination to the writing: finding a face takes longer than all else.
        self._points = np.full((source.num_images if find else 0, 5, 2), np.nan, np.float32)

    def fault(self, number: int) -> str | None:
        """Say what is wrong with an image."""
        try:
            self._seen(number)
        except ImageError as error:
            return str(error)
        return None

    def fitting(self, number: int) -> bytes:
        """Return an image of the right size, encoded."""
        data, image = self._seen(number)
        if self._find is not None:
            return encode_jpeg(align(image, self._points[number], self._size), self._quality)
        if image.shape[:2] == (self._size, self._size) and data[:2] == b"\xff\xd8":
            return data
        return encode_jpeg(resize_square(image, self._size), self._quality)

    def _seen(self, number: int) -> tuple[bytes, np.ndarray]:
        """Read and decode an image, and know where its face's landmarks lie."""
        data = self._source.read(number)
        image = decode_rgb(data, location=self._source.location(number))
        if self._find is not None and np.isnan(self._points[number, 0, 0]):
            name = image_name(self._source, number)
            found = self._find(name, image)
            if found is None:
                raise ImageError(f"{self._source.location(number)}: no landmarks of a face ({name})")
            self._points[number] = found
        return data, image


def _without_bad(
    faces: _Faces, count: int, workers: int | None, total: int, progress: Progress
) -> tuple[np.ndarray, list[str]]:
    """Return the numbers of the images that are good, int64, and what is wrong with the others."""
    good, skipped = np.ones(count, bool), []
    faults: Iterator[str | None] = counted(in_order(faces.fault, range(count), workers), total, progress)
    for number, said in enumerate(faults):
        if said is not None:
            good[number] = False
            skipped.append(said)
    if not good.any():
        raise DataError(f"none of the {count:,} images is good; the first: {skipped[0]}")
    return np.flatnonzero(good), skipped
