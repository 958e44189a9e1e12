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
class Records:
    """Places of N records in a file."""

    reader: RecordReader
    key: np.ndarray
    """int64 (N,)."""
    offset: np.ndarray
    """First byte, int64 (N,)."""

    def __len__(self) -> int:
        return len(self.key)

    def __getitem__(self, rows: slice | np.ndarray) -> Records:
        return Records(self.reader, self.key[rows], self.offset[rows])

    def location(self, row: int) -> str:
        """Return file, key and byte offset for error messages."""
        return self.reader.location(int(self.offset[row]), int(self.key[row]))

    def require_none(self, wrong: np.ndarray, what: str) -> None:
        """Raise RecordError for the first record that is wrong, bool (N,)."""
        if wrong.any():
            raise RecordError(
                f"{self.location(int(wrong.argmax()))}: {what}; {recordio.damage_advice(self.reader.path)}"
            )


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


def read_headers(records: Records) -> Headers:
    """Read the headers of N records at ascending offsets.

    Raises:
        RecordError: if no complete record starts at an offset.
    """
    reader, offset = records.reader, records.offset
    raw = _read_raw(records)
    length = (raw["word"] & recordio.MAX_LENGTH).astype(np.int64)
    flag = raw["flag"].astype(np.int64)
    is_whole = raw["word"] >> recordio.KIND_SHIFT == recordio.PART_WHOLE
    end = offset + _FRAME_BYTES + length
    image_bytes = length - _HEADER_BYTES - 4 * flag
    records.require_none(raw["magic"] != recordio.MAGIC, "no record starts there")
    records.require_none(end > reader.size, "the file ends inside this record")
    records.require_none(is_whole & (image_bytes < 0), "its header announces more labels than it contains")
    with np.errstate(invalid="ignore"):  # a damaged label may be a signaling NaN
        label = np.where(flag > 0, raw["first"], raw["label"]).astype(np.float64)
        second = np.where(flag > 1, raw["second"], 0).astype(np.float64)
    shift, mask = np.uint64(recordio.EXACT_LABEL_SHIFT), np.uint64(recordio.EXACT_LABEL_MASK)
    is_exact = raw["id2"] >> shift == np.uint64(recordio.EXACT_LABEL) >> shift
    exact = (raw["id2"][is_exact] & mask).astype(np.float64)
    # The exact label, rounded, is the other one: else a bit of one of them is damaged.
    contradicts = np.zeros(len(label), bool)
    contradicts[is_exact] = exact.astype(np.float32) != label[is_exact].astype(np.float32)
    records.require_none(contradicts & is_whole, "its two labels differ")
    label[is_exact] = exact
    # A split can fall into the header itself. Split records are rare: read them completely.
    for row in np.flatnonzero(~is_whole).tolist():
        start = int(offset[row])
        header, image = decode_record(reader.read_at(start, int(records.key[row])), records.location(row))
        label[row], is_exact[row], image_bytes[row] = header.label, header.is_exact, len(image)
        end[row] = reader.end_of(start)
    return Headers(label, is_exact, second, image_bytes, end)


def _read_raw(records: Records) -> np.ndarray:
    """Return the first 40 bytes of every record as RAW_HEADER (N,), zeros after the end of the file."""
    reader, offset = records.reader, records.offset
    outside = offset > reader.size - _FRAME_BYTES - _HEADER_BYTES
    records.require_none(outside, f"past the end of the file, which has {reader.size:,} bytes")
    raw = np.zeros(len(offset), dtype=RAW_HEADER)
    raw_bytes = raw.view(np.uint8).reshape(len(offset), RAW_HEADER.itemsize)
    start = 0
    while start < len(offset):
        first = int(offset[start])
        stop = int(np.searchsorted(offset, first + _SPAN_BYTES))
        span = int(offset[stop - 1]) - first + RAW_HEADER.itemsize
        if span <= (stop - start) * _DENSE_BYTES:
            data = reader.bytes_at(first, span)
            block = np.frombuffer(data + bytes(span - len(data)), dtype=np.uint8)
            raw_bytes[start:stop] = block[offset[start:stop, None] - first + np.arange(RAW_HEADER.itemsize)]
        else:
            places = offset[start:stop].tolist()
            for place in places:  # at once: an object store needs long for each answer
                reader.prefetch_bytes(place, RAW_HEADER.itemsize)
            for row, place in enumerate(places, start):
                data = reader.bytes_at(place, RAW_HEADER.itemsize)
                raw_bytes[row, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        start = stop
    return raw
