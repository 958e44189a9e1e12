"""Labels from the identity records at the end of an InsightFace file, without reading every image's header.

Identity record c says [first key, key past the last] of the images of identity c, in float32: above
2^24 both are rounded to multiples of 2, 4, …, so an image near such a border is asked itself.
"""

from __future__ import annotations

import numpy as np

from facetrain.data.formats.record_headers import read_headers
from facetrain.data.formats.recordio import RecordReader

_EXACT = 1 << 24
_ASKED = 512
_ROWS_AT_ONCE = 1 << 17
_EDGES_AT_ONCE = 1 << 16


def labels_by_ranges(reader: RecordReader, keys: np.ndarray, offsets: np.ndarray) -> np.ndarray | None:
    """Return the label, int32, of every image of a file whose record 0 is a header and whose keys ascend.

    The images are records 1, 2, … up to the first one without an image. None where the identity
    records do not tile the images in order, or do not agree with the images that were asked: then
    every record must be read.

    Raises:
        RecordError: an offset where no whole record starts.
    """
    past_images = _first_without_image(reader, keys, offsets)
    ranges = _ranges(reader, keys[past_images:], offsets[past_images:])
    if ranges is None or past_images == 1:
        return None
    first, past = ranges
    if not (np.isfinite(first) & np.isfinite(past) & (first >= 0) & (past < 2**53)).all():
        return None
    image_keys = keys[1:past_images]
    edges = np.append(first, past[-1])
    expected = np.array([image_keys[0], image_keys[-1] + 1]).astype(np.float32)
    if (edges[1:] != past).any() or (np.diff(edges) < 0).any() or (edges[[0, -1]] != expected).any():
        return None
    label = np.empty(len(image_keys), dtype=np.int32)
    for start in range(0, len(label), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        label[part] = np.searchsorted(first, image_keys[part], side="right") - 1
    if not _ask_near_rounded_edges(reader, keys, offsets, edges, label):
        return None
    asked = np.unique(np.linspace(0, len(label) - 1, _ASKED).astype(np.int64))
    some = first[:: max(1, len(first) // _ASKED)].astype(np.int64)  # float64 would copy all keys to float64
    borders = np.searchsorted(image_keys, some)
    asked = np.union1d(asked, borders.clip(0, len(label) - 1))
    told = read_headers(reader, offsets[1 + asked], keys[1 + asked])
    return label if (told.label == label[asked]).all() else None


def _ranges(
    reader: RecordReader, keys: np.ndarray, offsets: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return what the identity records say, float64 (identities,) each; None if one of them has an image."""
    first, past = np.empty(len(keys)), np.empty(len(keys))
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        headers = read_headers(reader, offsets[rows], keys[rows])
        if headers.image_bytes.any():
            return None
        first[rows], past[rows] = headers.label, headers.second
    return (first, past) if len(keys) else None


def _first_without_image(reader: RecordReader, keys: np.ndarray, offsets: np.ndarray) -> int:
    """Bisect for the first record after record 0 that has no image: what record 0 says may be rounded."""
    low, high = 1, len(keys)
    while low < high:
        middle = (low + high) // 2
        if read_headers(reader, offsets[middle : middle + 1], keys[middle : middle + 1]).image_bytes[0]:
            low = middle + 1
        else:
            high = middle
    return low


def _ask_near_rounded_edges(
    reader: RecordReader, keys: np.ndarray, offsets: np.ndarray, edges: np.ndarray, label: np.ndarray
) -> bool:
    """Correct the labels near borders that float32 has rounded; False where an image's own is no identity."""
    rounded = np.unique(edges[edges >= _EXACT])
    image_keys = keys[1 : len(label) + 1]
    for start in range(0, len(rounded), _EDGES_AT_ONCE):
        edge = rounded[start : start + _EDGES_AT_ONCE]
        reach = int(np.spacing(np.float32(edge[-1]))) // 2
        near = (edge[:, None] + np.arange(-reach, reach + 1)).astype(np.int64).reshape(-1)
        rows = np.unique(np.searchsorted(image_keys, near))
        rows = rows[rows < len(label)]
        told = read_headers(reader, offsets[1 + rows], keys[1 + rows]).label
        if not ((told >= 0) & (told < len(edges) - 1)).all():
            return False
        label[rows] = told
    return True
