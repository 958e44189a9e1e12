"""Conversion of a dataset of any format to RecordIO, with optional alignment of the faces."""

# N images

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, image_landmarks, image_name, skipped_files
from facetrain.data.formats.image_list import ListDataset
from facetrain.data.images.align import align, aligned_landmarks
from facetrain.data.images.decode import decode_rgb, encode_jpeg, is_upright_jpeg, resize_square
from facetrain.data.loading.sampler import permute
from facetrain.data.open_dataset import drop_small_identities, open_dataset
from facetrain.data.skipped_files import SkippedFile, skipped_table
from facetrain.data.tools.landmarks import LandmarkFinder, YuNet, require_distinct_names
from facetrain.data.tools.options import DEFAULT_PACK_OPTIONS, PackOptions
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.writing import Selection, WrittenDataset, write_into
from facetrain.errors import DataError, ImageError, UnreadableError
from facetrain.face_landmarks import normalize_landmarks
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress

SKIPPED_FILE = "skipped.csv"
"""Table of the files that were left out, in the folder of a packed dataset."""
_EXAMPLES = 3
"""Missing files that a message names."""


def pack(
    source_path: Path,
    output: Path,
    options: PackOptions = DEFAULT_PACK_OPTIONS,
    *,
    images: Path | None = None,
    landmarks: LandmarkFinder | None = None,
    workers: int | None = None,
    checking: ProgressCallback = ignore_progress,
    progress: ProgressCallback = ignore_progress,
) -> WrittenDataset:
    """Write a dataset of any format as train.rec, train.idx and property; the folder appears complete or not at all.

    Without alignment, an upright JPEG of the right size keeps its bytes. All other images are turned upright, resized
    and encoded. Identities keep their order and are numbered without gaps. Where the source has names, names.csv and
    identities.csv keep them; skipped.csv lists what was left out, and why. landmarks.npy has the landmarks of aligned
    images, otherwise the landmarks of the source.

    Args:
        source_path: the dataset.
        output: the folder to write; it must not exist.
        options: form of the images, and which images are written.
        images: folder that the paths of a list file are relative to; the folder of the list file if None.
        landmarks: if given, faces are aligned to ArcFace's template by their landmarks.
        workers: number of threads; one per usable core if None.
        checking: with `skip_bad`, called after every image that is checked, before the first one is written.
        progress: called after every image that is written.

    Raises:
        DataError: the dataset cannot be read, no image is good, two images have one name in a list of landmarks, or
            the output exists or cannot be written.
        ImageError: an image cannot be read or has no landmarks, and `skip_bad` is false.
    """
    source = open_dataset(source_path, root=images)
    require_distinct_names(landmarks, source.num_images, partial(image_name, source), source.location)
    prepared = _PreparedImages(source, options.image_size, options.quality, landmarks)
    skipped = list(skipped_files(source))
    numbers = _large_identities(source, source_path, options.min_images, skipped)
    with new_folder(output) as scratch:
        if options.skip_bad:
            numbers = _good_images(prepared, numbers, workers, checking, skipped)
        elif isinstance(source, ListDataset):
            _require_files(source, source_path)
        if options.shuffle:
            numbers = numbers[permute(np.arange(len(numbers)), len(numbers), key=options.seed)]
        selection = Selection(
            source, numbers, source.labels[numbers], prepared.encoded, prepared.landmarks_N52
        )
        written = write_into(scratch, selection, output, [source_path], workers=workers, progress=progress)
        if skipped:
            (scratch / SKIPPED_FILE).write_text(skipped_table(skipped), encoding="utf-8")
    return replace(written, skipped=skipped)


def _require_files(source: FaceDataset, path: Path) -> None:
    """Check that the files of a list exist: all that are missing are reported at once, before any is read.

    Raises:
        ImageError: files do not exist.
    """
    missing = [number for number in range(source.num_images) if not os.path.exists(source.location(number))]
    if missing:
        examples = ", ".join(source.location(number) for number in missing[:_EXAMPLES])
        raise ImageError(
            f"{path}: {len(missing):,} of its {source.num_images:,} files do not exist ({examples}"
            f"{', …' if len(missing) > _EXAMPLES else ''}); give the folder of the paths with --images, or leave out "
            "such images with --skip-bad"
        )


