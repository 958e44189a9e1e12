"""Conversion of a dataset of any format to RecordIO, with optional alignment of the faces."""

# N images

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
from facetrain.data.tools.landmarks import LandmarkFinder
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import DataError, ImageError
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class PackResult:
    """Folder and size of a dataset that was written, and the images that were left out."""

    folder: Path
    identities: int
    images: int
    skipped: list[str]
    """One message per image that was left out."""


def pack(
    source_path: Path,
    output: Path,
    *,
    images: Path | None = None,
    image_size: int = 112,
    quality: int = 95,
    min_images_per_identity: int = 1,
    landmarks: LandmarkFinder | None = None,
    shuffle: bool = False,
    seed: int = 0,
    skip_bad: bool = False,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> PackResult:
    """Write a dataset of any format as train.rec, train.idx and property; the folder appears complete or not at all.

    Without alignment, a JPEG of the right size keeps its bytes. All other images are resized to `image_size` and
    encoded with `quality`. Identities keep their order and are numbered without gaps.

    Args:
        source_path: the dataset.
        output: the folder to write; it must not exist.
        images: folder that the paths of a list file are relative to; the folder of the list file if None.
        image_size: pixels a side.
        quality: JPEG quality of encoded images, 1 to 100.
        min_images_per_identity: identities with fewer images are left out.
        landmarks: if given, faces are aligned to ArcFace's template by their landmarks.
        shuffle: write the images in random order, for readers that read a file from start to end.
        seed: seed of the order.
        skip_bad: leave out images that cannot be decoded or have no landmarks. Every image is then read twice.
        workers: number of threads; one per usable core if None.
        progress: called after every image that is read.

    Raises:
        DataError: the dataset cannot be read, no image is good, or the output exists or cannot be written.
        ImageError: an image cannot be decoded or has no landmarks, and `skip_bad` is false.
    """
    source = open_dataset(source_path, min_images_per_identity=min_images_per_identity, root=images)
    prepared = _PreparedImages(source, image_size, quality, landmarks)
    total = source.num_images * (2 if skip_bad else 1)
    with new_folder(output) as scratch:
        good, skipped = np.arange(source.num_images), list[str]()
        if skip_bad:
            good, skipped = _good_images(prepared, source.num_images, workers, total, progress)
        identity, label = np.unique(source.labels[good], return_inverse=True)
        order = permute(np.arange(len(good)), len(good), key=seed) if shuffle else np.arange(len(good))
        labeled = map_in_order(
            lambda row: (int(label[row]), prepared.encoded(int(good[row]))), order, workers
        )
        labeled_progress = report_progress(labeled, total, progress, done=total - len(good))
        write_identities(scratch, np.bincount(label).tolist(), labeled_progress, image_size)
    return PackResult(output, len(identity), len(good), skipped)


class _PreparedImages:
    """Images of a dataset, aligned or resized, and encoded."""

    def __init__(
        self, source: FaceDataset, size: int, quality: int, find_landmarks: LandmarkFinder | None
    ) -> None:
        self._source, self._size, self._quality, self._find_landmarks = source, size, quality, find_landmarks
        # Kept from the check of an image to its alignment: detection takes longer than everything else.
        count = source.num_images if find_landmarks else 0
        self._points_N52 = np.full((count, 5, 2), np.nan, np.float32)

    def fault(self, number: int) -> str | None:
        """Return the reason why an image cannot be written, or None."""
        try:
            self._decode(number)
        except ImageError as error:
            return str(error)
        return None

    def encoded(self, number: int) -> bytes:
        """Return an image as it is to be written."""
        data, image = self._decode(number)
        if self._find_landmarks is not None:
            return encode_jpeg(align(image, self._points_N52[number], self._size), self._quality)
        if image.shape[:2] == (self._size, self._size) and data[:2] == b"\xff\xd8":
            return data
        return encode_jpeg(resize_square(image, self._size), self._quality)

    def _decode(self, number: int) -> tuple[bytes, np.ndarray]:
        """Read and decode an image, and find its landmarks if the images are aligned."""
        data = self._source.read(number)
        image = decode_rgb(data, location=self._source.location(number))
        if self._find_landmarks is not None and np.isnan(self._points_N52[number, 0, 0]):
            name = image_name(self._source, number)
            points = self._find_landmarks(name, image)
            if points is None:
                raise ImageError(f"{self._source.location(number)}: no landmarks for {name!r}")
            self._points_N52[number] = points
        return data, image


def _good_images(
    prepared: _PreparedImages, count: int, workers: int | None, total: int, progress: ProgressCallback
) -> tuple[np.ndarray, list[str]]:
    """Return the numbers of the images without faults, int64, and the faults of the others."""
    good, skipped = np.ones(count, bool), []
    checked = map_in_order(prepared.fault, range(count), workers)
    faults: Iterator[str | None] = report_progress(checked, total, progress)
    for number, fault in enumerate(faults):
        if fault is not None:
            good[number] = False
            skipped.append(fault)
    if not good.any():
        raise DataError(f"all {count:,} images have faults; the first is {skipped[0]}")
    return np.flatnonzero(good), skipped
