"""Conversion of a dataset of any format to RecordIO, with optional alignment of the faces."""

# N images

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from facetrain.data.dataset import FaceDataset
from facetrain.data.dataset_card import read_cards
from facetrain.data.formats.image_list import ListDataset
from facetrain.data.images.decode import decode_rgb, encode_jpeg, is_upright_jpeg, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.skipped_files import SkippedFile
from facetrain.data.tools.aligned_images import QUALITY, AlignedImages, skipped_image
from facetrain.data.tools.landmark_finder import LandmarkFinder, aligned_face_landmarks
from facetrain.data.tools.landmark_table import require_distinct_names, require_order
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.data.tools.selection import Selection
from facetrain.data.tools.writing import WrittenDataset, write_dataset
from facetrain.errors import DataError, ImageError, UnreadableError
from facetrain.files import require_absent
from facetrain.progress import ProgressCallback, ignore_progress
from facetrain.text import count_text

_EXAMPLES = 3
"""Missing files that a message names."""


def pack(
    source_path: Path,
    output: Path,
    *,
    image_size: int = 112,
    skip_bad: bool = False,
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
        image_size: width and height of the written images, in pixels.
        skip_bad: leave out images that cannot be read or have no landmarks. Every image is then read twice.
        images: folder that the paths of a list file are relative to; the folder of the list file if None.
        landmarks: if given, faces are aligned to ArcFace's template by their landmarks; by default by those of a list
            of photos.
        workers: number of threads; one per usable core if None.
        checking: with `skip_bad`, called after every image that is checked, before the first one is written.
        progress: called after every image that is written.

    Raises:
        DataError: the dataset or its card cannot be read, no image is good, two images have one name in a list of
            landmarks, the landmarks of a list of photos are missing or in another order, or the output exists or cannot
            be written.
        ImageError: an image cannot be read or has no landmarks, and `skip_bad` is false.
    """
    source = open_dataset(source_path, root=images)
    # Now, because the search for faces can take hours.
    require_absent(output)
    cards = read_cards(source_path)
    require_distinct_names(landmarks, source.num_images, source.image_name, source.location)
    if landmarks is None and (listed_N52 := source.photo_landmarks) is not None:
        if count := int(np.isinf(listed_N52[:, 0, 0]).sum()):
            raise DataError(
                f"{source_path}: {count_text(count, 'image is', 'images are')} not aligned (flag 0; aligned ones have "
                "1), and the list has no landmarks of them; give --detector yunet, or --landmarks with a file"
            )
        require_order(source_path, listed_N52, "`x1 … x5 y1 … y5` of")
    prepared = _PreparedImages(source, image_size, landmarks)
    skipped = list(source.skipped)
    numbers = np.arange(source.num_images)
    if skip_bad:
        numbers, faults = prepared.without_faults(workers, checking)
        skipped += faults
    elif isinstance(source, ListDataset):
        _require_files(source, source_path)
    selection = Selection(
        source, cards, numbers, source.labels[numbers], prepared.landmarks_N52, prepared.encoded, skipped
    )
    written = write_dataset(selection, output, workers=workers, progress=progress)
    return replace(written, resized=int(prepared.is_resized_N.sum()))


def _require_files(source: ListDataset, path: Path) -> None:
    """Check that the files of a list exist: all that are missing are reported at once, before any is read."""
    missing = [number for number in range(source.num_images) if not os.path.exists(source.file_path(number))]
    if missing:
        examples = ", ".join(source.location(number) for number in missing[:_EXAMPLES])
        raise ImageError(
            f"{path}: {len(missing):,} of its {source.num_images:,} files do not exist ({examples}"
            f"{', …' if len(missing) > _EXAMPLES else ''}); give the folder of the paths with --images, or leave out "
            "such images with --skip-bad"
        )


class _PreparedImages:
    """Images of a dataset, aligned or resized, and encoded."""

    def __init__(self, source: FaceDataset, size: int, find: LandmarkFinder | None) -> None:
        self._source, self._size = source, size
        known_N52 = source.photo_landmarks if find is None else None
        if known_N52 is not None:
            find = aligned_face_landmarks  # of the images that the list calls aligned
        self._aligned = AlignedImages(find, source.num_images, size, known_N52) if find else None
        self.landmarks_N52 = self._aligned.landmarks_N52 if self._aligned else source.landmarks
        """Landmarks of the images that have been encoded, as fractions of their sides; None: they have none."""
        self.is_resized_N = np.zeros(source.num_images, bool)
        """The images that have been encoded in another size, without alignment."""

    def without_faults(
        self, workers: int | None, progress: ProgressCallback
    ) -> tuple[np.ndarray, list[SkippedFile]]:
        """Return the numbers of the images that can be written, int64, and the others.

        Raises:
            DataError: there is none.
        """
        count = self._source.num_images
        checked = map_in_order(self._fault, range(count), workers)
        found = list(report_progress(checked, count, progress))
        faults = [fault for fault in found if fault is not None]
        if len(faults) == count:
            raise DataError(f"all {count:,} images have faults; the first is {faults[0].reason}")
        return np.flatnonzero([fault is None for fault in found]), faults

    def encoded(self, number: int) -> bytes:
        """Return an image as it is to be written."""
        try:
            data, location = self._source.read(number), self._source.location(number)
            if self._aligned is not None:
                return self._aligned.encoded(number, self._source.image_name(number), data, location)
            image = decode_rgb(data, location=location)
        except UnreadableError as error:
            raise ImageError(f"{error}; leave out such images with --skip-bad") from error
        self.is_resized_N[number] = image.shape[:2] != (self._size, self._size)
        if not self.is_resized_N[number] and is_upright_jpeg(data):
            return data
        return encode_jpeg(resize_square(image, self._size), QUALITY)

    def _fault(self, number: int) -> SkippedFile | None:
        try:
            data, location = self._source.read(number), self._source.location(number)
            if self._aligned is None:
                decode_rgb(data, location=location)
            else:
                self._aligned.decode(number, self._source.image_name(number), data, location)
        except UnreadableError as error:
            return skipped_image(self._source.left_out_name(number), error)
        return None
