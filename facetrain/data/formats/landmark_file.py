"""Landmarks of the images of a dataset or verification set, in a NumPy file beside it.

FOLDER/landmarks.npy, FILE.landmarks.npy for a dataset that is one file (faces.lmdb.landmarks.npy), or
NAME.landmarks.npy beside NAME.bin: float32 (N, 5, 2) in the order of the images. x and y of the points of
`face_landmarks` are fractions of the sides of the image, of the square at the center if it is not square: of what a
network sees. A row of NaN is an image without a detected face; the landmarks of an aligned face take its place.

An added or removed file of an image folder moves the images after it to other rows: landmarks.names.sha256 beside the
landmarks has a digest of the names for which they were written.
"""

# N images

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from facetrain.data.beside_dataset import FILE_NAMES_SUFFIX, LANDMARKS_FILE, LANDMARKS_SUFFIX, beside
from facetrain.data.formats.set_names import has_bin_suffix, set_name
from facetrain.data.npy_file import map_npy
from facetrain.errors import DataError
from facetrain.face_landmarks import NORMALIZED_TEMPLATE, normalize_landmarks
from facetrain.files import error_reason, new_file, os_errors_as, read_regular_text, write_atomically

_SHAPE = (5, 2)
_FARTHEST = 10.0
"""Largest coordinate that is accepted. A point may be outside of the image; larger numbers are pixels."""
_CHUNK = 1 << 20
_ADVICE = "write it again with `facetrain data landmarks`, or remove it"


def landmarks_path(data: Path) -> Path:
    """Return the path of the landmarks of a dataset or verification set."""
    if has_bin_suffix(data) and not data.is_dir():
        return data.with_name(set_name(data) + LANDMARKS_SUFFIX)
    return beside(data, LANDMARKS_FILE, LANDMARKS_SUFFIX)


def open_landmarks(path: Path, num_images: int) -> np.ndarray:
    """Map a landmark file into memory: float32 (N, 5, 2).

    Raises:
        DataError: it is not such an array, or has another number of rows than there are images.
    """
    try:
        landmarks_N52 = map_npy(path)
        if landmarks_N52.dtype != np.float32 or landmarks_N52.shape != (num_images, *_SHAPE):
            raise ValueError(
                f"{landmarks_N52.dtype} of shape {landmarks_N52.shape}; expected float32 of shape "
                f"{(num_images, *_SHAPE)}"
            )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: not the landmarks of {num_images:,} images ({error_reason(error)}); {_ADVICE}"
        ) from error
    return landmarks_N52


def read_landmarks(path: Path, num_images: int) -> np.ndarray:
    """Map a landmark file into memory, and check that its numbers are fractions or NaN: float32 (N, 5, 2).

    Raises:
        DataError: as `open_landmarks`; or a number is infinite, or so large that it is one of pixels.
    """
    landmarks_N52 = open_landmarks(path, num_images)
    require_fractions(landmarks_N52, f"{path}: has landmarks", _ADVICE)
    return landmarks_N52


def require_fractions(landmarks_N52: np.ndarray, what: str, advice: str) -> None:
    """Check that the numbers of landmarks (N, 5, 2) are fractions or NaN.

    Raises:
        DataError: one is not; the message begins with `what` and ends with `advice`.
    """
    for start in range(0, len(landmarks_N52), _CHUNK):
        if (np.abs(landmarks_N52[start : start + _CHUNK]) > _FARTHEST).any():
            raise DataError(f"{what} in pixels, not in fractions of the image's sides; {advice}")


def read_landmarks_beside(data: Path, num_images: int) -> np.ndarray | None:
    """Return the landmarks of a dataset or verification set, (N, 5, 2); None if it has no landmark file.

    Raises:
        DataError: the file is damaged, does not fit, or has numbers that are no fractions.
    """
    path = landmarks_path(data)
    return read_landmarks(path, num_images) if path.is_file() else None


def write_landmarks(path: Path, landmarks_N52: np.ndarray, file_names: str | None = None) -> None:
    """Write landmarks (N, 5, 2), with rows of NaN for images without a face; the file appears complete or not at all.

    `file_names` is the digest of an image folder's names, which `require_file_names` compares.

    Raises:
        DataError: the file cannot be written.
    """
    with new_file(path, DataError) as scratch, scratch.open("wb") as file:
        np.save(file, np.ascontiguousarray(landmarks_N52, np.float32), allow_pickle=False)
    if file_names is not None:
        with os_errors_as(DataError, path):
            write_atomically(path.with_suffix(FILE_NAMES_SUFFIX), f"{file_names}\n")


def require_file_names(path: Path, digest_file_names: Callable[[], str | None]) -> None:
    """Check that the landmarks of an image folder were written for its present files, if there is a digest of them.

    `digest_file_names` returns that of the present files, None for other formats.

    Raises:
        DataError: files were added, removed or renamed since.
    """
    recorded = path.with_suffix(FILE_NAMES_SUFFIX)
    if not recorded.is_file():
        return
    with os_errors_as(DataError, recorded):
        if digest_file_names() not in (None, read_regular_text(recorded).strip()):
            raise DataError(
                f"{path}: belongs to other images: files of the folder were added, removed or renamed; {_ADVICE}"
            )


def without_gaps(landmarks_N52: np.ndarray) -> np.ndarray:
    """Return a copy in which the landmarks of an aligned face replace those with NaN: float32 (N, 5, 2)."""
    missing_N = np.isnan(landmarks_N52).any((1, 2))
    return np.where(missing_N[:, None, None], NORMALIZED_TEMPLATE, np.asarray(landmarks_N52, np.float32))


def square_landmarks(points: np.ndarray, height: int, width: int) -> np.ndarray:
    """Map landmarks (5, 2) in pixels of an image to fractions of the square at its center, float32."""
    side = min(height, width)
    corner = np.array([width - side, height - side]) / 2
    return normalize_landmarks(np.asarray(points, np.float64) - corner, side, side)