def _large_identities(
    source: FaceDataset, path: Path, min_images: int, skipped: list[SkippedFile]
) -> np.ndarray:
    """Return the numbers of the images of identities with enough images, int64; add the others to `skipped`."""
    drop_small_identities(source, path, min_images)  # raises an error if no identity is left
    _, row, counts = np.unique(source.labels, return_inverse=True, return_counts=True)
    is_small = counts[row] < min_images
    for number in np.flatnonzero(is_small).tolist():
        label = int(source.labels[number])
        reason = (
            f"identity {identity_name(source, label)} has {counts[row[number]]:,} of {min_images:,} images"
        )
        skipped.append(SkippedFile(_name(source, number), "small_identity", reason))
    return np.flatnonzero(~is_small)


def _name(source: FaceDataset, number: int) -> str:
    """Return the name of an image that is left out; its number if the name is damaged like the image."""
    with contextlib.suppress(DataError):
        return image_name(source, number)
    return str(number)


class _PreparedImages:
    """Images of a dataset, aligned or resized, and encoded."""

    def __init__(
        self, source: FaceDataset, size: int, quality: int, find_landmarks: LandmarkFinder | None
    ) -> None:
        self._source, self._size, self._quality, self._find_landmarks = source, size, quality, find_landmarks
        # Kept from the check of an image to its alignment: detection takes longer than everything else.
        count = source.num_images if find_landmarks else 0
        self._points_N52 = np.full((count, 5, 2), np.nan, np.float32)
        self.landmarks_N52 = image_landmarks(source) if find_landmarks is None else self._points_N52.copy()
        """Landmarks of the images that have been encoded, as fractions of their sides; None: they have none."""

    def fault(self, number: int) -> SkippedFile | None:
        """Return the reason why an image cannot be written, or None."""
        try:
            self._decode(number)
        except UnreadableError as error:
            kind = "no_face" if isinstance(error, _NoFaceError) else "unreadable"
            return SkippedFile(_name(self._source, number), kind, str(error))
        return None

    def encoded(self, number: int) -> bytes:
        """Return an image as it is to be written."""
        try:
            data, image = self._decode(number)
        except UnreadableError as error:
            raise ImageError(f"{error}; leave out such images with --skip-bad") from error
        if self._find_landmarks is not None:
            points = self._points_N52[number]
            assert self.landmarks_N52 is not None, "made with the finder"
            self.landmarks_N52[number] = normalize_landmarks(
                aligned_landmarks(points, self._size), self._size, self._size
            )
            return encode_jpeg(align(image, points, self._size), self._quality)
        if image.shape[:2] == (self._size, self._size) and is_upright_jpeg(data):
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
                is_detector = isinstance(self._find_landmarks, YuNet)
                reason = "the detector finds no face" if is_detector else f"no landmarks for {name!r}"
                raise _NoFaceError(f"{self._source.location(number)}: {reason}")
            self._points_N52[number] = points
        return data, image


class _NoFaceError(ImageError):
    """An image has no landmarks."""


def _good_images(
    prepared: _PreparedImages,
    numbers: np.ndarray,
    workers: int | None,
    progress: ProgressCallback,
    skipped: list[SkippedFile],
) -> np.ndarray:
    """Return the numbers of the images without faults, int64; add the others to `skipped`."""
    good = np.ones(len(numbers), bool)
    checked = map_in_order(prepared.fault, numbers.tolist(), workers)
    faults: Iterator[SkippedFile | None] = report_progress(checked, len(numbers), progress)
    first = ""
    for row, fault in enumerate(faults):
        if fault is not None:
            good[row] = False
            skipped.append(fault)
            first = first or fault.reason
    if not good.any():
        raise DataError(f"all {len(numbers):,} images have faults; the first is {first}")
    return numbers[good]
