"""Bulk reading of record headers, without the images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from facetrain.data.formats import recordio
from facetrain.data.formats.recordio import RecordReader, decode_record
from facetrain.errors import RecordError

RAW_HEADER = np.dtype(
    [
        ("magic", "<u4"), ("word", "<u4"), ("flag", "<u4"), ("label", "<f4"), ("id", "<u8"), ("id2", "<u8"),
        ("first", "<f4"), ("second", "<f4"),
    ]
)  # fmt: skip
"""First 40 bytes of a record. `first` and `second` are labels if flag is 2 or more, else bytes of the image."""
_FRAME_BYTES = 8
_HEADER_BYTES = 24
_DENSE_BYTES = 1 << 16
"""Bytes per record up to which one long read is faster than a short read for each record."""
_SPAN_BYTES = 1 << 22


@dataclass(frozen=True)
class Headers:
    """Headers of N records."""

    label: np.ndarray
    """First or only label, float64 (N,)."""
    is_exact: np.ndarray
    """Whether our writer stored the exact label; the others are float32: bool (N,)."""
    second: np.ndarray
    """Second of several labels, otherwise 0: float64 (N,)."""
    image_bytes: np.ndarray
    """Length of the image: int64 (N,); 0 for a record without an image."""
    end: np.ndarray
    """First byte after the record, without padding: int64 (N,)."""

    @property
    def is_table(self) -> np.ndarray:
        """Whether a record has a range of keys in place of an image, as record 0 and identity records: bool (N,)."""
        return (self.image_bytes == 0) & (self.second > 0)


def read_headers(reader: RecordReader, offsets: np.ndarray, keys: np.ndarray) -> Headers:
    """Read the headers of records at ascending int64 offsets (N,); the keys appear in error messages only.

    Raises:
        RecordError: if no complete record starts at an offset.
    """
    raw = _read_raw(reader, offsets, keys)
    length = (raw["word"] & recordio.MAX_LENGTH).astype(np.int64)
    flag = raw["flag"].astype(np.int64)
    is_whole = raw["word"] >> recordio.KIND_SHIFT == recordio.PART_WHOLE
    require_sound(reader, offsets, keys, raw["magic"] != recordio.MAGIC, "no record starts there")
    require_sound(
        reader,
        offsets,
        keys,
        offsets + _FRAME_BYTES + length > reader.size,
        "the file ends inside this record",
    )
    too_short = is_whole & (_HEADER_BYTES + 4 * flag > length)
    require_sound(reader, offsets, keys, too_short, "its header announces more labels than it contains")
    with np.errstate(invalid="ignore"):  # a damaged label may be a signaling NaN
        label = np.where(flag > 0, raw["first"], raw["label"]).astype(np.float64)
        second = np.where(flag > 1, raw["second"], 0).astype(np.float64)
    shift, mask = np.uint64(recordio.EXACT_LABEL_SHIFT), np.uint64(recordio.EXACT_LABEL_MASK)
    is_exact = raw["id2"] >> shift == np.uint64(recordio.EXACT_LABEL) >> shift
    exact = (raw["id2"][is_exact] & mask).astype(np.float64)
    # The exact label, rounded, is the other one: else a bit of one of them is damaged.
    contradicts = np.zeros(len(label), bool)
    contradicts[is_exact] = exact.astype(np.float32) != label[is_exact].astype(np.float32)
    require_sound(reader, offsets, keys, contradicts & is_whole, "its two labels differ")
    label[is_exact] = exact
    image_bytes, end = length - _HEADER_BYTES - 4 * flag, offsets + _FRAME_BYTES + length
    headers = Headers(label, is_exact, second, image_bytes, end)
    # A split can fall into the header itself. Split records are rare: read them completely.
    for row in np.flatnonzero(~is_whole).tolist():
        offset, key = int(offsets[row]), int(keys[row])
        header, image = decode_record(reader.read_at(offset, key), reader.location(offset, key))
        label[row], is_exact[row], image_bytes[row] = header.label, header.is_exact, len(image)
        end[row] = reader.end_of(offset)
    return headers


def _read_raw(reader: RecordReader, offsets: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the first 40 bytes of every record as RAW_HEADER (N,), zeros after the end of the file."""
    outside = (offsets < 0) | (offsets > reader.size - _FRAME_BYTES - _HEADER_BYTES)
    require_sound(
        reader, offsets, keys, outside, f"past the end of the file, which has {reader.size:,} bytes"
    )
    raw = np.zeros(len(offsets), dtype=RAW_HEADER)
    raw_bytes = raw.view(np.uint8).reshape(len(offsets), RAW_HEADER.itemsize)
    start = 0
    while start < len(offsets):
        first = int(offsets[start])
        stop = int(np.searchsorted(offsets, first + _SPAN_BYTES))
        span = int(offsets[stop - 1]) - first + RAW_HEADER.itemsize
        if span <= (stop - start) * _DENSE_BYTES:
            data = reader.bytes_at(first, span)
            block = np.frombuffer(data + bytes(span - len(data)), dtype=np.uint8)
            position = offsets[start:stop, None] - first + np.arange(RAW_HEADER.itemsize)
            raw_bytes[start:stop] = block[position]
        else:
            for offset in offsets[start:stop].tolist():  # at once: an object store needs long for each answer
                reader.prefetch_bytes(offset, RAW_HEADER.itemsize)
            for row in range(start, stop):
                data = reader.bytes_at(int(offsets[row]), RAW_HEADER.itemsize)
                raw_bytes[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        start = stop
    return raw


def require_sound(
    reader: RecordReader, offsets: np.ndarray, keys: np.ndarray, wrong: np.ndarray, what: str
) -> None:
    """Raise RecordError for the first record that is wrong, bool (N,)."""
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise RecordError(
            f"{reader.location(int(offsets[row]), int(keys[row]))}: {what}; {recordio.DAMAGE_ADVICE}"
        )
