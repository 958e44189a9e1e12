"""Catalog of a RecordIO file: offset and label of every image, built once from .idx and record headers.

The records of a file follow each other without a gap. An index that leaves out records would lose their images in
silence: the records that it lists must follow each other too.

It has 12 bytes per image: once it is built, the 42 million images of WebFace42M open in a fraction of a second.

If the file ends with identity records, they give the labels, without reading the header of every image. Identity
record c holds [first key, key after the last] of the images of identity c, as float32. Above 2^24 both are rounded to
multiples of 2, 4, …; near such a boundary, the label is read from the image's own record. These are about 2 % of the
images if there are 20 million, 11 % of 42 million, and 73 % of 100 million, with three or four for each identity. A
label of another program is a float32, too: from 2^24 on, people would share a number, and the file is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from facetrain.data.column_cache import Columns
from facetrain.data.formats.labels import are_labels
from facetrain.data.formats.record_headers import Headers, Records, read_headers
from facetrain.data.formats.recordio import RecordReader
from facetrain.data.skipped_files import SkippedFile
from facetrain.distinct import distinct
from facetrain.errors import RecordError

_ROWS_PER_CHUNK = 1 << 19
_EXACT_FLOAT32 = 1 << 24
_NUM_SAMPLED = 512
"""Images, and boundaries of identities, whose own label is compared with the ranges."""
_BOUNDARIES_PER_CHUNK = 1 << 16
_MAX_IN_RANGES = 1 << 32
"""Largest key in ranges: those of a crafted file could be so coarse that the keys near a boundary fill the memory."""
_CHUNK_BYTES = 1 << 23
_MAX_LINE_BYTES = 100
_MAX_NUMBER = 1 << 53
_REBUILD = "remove it, and it will be rebuilt from the .rec"


def read_index(rec_path: Path, idx_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and offsets, int64 (N,) each, in the order of the .idx; without an .idx, by a scan of the .rec.

    Raises:
        RecordError: if a line is not "key<tab>offset", or a key occurs twice.
    """
    if not idx_path.exists():
        offsets = np.fromiter(RecordReader(rec_path).scan_offsets(), dtype=np.int64)
        return np.arange(len(offsets), dtype=np.int64), offsets
    with idx_path.open("rb") as file:
        count = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b"")) + 1
    keys, offsets = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    filled = 0
    for lines in _index_lines(idx_path):
        keys[filled : filled + len(lines)], offsets[filled : filled + len(lines)] = lines.T
        filled += len(lines)
    keys, offsets = keys[:filled], offsets[:filled]
    if not _is_ascending(keys) and len(distinct(keys)) != len(keys):
        raise RecordError(f"{idx_path}: a key occurs more than once; {_REBUILD}")
    return keys, offsets


def _index_lines(path: Path) -> Iterator[np.ndarray]:
    """Yield int64 (lines, 2) of parts of an index: its text of up to a gigabyte is never in memory as a whole."""
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            yield _parse(lines + newline, path)
            if len(rest) > _MAX_LINE_BYTES:
                break
    yield _parse(rest, path)


def _parse(text: bytes, path: Path) -> np.ndarray:
    text = text.replace(b"\r", b"").strip()
    if not text:
        return np.empty((0, 2), dtype=np.int64)
    # Separators must alternate, and begin and end with a tab; np.fromstring itself accepts any white space.
    separators = text.translate(None, b"0123456789")
    lines = len(separators) // 2 + 1
    numbers = np.empty(0)
    if separators == b"\t\n" * (lines - 1) + b"\t":
        numbers = np.fromstring(text, dtype=np.int64, sep=" ")
    if len(numbers) != 2 * lines or numbers.max() >= _MAX_NUMBER:
        raise RecordError(f"{path}: not an index of lines `key<tab>offset`, but {text[:60]!r}; {_REBUILD}")
    return np.asarray(numbers).reshape(-1, 2)


