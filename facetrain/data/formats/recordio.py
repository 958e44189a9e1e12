"""MXNet's RecordIO format, read and written without MXNet.

A file is a sequence of parts, each padded to a multiple of four bytes:

    uint32 magic 0xced7230a | uint32: 3 bits kind, 29 bits length | payload | padding

A payload that contains the magic at a multiple of four is split there, and the magic is left out. The kinds of
the parts are then 1 (first), 2 (middle) and 3 (last); an unsplit payload has kind 0 (dmlc-core, recordio.h).

A payload is a little-endian header, `flag` further labels, and an image:

    uint32 flag | float32 label | uint64 id | uint64 id2 | float32 labels[flag] | encoded image

float32 represents whole numbers exactly only up to 2^24. Our writer also stores the exact label in the lower 48
bits of `id2`, with the tag 0x4654 in the upper 16; MXNet and InsightFace ignore this field.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Self

from facetrain.data.beside_dataset import PROPERTY_FILE, TRAINING_SET
from facetrain.data.images.header import size_fault
from facetrain.data.positional_file import PositionalFile
from facetrain.errors import RecordError

MAGIC = 0xCED7230A
KIND_SHIFT = 29
MAX_LENGTH = (1 << KIND_SHIFT) - 1
PART_WHOLE, PART_FIRST, PART_MIDDLE, PART_LAST = range(4)
EXACT_LABEL_SHIFT = 48
EXACT_LABEL_MASK = (1 << EXACT_LABEL_SHIFT) - 1
_EXACT_LABEL_TAG = 0x4654
EXACT_LABEL = _EXACT_LABEL_TAG << EXACT_LABEL_SHIFT
"""`id2` of label 0; the exact label is added to it."""
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_LABEL = struct.Struct("<f")
_HEADER = struct.Struct("<IfQQ")
_FRAME_AND_HEADER = struct.Struct("<IIIfQQ")
_FIRST_READ_BYTES = 1 << 14
"""Bytes of the first read of a record; most aligned faces of 112 × 112 have fewer."""


@dataclass(frozen=True)
class RecordHeader:
    """Header of a record. `labels` has one number if `flag` is 0, otherwise `flag` numbers."""

    flag: int
    labels: tuple[float, ...]
    id: int = 0
    id2: int = 0

    @classmethod
    def of_image(cls, label: int, key: int) -> RecordHeader:
        """Return the header of an image of identity `label`."""
        return cls(flag=0, labels=(float(label),), id=key, id2=EXACT_LABEL | label)

    @property
    def is_exact(self) -> bool:
        """Whether our writer stored the exact label."""
        return self.id2 >> EXACT_LABEL_SHIFT == _EXACT_LABEL_TAG

    @property
    def label(self) -> float:
        """Identity: the exact label if there is one, otherwise the float32 label."""
        return self.id2 & EXACT_LABEL_MASK if self.is_exact else self.labels[0]


def encode_record(header: RecordHeader, image: bytes) -> bytes:
    """Return the payload of a record: header and image."""
    first = 0.0 if header.flag else header.labels[0]
    packed = _HEADER.pack(header.flag, first, header.id, header.id2)
    return packed + struct.pack(f"<{header.flag}f", *(header.labels if header.flag else ())) + image


def decode_record(payload: bytes, location: str) -> tuple[RecordHeader, bytes]:
    """Split a payload into its header and the image, which may be empty.

    Raises:
        RecordError: if the payload is shorter than the header announces; the message begins with `location`.
    """
    if len(payload) < _HEADER.size:
        raise RecordError(
            f"{location}: {len(payload)} bytes are too few for a record header of {_HEADER.size} bytes"
        )
    flag, label, id_, id2 = _HEADER.unpack_from(payload)
    end = _HEADER.size + 4 * flag
    if end > len(payload):
        raise RecordError(
            f"{location}: the header announces {flag:,} labels, but the record has {len(payload):,} bytes"
        )
    labels = struct.unpack_from(f"<{flag}f", payload, _HEADER.size) if flag else (label,)
    return RecordHeader(flag, labels, id_, id2), payload[end:]


def damage_advice(rec_path: Path) -> str:
    """Return what may be wrong with a .rec and what to do, as the end of a message."""
    index = rec_path.with_suffix(".idx")
    if not index.exists():
        return "the file is damaged: download it again"
    return (
        f"the file is damaged, or {index.name} belongs to another file: download it again, or remove {index.name}, "
        "and it will be rebuilt"
    )


class RecordReader(PositionalFile):
    """Reader of records by byte offset or in sequence, for any number of threads and processes."""

    error = read_error = RecordError

    def read_at(self, offset: int, key: int | None = None) -> bytes:
        """Return the payload of the record at a byte offset; `key` appears in error messages only.

        Allocates at most the size of the file, whatever length the record announces.

        Raises:
            RecordError: if there is no complete record, or it is larger than any image.
        """
        parts: list[bytes] = []
        start, kind = offset, PART_FIRST
        while kind not in (PART_WHOLE, PART_LAST):
            kind, length = self._read_frame(offset, start, key)
            if fault := size_fault(offset + length - start):
                raise RecordError(f"{self.location(start, key)}: {fault}")
            parts.append(self.bytes_at(offset + _FRAME.size, length))
            if len(parts[-1]) < length:
                raise RecordError(
                    f"{self.location(start, key)}: the file ends inside the record; it was changed while it was read"
                )
            offset += _FRAME.size + length + -length % 4
        return _MAGIC_BYTES.join(parts)

    def image_at(self, offset: int, size: int) -> tuple[float, bytes] | None:
        """Return label and image of a record: the fast path of `read_at` and `decode_record`.

        Returns None if the record is longer than `size` bytes, split into parts, or damaged; `read_at` then
        reads it or reports the damage. A size of 0 or less means unknown.
        """
        # Most records are shorter than the first read: one system call, not two.
        count = size if 0 < size < _FIRST_READ_BYTES else _FIRST_READ_BYTES
        start = self.bytes_at(offset, count)
        if len(start) < _FRAME_AND_HEADER.size:
            return None
        magic, word, flag, label, _, id2 = _FRAME_AND_HEADER.unpack_from(start)
        begin = _FRAME_AND_HEADER.size + 4 * flag
        # The kind of a split part is in the upper bits of `word`, which puts `end` far beyond `start`.
        end = _FRAME.size + word
        if magic != MAGIC or not begin <= end <= len(start):
            return None
        if id2 >> EXACT_LABEL_SHIFT == _EXACT_LABEL_TAG:
            label = id2 & EXACT_LABEL_MASK
        elif flag:
            (label,) = _LABEL.unpack_from(start, _FRAME_AND_HEADER.size)
        return label, start[begin:end]

    def scan_offsets(self) -> Iterator[int]:
        """Yield the offset of every record, without reading payloads."""
        offset = 0
        while offset < self.size:
            yield offset
            offset = self.end_of(offset)

    def end_of(self, start: int) -> int:
        """Return the byte after a record and its padding.

        Raises:
            RecordError: if there is no complete record.
        """
        offset, kind = start, PART_FIRST
        while kind not in (PART_WHOLE, PART_LAST):
            kind, length = self._read_frame(offset, start, None)
            offset += _FRAME.size + length + -length % 4
        return offset

    def location(self, offset: int, key: int | None) -> str:
        """Return file, key and byte offset of a record for error messages."""
        return f"{self.path}: {'record' if key is None else f'key {key}'} at byte {offset:,}"

    def _read_frame(self, offset: int, start: int, key: int | None) -> tuple[int, int]:
        """Return kind and length of the part at `offset`, in the record that begins at `start`."""
        frame = self.bytes_at(offset, _FRAME.size)
        magic, word = _FRAME.unpack(frame.ljust(_FRAME.size, b"\0"))
        kind, length = word >> KIND_SHIFT, word & MAX_LENGTH
        end = offset + _FRAME.size + length
        fault = ""
        if len(frame) < _FRAME.size or (magic == MAGIC and end > self.size):
            fault = f"the file is truncated: the record ends past the end of the file at byte {self.size:,}"
        elif magic != MAGIC:
            fault = f"no record starts at byte {offset:,} (found {magic:#010x}, not {MAGIC:#010x})"
        elif (kind in (PART_WHOLE, PART_FIRST)) != (offset == start) or kind > PART_LAST:
            fault = f"a part of kind {kind} at byte {offset:,} is out of order"
        if fault:
            raise RecordError(f"{self.location(start, key)}: {fault}; {damage_advice(self.path)}")
        return kind, length


class RecordWriter:
    """Writer of a .rec and its .idx, which are on the disk after the `with` block.

    They are incomplete if it fails: write them into a folder that appears complete or not at all.
    """

    def __init__(self, rec_path: Path) -> None:
        self._rec = rec_path.open("wb")
        self._idx = rec_path.with_suffix(".idx").open("w", encoding="ascii")

    def write(self, key: int, header: RecordHeader, image: bytes) -> None:
        """Append a record.

        Raises:
            RecordError: if a part is longer than the format allows (512 MiB).
        """
        offset = self._rec.tell()
        parts = split_payload(encode_record(header, image))
        for number, part in enumerate(parts):
            if len(part) > MAX_LENGTH:
                raise RecordError(
                    f"{self._rec.name}: key {key}: {len(part):,} bytes exceed the 512 MiB of a record"
                )
            # The first part has no part before it, the last one none after it, and a whole payload neither.
            kind = (PART_WHOLE, PART_FIRST, PART_LAST, PART_MIDDLE)[
                (number < len(parts) - 1) + 2 * (number > 0)
            ]
            self._rec.write(_FRAME.pack(MAGIC, kind << KIND_SHIFT | len(part)))
            self._rec.write(part + bytes(-len(part) % 4))
        self._idx.write(f"{key}\t{offset}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._rec, self._idx:
            for file in (self._rec, self._idx) if kind is None else ():
                file.flush()
                os.fsync(file.fileno())


def split_payload(payload: bytes) -> list[bytes]:
    """Split a payload at every magic at a multiple of four; the magic itself is left out."""
    parts, start, found = [], 0, payload.find(_MAGIC_BYTES)
    while found != -1:
        if found % 4 == 0:
            parts.append(payload[start:found])
            start = found + 4
        found = payload.find(_MAGIC_BYTES, found + 1)
    return [*parts, payload[start:]]


def write_identities(
    folder: Path, counts: Sequence[int], images: Iterable[tuple[int, bytes]], image_size: int
) -> None:
    """Write encoded images with their labels into a folder, in InsightFace's layout: train.rec, train.idx, property.

    Args:
        folder: output folder; created if it does not exist.
        counts: number of images of each identity.
        images: (label, encoded image), as many as `counts` announces, in any order. If they are not sorted by label,
            no range would be true: the record of the last identity then has all images, and the others have none. So
            InsightFace's reader, which joins the ranges, reads each image once, and ours sees that it must read the
            label of every record.
        image_size: side of the images in pixels, for `property`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    past = sum(counts) + 1
    starts = [1, *(1 + total for total in accumulate(counts))]
    is_sorted, before = True, 0
    with RecordWriter(folder / TRAINING_SET) as writer:
        writer.write(0, RecordHeader(flag=2, labels=(float(past), float(past + len(counts)))), b"")
        for key, (label, image) in enumerate(images, start=1):
            writer.write(key, RecordHeader.of_image(label, key), image)
            is_sorted, before = is_sorted and label >= before, label
        for label in range(len(counts)):
            ends = (starts[label], starts[label + 1])
            if not is_sorted:
                ends = (1 if label == len(counts) - 1 else past, past)
            writer.write(past + label, RecordHeader(flag=2, labels=tuple(map(float, ends))), b"")
    (folder / PROPERTY_FILE).write_text(f"{len(counts)},{image_size},{image_size}\n", encoding="ascii")
