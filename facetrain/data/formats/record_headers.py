"""The headers of very many records at once, without their images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.formats.recordio import LABEL_MARK, MAGIC, MAX_LENGTH, WHOLE, RecordReader, decode_record
from facetrain.errors import RecordError

RAW_HEADER = np.dtype(
    [
        ("magic", "<u4"), ("word", "<u4"), ("flag", "<u4"), ("label", "<f4"), ("id", "<u8"), ("id2", "<u8"),
        ("first", "<f4"), ("second", "<f4"),
    ]
)  # fmt: skip
"""First 40 bytes of a record. `first` and `second` are labels if flag is 2, else the begin of the image."""
_LEAST = 32
"""Bytes of a record that has nothing but its header."""
_DENSE = 1 << 16
"""Up to so many bytes a record, one long read costs less than a short one for each record."""
_SPAN = 1 << 22


@dataclass(frozen=True)
class Headers:
    """One entry a record, in the order that was asked for."""

    label: np.ndarray
    """float64: label, or the first of several; exact where our writer kept it."""
    second: np.ndarray
    """float64: the second of several labels, else 0."""
    image_bytes: np.ndarray
    """int64: length of the image; 0 for a record that only describes others."""


def read_headers(reader: RecordReader, offsets: np.ndarray, keys: np.ndarray) -> Headers:
    """Read the headers of records at int64 offsets (N,), in any order.

    Raises:
        RecordError: an offset where no whole record starts; the message names its key.
    """
    raw = _raw(reader, offsets, keys)
    length = (raw["word"] & MAX_LENGTH).astype(np.int64)
    _check(reader, offsets, keys, raw["magic"] != MAGIC, "no record starts there")
    _check(reader, offsets, keys, offsets + 8 + length > reader.size, "the file ends inside this record")
    flag = raw["flag"].astype(np.int64)
    whole = raw["word"] >> 29 == WHOLE
    _check(
        reader,
        offsets,
        keys,
        whole & (24 + 4 * flag > length),
        "its header speaks of more labels than it holds",
    )
    with np.errstate(invalid="ignore"):  # a damaged label may be a signalling NaN
        label = np.where(flag > 0, raw["first"], raw["label"]).astype(np.float64)
        second = np.where(flag > 1, raw["second"], 0).astype(np.float64)
    kept = raw["id2"] >> np.uint64(48) == LABEL_MARK >> 48
    label[kept] = (raw["id2"][kept] & np.uint64((1 << 48) - 1)).astype(np.float64)
    headers = Headers(label, second, length - 24 - 4 * flag)
    # Records in several parts are rare, and the cut may go through the header itself: read them whole.
    for row in np.flatnonzero(~whole).tolist():
        offset, key = int(offsets[row]), int(keys[row])
        header, image = decode_record(reader.read_at(offset, key), reader.location(offset, key))
        label[row], headers.image_bytes[row] = header.label, len(image)
    return headers


def _raw(reader: RecordReader, offsets: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the first 40 bytes of every record, zeros where the file ends before."""
    outside = (offsets < 0) | (offsets > reader.size - _LEAST)
    _check(reader, offsets, keys, outside, f"past the end of the file, which has {reader.size:,} bytes")
    order = np.argsort(offsets, kind="stable")
    sorted_offsets = offsets[order]
    raw = np.zeros(len(offsets), dtype=RAW_HEADER)
    target = raw.view(np.uint8).reshape(len(offsets), RAW_HEADER.itemsize)
    start = 0
    while start < len(order):
        first = int(sorted_offsets[start])
        stop = int(np.searchsorted(sorted_offsets, first + _SPAN))
        span = int(sorted_offsets[stop - 1]) - first + RAW_HEADER.itemsize
        if span <= (stop - start) * _DENSE:
            data = reader.bytes_at(first, span)
            block = np.frombuffer(data + bytes(span - len(data)), dtype=np.uint8)
            places = sorted_offsets[start:stop, None] - first + np.arange(RAW_HEADER.itemsize)
            target[order[start:stop]] = block[places]
        else:
            for row in order[start:stop].tolist():
                data = reader.bytes_at(int(offsets[row]), RAW_HEADER.itemsize)
                target[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        start = stop
    return raw


def _check(reader: RecordReader, offsets: np.ndarray, keys: np.ndarray, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        bad = int(np.flatnonzero(wrong)[0])
        raise RecordError(
            f"{reader.location(int(offsets[bad]), int(keys[bad]))}: {what}; the file is cut off or damaged, or "
            "the "
            "index belongs to another: download it again, or remove the .idx to have it rebuilt"
        )