def build_catalog(rec_path: Path, idx_path: Path) -> Columns:
    """Return the catalog of a RecordIO file, in the order of the index, as MXNet reads it.

    Its columns are `offset` and `label` of each image and `key`, int64; empty if the keys are consecutive. `first_key`
    is the key of the first image, `announced` the key after the last one according to record 0, a float32; None if
    record 0 is one of an image. `skipped` lists the records of images that have no bytes.

    Raises:
        RecordError: if the index or a record header is damaged, or there are no images.
    """
    keys, offsets = read_index(rec_path, idx_path)
    if not len(keys):
        empty = (
            f"{idx_path}: is empty; {_REBUILD}" if idx_path.exists() else f"{rec_path}: contains no records"
        )
        raise RecordError(empty)
    records = Records(RecordReader(rec_path), keys, offsets)
    lowest = int(keys.argmin())  # the lines of an index can be in any order
    first = read_headers(records[lowest : lowest + 1])
    announced = float(first.label[0]) if first.is_table[0] else None
    if offsets.min() > 0:
        raise RecordError(f"{idx_path}: leaves out the first record of {rec_path.name}; {_REBUILD}")
    label, skipped = None, []
    if announced is not None and _is_ascending(keys) and _is_ascending(offsets):
        label = labels_by_ranges(records)
    if label is not None:
        _check_successors_of_holes(records)
        images = records[1 : len(label) + 1]
    else:
        label, has_image, is_table = _labels_by_records(records)
        skipped = _without_bytes(keys, has_image, is_table)
        images = records[has_image]
    if not len(images):
        raise RecordError(f"{rec_path}: contains no images")
    first_key, last_key = int(images.key[0]), int(images.key[-1])
    is_consecutive = last_key - first_key == len(images) - 1 and _is_ascending(images.key)
    return Columns.of(
        offset=images.offset,
        label=label,
        key=images.key[:0] if is_consecutive else images.key,
        first_key=first_key,
        announced=announced,
        skipped=skipped,
    )


