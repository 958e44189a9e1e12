"""Central directory of a zip archive, read without objects per member: archives have millions.

Fields and values: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7 to 4.3.16 and 4.5.3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from facetrain.data.positional_file import PositionalFile
from facetrain.errors import DataError

STORED, DEFLATED = 0, 8
LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
ENTRY_BYTES = _ENTRY.size
"""Bytes of an entry before the name."""
_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_MAX_COMMENT = (1 << 16) - 1
_ENCRYPTED, _UTF8 = 1 << 0, 1 << 11
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF
_ZIP64_EXTRA = 1


class Member(NamedTuple):
    """Entry of the central directory."""

    name: str
    entry: int
    """Byte offset of the entry in the file."""
    name_size: int
    """Bytes of the name in the entry."""
    offset: int
    """Byte offset of the local header."""
    packed: int
    """Bytes in the archive."""
    size: int
    """Bytes after decompression, as declared."""
    method: int
    crc: int
    encrypted: bool


def read_directory(file: PositionalFile) -> Iterator[Member]:
    """Yield the members in the order of the central directory.

    Raises:
        DataError: the file is not a zip archive, or its directory is damaged.
    """
    start, size = _find_directory(file)
    directory = file.bytes_at(start, size)
    position = 0
    while position + _ENTRY.size <= len(directory):
        fields = _ENTRY.unpack_from(directory, position)
        if fields[0] != b"PK\x01\x02":
            break
        _, _, _, flags, method, _, _, crc, packed, full, name_size, extra_size, comment_size, *_, offset = (
            fields
        )
        after_name = position + _ENTRY.size + name_size
        name = _decode_name(directory[after_name - name_size : after_name], flags)
        if _FULL32 in (packed, full, offset):
            extra = directory[after_name : after_name + extra_size]
            packed, full, offset = _with_zip64(extra, packed, full, offset)
        yield Member(
            name, start + position, name_size, offset, packed, full, method, crc, bool(flags & _ENCRYPTED)
        )
        position = after_name + extra_size + comment_size
    if position != len(directory):
        raise DataError(
            f"{file.path}: the directory of the archive is damaged at byte {start + position:,}; download it again"
        )


def name_in_entry(entry: bytes) -> str:
    """Return the name in an entry, which ends with it."""
    return _decode_name(entry[ENTRY_BYTES:], _ENTRY.unpack_from(entry)[3])


def _decode_name(name: bytes, flags: int) -> str:
    """Decode a member's name: UTF-8 or, without the flag, the code page 437 of DOS."""
    return name.decode("utf-8", "surrogateescape") if flags & _UTF8 else name.decode("cp437")


def _find_directory(file: PositionalFile) -> tuple[int, int]:
    """Return the byte offset and the size of the central directory."""
    tail_start = max(file.size - _END.size - _MAX_COMMENT, 0)
    tail = file.bytes_at(tail_start, file.size - tail_start)
    place = tail.rfind(b"PK\x05\x06")
    if place < 0 or place + _END.size > len(tail):
        raise DataError(f"{file.path}: not a zip archive, or truncated; download it again")
    _, disk, first_disk, _, entries, size, start, _ = _END.unpack_from(tail, place)
    if _FULL16 in (disk, entries) or _FULL32 in (size, start):
        at = tail_start + place - _END64_LOCATOR.size
        locator = file.bytes_at(at, _END64_LOCATOR.size) if at >= 0 else b""
        if locator[:4] == b"PK\x06\x07":
            end = file.bytes_at(min(_END64_LOCATOR.unpack(locator)[2], file.size), _END64.size)
            if len(end) == _END64.size and end[:4] == b"PK\x06\x06":
                *_, disk, first_disk, _, _, size, start = _END64.unpack(end)
    if disk or first_disk:
        raise DataError(f"{file.path}: a part of an archive of several files; join them with `zip -s 0`")
    if start + size > file.size:
        raise DataError(f"{file.path}: the directory of the archive is past its end; download it again")
    return start, size


def _with_zip64(extra: bytes, packed: int, full: int, offset: int) -> tuple[int, int, int]:
    """Return the sizes and the offset, with the 64-bit values of the extra field where the 32-bit ones are full."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64_EXTRA:
            values = iter(
                struct.unpack_from(f"<{min(size, len(extra) - position - 4) // 8}Q", extra, position + 4)
            )
            full = next(values, full) if full == _FULL32 else full
            packed = next(values, packed) if packed == _FULL32 else packed
            offset = next(values, offset) if offset == _FULL32 else offset
        position += 4 + size
    return packed, full, offset
