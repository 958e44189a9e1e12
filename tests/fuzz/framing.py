"""Files whose checksums and lengths are right around a mutated content: wrong ones would hide all code behind them."""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib

SEPARATOR = b"\n--\n"
"""Line between the parts of an input that becomes several files."""
_BLOCK = 512
_CHECKSUM = slice(148, 156)
_CATALOG_HEADER_BYTES = 4096


def tar_with_checksums(data: bytes) -> bytes:
    """Give each header of a tar archive its right checksum."""
    archive = bytearray(data)
    for start in range(0, len(archive) - _BLOCK + 1, _BLOCK):
        if archive[start + 257 : start + 262] == b"ustar":
            header = archive[start : start + _BLOCK]
            header[_CHECKSUM] = b" " * 8
            archive[start + 148 : start + 156] = b"%06o\0 " % sum(header)
    return bytes(archive)


def zip_of(members: dict[str, bytes]) -> bytes:
    """Return an archive of stored members; without zipfile, which takes longer than the readers."""
    local, central = bytearray(), bytearray()
    for name, content in members.items():
        size, title = len(content), name.encode()
        fields = struct.pack("<5H3I2H", 20, 0, 0, 0, 33, zlib.crc32(content), size, size, len(title), 0)
        central += (
            b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<3H2I", 0, 0, 0, 0, len(local)) + title
        )
        local += b"PK\3\4" + fields + title + content
    count = len(members)
    return (
        bytes(local + central)
        + b"PK\5\6"
        + struct.pack("<4H2IH", 0, 0, count, count, len(central), len(local), 0)
    )


def members_of(archive: bytes) -> dict[str, bytes]:
    """Return the members of a zip archive by name."""
    with zipfile.ZipFile(io.BytesIO(archive)) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def catalog_of(header: bytes, arrays: bytes) -> bytes:
    """Return a file of cached columns, with the checksum of its arrays."""
    try:
        fields = json.loads(header)
        fields["crc"] = zlib.crc32(arrays)
        header = json.dumps(fields).encode()
    except (ValueError, TypeError, RecursionError):
        pass
    return header.ljust(_CATALOG_HEADER_BYTES) + arrays
