"""Landmark files for existing datasets and verification sets, from a detector or a list."""

# N images

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from facetrain.data.formats.bin import read_bin
from facetrain.data.formats.landmark_file import landmarks_path, square_landmarks, write_landmarks
from facetrain.data.formats.set_names import is_bin
from facetrain.data.images.decode import decode_rgb
from facetrain.data.mixture_file import is_mixture
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.landmark_finder import LandmarkFinder
from facetrain.data.tools.landmark_table import require_distinct_names
from facetrain.data.tools.parallel import map_in_order, report_progress
from facetrain.errors import DataError
from facetrain.files import creation_fault
from facetrain.progress import ProgressCallback, ignore_progress


def write_dataset_landmarks(
    data: Path,
    finder: LandmarkFinder,
    *,
    workers: int | None = None,
    progress: ProgressCallback = ignore_progress,
) -> tuple[int, list[str]]:
    """Find the landmarks of all images, and write them to `landmarks_path` of the dataset or verification set.

    Args:
        data: a dataset of any format but a mixture, or a verification set.
        finder: gets the name of an image, or its number from 0 if it has none, and its pixels.
        workers: number of threads; one per usable core if None.
        progress: called after every image.

    Returns:
        The number of images, and the names of those without landmarks: readers take the landmarks of an aligned face.

    Raises:
        DataError: the data cannot be read, is a mixture, has no image with landmarks, or two images of one name in a
            list of landmarks; or the file cannot be written.
        ImageError: an image cannot be decoded.
    """
    if is_mixture(data):
        raise DataError(f"{data}: is a mixture; write the landmarks of each of its datasets")
    read: Callable[[int], bytes]
    name_of: Callable[[int], str] = str
    file_names = None
    if is_bin(data):
        images, _ = read_bin(data)
        count, read = len(images), lambda number: images[number]
        location_of: Callable[[int], str] = lambda number: f"{data}: image {number}"  # noqa: E731
    else:
        source = open_dataset(data, with_landmarks=False)
        count, read, location_of = source.num_images, source.read, source.location
        name_of = source.image_name
        file_names = source.digest_file_names()
    require_distinct_names(finder, count, name_of, location_of)
    output = landmarks_path(data)
    if fault := creation_fault(output.parent):  # now, because the search for faces can take hours
        raise DataError(f"{output}: cannot be written: {fault}; make it writable, or copy the dataset")

    def find(number: int) -> np.ndarray | None:
        image = decode_rgb(read(number), location=location_of(number))
        points = finder(name_of(number), image)
        return None if points is None else square_landmarks(points, *image.shape[:2])

    landmarks_N52 = np.full((count, 5, 2), np.nan, np.float32)
    points_of_images = report_progress(map_in_order(find, range(count), workers), count, progress)
    for number, points in enumerate(points_of_images):
        if points is not None:
            landmarks_N52[number] = points
    missing = np.flatnonzero(np.isnan(landmarks_N52[:, 0, 0])).tolist()
    if len(missing) == count:
        raise DataError(f"{data}: none of its {count:,} images has landmarks; check the detector or the list")
    write_landmarks(output, landmarks_N52, file_names)
    return count, [name_of(number) for number in missing]
