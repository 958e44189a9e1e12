"""MXNet's RecordIO, read and written without MXNet.

A file is a chain of parts, each padded to four bytes:

    uint32 magic 0xced7230a | uint32: 3 bits place, 29 bits length | payload | padding

A payload that holds the magic at a multiple of four is cut there: the parts carry the place 1
(first), 2 (middle) and 3 (last), and the magic between them is left out. A payload in one part has
place 0. (dmlc-core, recordio.h.)

A payload is a header, little-endian, with `flag` further float32 labels behind it, and an image:

    uint32 flag | float32 label | uint64 id | uint64 id2 | float32 labels[flag] | encoded image

float32 holds labels exactly only to 2^24. Our writer puts the exact one into `id2`, behind a mark in
its upper 16 bits; MXNet and InsightFace do not look at that field.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from facetrain.data.positional_file import File
from facetrain.errors import RecordError

MAGIC = 0xCED7230A
MAX_LENGTH = (1 << 29) - 1
_MARK = 0x4654
LABEL_MARK = _MARK << 48
_LABEL_BITS = (1 << 48) - 1
_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_LABEL = struct.Struct("<f")
_HEADER = struct.Struct("<IfQQ")
_FRAME_AND_HEADER = struct.Struct("<IIIfQQ")
WHOLE, FIRST, MIDDLE, LAST = range(4)
_GUESS = 1 << 14


@dataclass(frozen=True)
class RecordHeader:
    """What stands before an image. `labels` has one number where flag is 0, else `flag` numbers."""

    flag: int
    labels: tuple[float, ...]
    id: int = 0
    id2: int = 0

    @classmethod
    def of_image(cls, label: int, key: int) -> RecordHeader:
        """Build the header of an image of identity `label`."""
        return cls(flag=0, labels=(float(label),), id=key, id2=LABEL_MARK | label)

    @property
    def label(self) -> float:
        """The identity: exact where our writer kept it, else the float32 that the format has."""
        if self.id2 >> 48 == _MARK:
            return self.id2 & _LABEL_BITS
        return self.labels[0]


def encode_record(header: RecordHeader, image: bytes) -> bytes:
    """Put a header before an image."""
    first = 0.0 if header.flag else header.labels[0]
    packed = _HEADER.pack(header.flag, first, header.id, header.id2)
    return packed + struct.pack(f"<{header.flag}f", *(header.labels if header.flag else ())) + image


def decode_record(payload: bytes, where: str) -> tuple[RecordHeader, bytes]:
    """Take a payload apart into its header and the image, which may be empty.

    Raises:
        RecordError: the payload is shorter than the header says.
    """
    if len(payload) < _HEADER.size:
        raise RecordError(
            f"{where}: {len(payload)} bytes are too few for a record's header of {_HEADER.size}"
        )
    flag, label, id_, id2 = _HEADER.unpack_from(payload)
    end = _HEADER.size + 4 * flag
    if end > len(payload):
        raise RecordError(
            f"{where}: the header speaks of {flag:,} labels, the record has {len(payload):,} bytes"
        )
    labels = struct.unpack_from(f"<{flag}f", payload, _HEADER.size) if flag else (label,)
    return RecordHeader(flag, labels, id_, id2), payload[end:]


class RecordReader(File):
    """Read records by their offset, or one after the other, from any number of threads and processes."""

    error = RecordError

    def read_at(self, offset: int, key: int | None = None) -> bytes:
        """Return the payload of the record at a byte offset; `key` is for the message of an error.

        Raises:
            RecordError: no whole record stands there. Nothing larger than the file is ever allocated.
        """
        # Most records of faces are shorter than the first guess: one call to the system, not two.
        start = self._guess(offset)
        if len(start) >= _FRAME.size:
            magic, word = _FRAME.unpack_from(start)
            end = _FRAME.size + (word & MAX_LENGTH)
            if magic == MAGIC and word >> 29 == WHOLE and end <= len(start):
                return start[_FRAME.size : end]
        return self._read(offset, key)[0]

    def image_at(self, offset: int, size: int) -> tuple[float, bytes] | None:
        """Do what `read_at` and `decode_record` do, where every microsecond counts: return label and image.

        None where the record is longer than `size` bytes, in several parts, or damaged. A `size` that no
        ordinary record has, 0 or less among them, is taken for unknown.
        """
        start = self._guess(offset, size if 0 < size < _GUESS else _GUESS)
        if len(start) < _FRAME_AND_HEADER.size:
            return None
        magic, word, flag, label, _, id2 = _FRAME_AND_HEADER.unpack_from(start)
        begin = _FRAME_AND_HEADER.size + 4 * flag
        # The place of a part stands above its length: such a record ends far behind what was read.
        end = _FRAME.size + word
        if magic != MAGIC or not begin <= end <= len(start):
            return None
        if id2 >> 48 == _MARK:
            label = id2 & _LABEL_BITS
        elif flag:
            (label,) = _LABEL.unpack_from(start, _FRAME_AND_HEADER.size)
        return label, start[begin:end]

    def _guess(self, offset: int, size: int = _GUESS) -> bytes:
        return self.bytes_at(offset, size) if offset >= 0 else b""

    def scan(self) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, payload) of every record from the start, without an index."""
        offset = 0
        while offset < self.size:
            payload, end = self._read(offset, None)
            yield offset, payload
            offset = end

    def scan_offsets(self) -> Iterator[int]:
        """Yield the offset of every record, reading no payloads."""
        offset = 0
        while offset < self.size:
            start, place = offset, FIRST
            while place not in (WHOLE, LAST):
                place, length = self._frame(offset, start, None)
                offset += _FRAME.size + length + -length % 4
            yield start

    def location(self, offset: int, key: int | None) -> str:
        """Name a record, for messages."""
        return f"{self.path}: {'record' if key is None else f'key {key}'} at byte {offset:,}"

    def _read(self, offset: int, key: int | None) -> tuple[bytes, int]:
        parts: list[bytes] = []
        start, place = offset, FIRST
        while place not in (WHOLE, LAST):
            place, length = self._frame(offset, start, key)
            parts.append(self.bytes_at(offset + _FRAME.size, length))
            if len(parts[-1]) < length:
                raise RecordError(
                    f"{self.location(start, key)}: the file ends inside the record; it shrank while being read"
                )
            offset += _FRAME.size + length + -length % 4
        return (parts[0] if place == WHOLE else _MAGIC_BYTES.join(parts)), offset

    def _frame(self, offset: int, start: int, key: int | None) -> tuple[int, int]:
        """Return kind and length of the part at `offset` of the record that begins at `start`."""
        frame = self.bytes_at(offset, _FRAME.size) if offset >= 0 else b""
        if len(frame) < _FRAME.size:
            raise RecordError(
                f"{self.location(start, key)}: byte {offset:,} is past the end of the file, which has "
                f"{self.size:,}; the file is cut off or the index belongs to another: download it again, or "
                "remove the .idx"
            )
        magic, word = _FRAME.unpack(frame)
        place, length = word >> 29, word & MAX_LENGTH
        if magic != MAGIC:
            raise RecordError(
                f"{self.location(start, key)}: no record starts at byte {offset:,} (found {magic:#010x}, not "
                f"{MAGIC:#010x}); the index belongs to another file, or the file is damaged: remove the "
                ".idx to "
                "have it rebuilt"
            )
        if (place in (WHOLE, FIRST)) != (offset == start) or place > LAST:
            raise RecordError(
                f"{self.location(start, key)}: part of kind {place} at byte {offset:,} is out of order; "
                "the file is damaged"
            )
        end = offset + _FRAME.size + length
        if end > self.size:
            raise RecordError(
                f"{self.location(start, key)}: the record ends at byte {end:,}, the file at {self.size:,}; "
                "the file is cut off: download it again"
            )
        return place, length