def _labels_by_records(records: Records) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read all N headers.

    Returns:
        The labels of the images, int32 (images,); which records are images, and which have a range of keys, bool (N,).
    """
    count = len(records)
    label = np.empty(count, dtype=np.int32)
    has_image, is_table = np.empty(count, dtype=bool), np.empty(count, dtype=bool)
    order = None if _is_ascending(records.offset) else np.argsort(records.offset, kind="stable")
    for start in range(0, count, _ROWS_PER_CHUNK):
        stop = min(start + _ROWS_PER_CHUNK, count)
        rows = slice(start, stop) if order is None else order[start:stop]
        part = records[rows]
        headers = read_headers(part)
        has_image[rows], is_table[rows] = headers.image_bytes > 0, headers.is_table
        _check_labels(part, headers)
        after = stop if order is None or stop == count else int(order[stop])
        following = records.offset[after] if stop < count else records.reader.size
        _check_successors(part, headers, np.append(part.offset[1:], following))
        label[rows] = np.where(has_image[rows], headers.label, 0)
    return label[has_image], has_image, is_table


def _without_bytes(keys: np.ndarray, has_image: np.ndarray, is_table: np.ndarray) -> list[SkippedFile]:
    """Return the records of images without bytes, as im2rec writes them for a file that it cannot read.

    The others without an image are record 0 and, after the last image, the identity records.
    """
    last = keys[has_image].max(initial=-1)
    is_expected = is_table & ((keys == keys.min()) | (keys > last))
    missing = keys[~has_image & ~is_expected].tolist()
    return [SkippedFile(f"key {key}", "unreadable", "the record has no image") for key in missing]


def _check_successors_of_holes(records: Records) -> None:
    """Check that no record is in the holes between ascending keys, and none after the last one."""
    holes = np.append(np.flatnonzero(np.diff(records.key) != 1), len(records) - 1)
    for start in range(0, len(holes), _ROWS_PER_CHUNK):
        rows = holes[start : start + _ROWS_PER_CHUNK]
        following = np.append(records.offset, records.reader.size)[rows + 1]
        _check_successors(records[rows], read_headers(records[rows]), following)


def _check_successors(records: Records, headers: Headers, following: np.ndarray) -> None:
    """Check that each of N records ends where the next one in the index begins.

    Raises:
        RecordError: records overlap, or the index leaves out what is between two of them or after the last one.
    """
    end = headers.end + -headers.end % 4  # padding
    records.require_none(end > following, "the record runs into the next one")
    records.require_none(end < following, "the index leaves out the record after this one")


def _check_labels(records: Records, headers: Headers) -> None:
    """Check that the labels of N records, if they are images, are whole numbers that were not rounded."""
    label, is_image = headers.label, headers.image_bytes > 0
    if (wrong := ~are_labels(label) & is_image).any():
        row = int(wrong.argmax())
        raise RecordError(
            f"{records.location(row)}: the label {label[row]} is not a whole number from 0 to 2^31; write the dataset "
            "again, with labels from 0"
        )
    if (rounded := ~headers.is_exact & (label >= _EXACT_FLOAT32) & is_image).any():
        row = int(rounded.argmax())
        raise RecordError(
            f"{records.location(row)}: the label {label[row]:.0f} is a float32, which several identities share from "
            "2^24 on; write the file from its images by `facetrain data pack`, which stores exact labels"
        )


def labels_by_ranges(records: Records) -> np.ndarray | None:
    """Return the label of every image, int32 (images,), for a file with ascending keys whose record 0 is a header.

    The images are the records 1, 2, … before the first record without an image. Returns None if the ranges do not
    cover the images without gaps, or a sample of images has other labels; every header must then be read.

    Raises:
        RecordError: if no complete record starts at an offset, or the label of a sampled image is invalid.
    """
    end = _first_without_image(records)
    ranges = _read_ranges(records[end:])
    if ranges is None or end == 1:
        return None
    first, past = ranges
    if not ((first >= 0) & (past <= _MAX_IN_RANGES)).all():
        return None
    images = records[1:end]
    boundaries = np.append(first, past[-1])
    expected = np.array([images.key[0], images.key[-1] + 1]).astype(np.float32)
    is_tiling = (boundaries[1:] == past).all() and (np.diff(boundaries) >= 0).all()
    if not is_tiling or (boundaries[[0, -1]] != expected).any():
        return None
    label = np.empty(len(images), dtype=np.int32)
    for start in range(0, len(label), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        label[rows] = np.searchsorted(first, images.key[rows], side="right") - 1
    if not _correct_near_rounded_boundaries(images, boundaries, label):
        return None
    sampled = np.unique(np.linspace(0, len(label) - 1, _NUM_SAMPLED).astype(np.int64))
    # int64: searchsorted with float64 would convert all image keys to float64.
    sampled_first = first[:: max(1, len(first) // _NUM_SAMPLED)].astype(np.int64)
    at_boundaries = np.searchsorted(images.key, sampled_first)
    sampled = np.union1d(sampled, at_boundaries.clip(0, len(label) - 1))
    headers = read_headers(images[sampled])
    # The last image has the highest label.
    _check_labels(images[sampled], headers)
    return label if (headers.label == label[sampled]).all() else None


def _read_ranges(records: Records) -> tuple[np.ndarray, np.ndarray] | None:
    """Return first and past key of each identity record, float64 (identities,); None if one of them is an image."""
    first, past = np.empty(len(records)), np.empty(len(records))
    for start in range(0, len(records), _ROWS_PER_CHUNK):
        rows = slice(start, start + _ROWS_PER_CHUNK)
        headers = read_headers(records[rows])
        if headers.image_bytes.any():
            return None
        first[rows], past[rows] = headers.label, headers.second
    return (first, past) if len(records) else None


def _first_without_image(records: Records) -> int:
    """Return the number of the first record after record 0 without an image, by bisection.

    Record 0 names this key too, but rounded to float32.
    """
    low, high = 1, len(records)
    while low < high:
        middle = (low + high) // 2
        if read_headers(records[middle : middle + 1]).image_bytes[0]:
            low = middle + 1
        else:
            high = middle
    return low


def _correct_near_rounded_boundaries(images: Records, boundaries: np.ndarray, label: np.ndarray) -> bool:
    """Read the labels near boundaries above 2^24 from the images' records, in place; return False if one is invalid."""
    rounded = np.unique(boundaries[boundaries >= _EXACT_FLOAT32])
    for start in range(0, len(rounded), _BOUNDARIES_PER_CHUNK):
        boundary = rounded[start : start + _BOUNDARIES_PER_CHUNK]
        # Rounding moves a key by up to half the distance of neighboring float32 numbers.
        reach = int(np.spacing(np.float32(boundary[-1]))) // 2
        near = (boundary[:, None] + np.arange(-reach, reach + 1)).astype(np.int64).reshape(-1)
        rows = distinct(np.searchsorted(images.key, near))
        rows = rows[rows < len(label)]
        exact = read_headers(images[rows]).label
        if not ((exact >= 0) & (exact < len(boundaries) - 1)).all():
            return False
        label[rows] = exact
    return True


def _is_ascending(keys: np.ndarray) -> bool:
    """Return whether keys, int64 (N,), strictly increase; in chunks, without a copy of all keys."""
    starts = range(0, len(keys) - 1, _ROWS_PER_CHUNK)
    return all((np.diff(keys[start : start + _ROWS_PER_CHUNK + 1]) > 0).all() for start in starts)
