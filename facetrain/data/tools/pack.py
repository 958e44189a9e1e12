"""Conversion of a dataset of any format to RecordIO, with optional alignment of the faces."""

# N images

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset, identity_name, image_landmarks, image_name, skipped_files
from facetrain.data.dataset_card import ImageDigest, carry_cards
from facetrain.data.formats.image_list import ListDataset
from facetrain.data.formats.landmark_file import LANDMARKS_FILE, write_landmarks
from facetrain.data.formats.record_names import write_names
from facetrain.data.formats.record_writer import write_identities
from facetrain.data.images.align import align, aligned_landmarks
from facetrain.data.images.decode import decode_rgb, encode_jpeg, is_upright_jpeg, resize_square
from facetrain.data.loading.sampler import permute
from facetrain.data.open_dataset import drop_small_identities, open_dataset
from facetrain.data.skipped_files import SkippedFile, skipped_table
from facetrain.data.tools.landmarks import LandmarkFinder, YuNet, require_distinct_names
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import DataError, ImageError, UnreadableError
from facetrain.face_landmarks import normalize_landmarks
from facetrain.files import new_folder
from facetrain.progress import ProgressCallback, ignore_progress


@dataclass(frozen=True)
class PackResult:
    """Folder and size of a dataset that was written, and the images that were left out."""

    folder: Path
    identities: int
    images: int
    skipped: list[SkippedFile]
    """Files and images that were left out."""
    fallbacks: dict[str, str] = field(default_factory=dict)
    """Images whose face the detector found only in a second attempt, and the attempt."""
    several_faces: dict[str, int] = field(default_factory=dict)
    """Images in which the detector found several faces of similar size, and their number."""


SKIPPED_FILE = "skipped.csv"
"""Table of the files that were left out, in the folder of a packed dataset."""
_EXAMPLES = 3
"""Missing files that a message names."""


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
    checking: ProgressCallback = ignore_progress,
    progress: ProgressCallback = ignore_progress,
) -> PackResult:
    """Write a dataset of any format as train.rec, train.idx and property; the folder appears complete or not at all.

    Without alignment, an upright JPEG of the right size keeps its bytes. All other images are turned upright, resized
    to `image_size` and encoded with `quality`. Identities keep their order and are numbered without gaps. Where the
    source has names, names.csv and identities.csv keep them; skipped.csv lists what was left out, and why.
    landmarks.npy has the landmarks of aligned images, or those of the source.

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
        skip_bad: leave out images that cannot be read or have no landmarks. Every image is then read twice.
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
    prepared = _PreparedImages(source, image_size, quality, landmarks)
    skipped = list(skipped_files(source))
    good = _large_identities(source, source_path, min_images_per_identity, skipped)
    with new_folder(output) as scratch:
        if skip_bad:
            good = _good_images(prepared, good, workers, checking, skipped)
        elif isinstance(source, ListDataset):
            _require_files(source, source_path)
        identity, label = np.unique(source.labels[good], return_inverse=True)
        order = permute(np.arange(len(good)), len(good), key=seed) if shuffle else np.arange(len(good))
        labeled = map_in_order(
            lambda row: (int(label[row]), prepared.encoded(int(good[row]))), order, workers
        )
        labeled_progress = report_progress(labeled, len(good), progress)
        digest = ImageDigest()
        write_identities(scratch, np.bincount(label).tolist(), digest.of(labeled_progress), image_size)
        write_names(scratch, source, good[order], label[order])
        if prepared.landmarks_N52 is not None:
            write_landmarks(scratch / LANDMARKS_FILE, prepared.landmarks_N52[good[order]])
        carry_cards([source_path], output, scratch, (len(identity), len(good)), digest)
        if skipped:
            (scratch / SKIPPED_FILE).write_text(skipped_table(skipped), encoding="utf-8")
    fallbacks = landmarks.fallbacks if isinstance(landmarks, YuNet) else {}
    several_faces = landmarks.several_faces if isinstance(landmarks, YuNet) else {}
    return PackResult(output, len(identity), len(good), skipped, fallbacks, several_faces)


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