class RecordWriter:
    """Write a .rec and its .idx; they appear under their names when all is written, or not at all."""

    def __init__(self, rec_path: Path, idx_path: Path | None = None) -> None:
        self._paths = [rec_path, idx_path or rec_path.with_suffix(".idx")]
        self._scratch = [path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in self._paths]
        self._rec = self._scratch[0].open("wb")
        self._idx = self._scratch[1].open("w", encoding="ascii")

    def write(self, key: int, header: RecordHeader, image: bytes) -> None:
        """Append a record.

        Raises:
            RecordError: a part is longer than the format can say (512 MiB).
        """
        offset = self._rec.tell()
        parts = split_payload(encode_record(header, image))
        for number, part in enumerate(parts):
            if len(part) > MAX_LENGTH:
                raise RecordError(
                    f"{self._paths[0]}: key {key}: {len(part):,} bytes are more than a record can hold"
                )
            self._rec.write(_FRAME.pack(MAGIC, _place(number, len(parts)) << 29 | len(part)))
            self._rec.write(part + bytes(-len(part) % 4))
        self._idx.write(f"{key}\t{offset}\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._rec, self._idx):
            if kind is None:
                file.flush()
                os.fsync(file.fileno())
            file.close()
        for scratch, path in zip(self._scratch, self._paths, strict=True):
            if kind is None:
                os.replace(scratch, path)
            else:
                scratch.unlink(missing_ok=True)


def split_payload(payload: bytes) -> list[bytes]:
    """Cut a payload at every magic that stands at a multiple of four; the magic falls away."""
    parts, start, found = [], 0, payload.find(_MAGIC_BYTES)
    while found != -1:
        if found % 4 == 0:
            parts.append(payload[start:found])
            start = found + 4
            found = payload.find(_MAGIC_BYTES, start)
        else:
            found = payload.find(_MAGIC_BYTES, found + 1)
    return [*parts, payload[start:]]


def _place(number: int, count: int) -> int:
    if count == 1:
        return WHOLE
    return FIRST if number == 0 else LAST if number == count - 1 else MIDDLE
