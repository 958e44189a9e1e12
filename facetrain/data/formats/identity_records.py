"""Labels from the identity records at the end of an InsightFace file, without reading every image header.

Identity record c holds [first key, key after the last] of the images of identity c, as float32. Above 2^24 both are
rounded to multiples of 2, 4, …; near such a boundary, the label is read from the image's own record.
"""

from __future__ import annotations

import numpy as np

from facetrain.data.formats.record_headers import read_headers
from facetrain.data.formats.recordio import RecordReader

_EXACT_FLOAT32 = 1 << 24
_NUM_SAMPLED = 512
"""Images, and boundaries of identities, whose own label is compared with the ranges."""
_ROWS_PER_CHUNK = 1 << 17
_BOUNDARIES_PER_CHUNK = 1 << 16


def labels_by_ranges(reader: RecordReader, keys: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    """Return the label of every image, int32 (images,), for a file with ascending keys whose record 0 is a header.

    The images are the records 1, 2, … before the first record without an image. Returns None if the ranges do not
    cover the images without gaps, or a sample of images has other labels; every header must then be read.

    Raises:
        RecordError: if no complete record starts at an offset.
    """
    end = _first_without_image(reader, keys, offsets)
    ranges = _read_ranges(reader, keys[end:], offsets[end:])
    if ranges is None or end == 1:
        return None
    first, past = ranges
    if not (np.isfinite(first) & np.isfinite(past) & (first >= 0) & (past < 2**53)).all():
        return None
    image_keys = keys[1:end]
    boundaries = np.append(first, past[-1])
    expected = np.array([image_keys[0], image_keys[-1] + 1]).astype(np.float32)
    is_tiling = (boundaries[1:] == past).all() and (np.diff(boundaries) >= 0).all()
    if not is_tiling or (boundaries[[0, -1]] != expected).any():
        return None
    label = np.empty(len(image_keys), dtype=np.int32)
    for start in range(0, len(label), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        label[rows] = np.searchsorted(first, image_keys[rows], side="right") - 1
    if not _correct_near_rounded_boundaries(reader, keys, offsets, boundaries, label):
        return None
    sampled = np.unique(np.linspace(0, len(label) - 1, _NUM_SAMPLED).astype(np.int64))
    # int64: searchsorted with float64 would convert all image keys to float64.
    sampled_first = first[:: max(1, len(first) // _NUM_SAMPLED)].astype(np.int64)
    at_boundaries = np.searchsorted(image_keys, sampled_first)
    sampled = np.union1d(sampled, at_boundaries.clip(0, len(label) - 1))
    headers = read_headers(reader, offsets[1 + sampled], keys[1 + sampled])
    return label if (headers.label == label[sampled]).all() else None


def _read_ranges(
    reader: RecordReader, keys: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first and past key of each identity record, float64 (identities,); None if one of them is an image."""
    first, past = np.empty(len(keys)), np.empty(len(keys))
    for start in range(0, len(keys), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        headers = read_headers(reader, offsets[rows], keys[rows])
        if headers.image_bytes.any():
            return None
        first[rows], past[rows] = headers.label, headers.second
    return (first, past) if len(keys) else None


def _first_without_image(reader: RecordReader, keys: np.ndarray, offsets: np.ndarray) -> int:
    """Return the number of the first record after record 0 without an image, by bisection.

    Record 0 names this key too, but rounded to float32.
    """
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high) // 2
        if read_headers(reader, offsets[middle : middle + 1], keys[middle : middle + 1]).image_bytes[0]:
            low = middle + 1
        else:
            high = middle
    return low


def _correct_near_rounded_boundaries(
    reader: RecordReader, keys: np.ndarray, offsets: np.ndarray, boundaries: np.ndarray, label: np.ndarray
) -> bool:
    """Read the labels near boundaries above 2^24 from the images' records, in place; return False if one is invalid."""
    rounded = np.unique(boundaries[boundaries >= _EXACT_FLOAT32])
    image_keys = keys[1 : len(label) + 1]
    for start in range(0, len(rounded), _BOUNDARIES_PER_CHUNK):
        boundary = rounded[start : start + _BOUNDARIES_PER_CHUNK]
        # Rounding moves a key by up to half the distance of neighboring float32 numbers.
        reach = int(np.spacing(np.float32(boundary[-1]))) // 2
        near = (boundary[:, None] + np.arange(-reach, reach + 1)).astype(np.int64).reshape(-1)
        rows = np.unique(np.searchsorted(image_keys, near))
        rows = rows[rows < len(label)]
        exact = read_headers(reader, offsets[1 + rows], keys[1 + rows]).label
        if not ((exact >= 0) & (exact < len(boundaries) - 1)).all():
            return False
        label[rows] = exact
    return True
