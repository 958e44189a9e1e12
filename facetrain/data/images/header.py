"""Format, size and orientation of an encoded image, read from its header without decoding.

The size must be known before decoding: the header of a tiny file can claim a size that fills the memory.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_PIXELS = 40_000_000
"""40 megapixels, which need 230 MiB while OpenCV decodes them. The header of a tiny file can claim 100,000 × 100,000
pixels; it is refused before decoding."""
_MAX_BYTES = 1 << 30
"""More than any image of `MAX_PIXELS`, and less than Linux reads at once. A sparse file may claim any size."""
FORMAT_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif"),
    "PNG": (".png",),
    "BMP": (".bmp", ".dib"),
    "WebP": (".webp",),
    "AVIF": (".avif",),
    "HEIC": (".heic", ".heif"),
    "PNM": (".pnm", ".pbm", ".pgm", ".ppm"),
    "TIFF": (".tif", ".tiff"),
}
"""Suffixes of the files of each format, in lower case, the usual one first: formats of OpenCV, and HEIC."""
IMAGE_SUFFIXES = frozenset(suffix for suffixes in FORMAT_SUFFIXES.values() for suffix in suffixes)

# JPEG markers before the image size: 0xC0 to 0xCF without DHT, JPG and DAC (ITU-T T.81, table B.1).
_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_JPEG_SEGMENT, _JPEG_SIZE = struct.Struct(">BBH"), struct.Struct(">HH")
_EXIF_MARKER, _START_OF_SCAN = 0xE1, 0xDA
_END_OF_IMAGE = b"\xff\xd9"
_LONG_RUN = 128
_PNM = re.compile(rb"P([1-6])" + 2 * rb"(?:\s|#[^\n]*\n)+(\d{1,9})" + rb"(?:(?:\s|#[^\n]*\n)+(\d{1,9}))?\s")
_PNM_HEADER_BYTES = 4096
_PNM_WHITE = (b"255", b"65535")
"""Values of white in a gray or color PNM image: OpenCV takes others for shades of gray."""
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_ORIENTATION, _TIFF_TILE_WIDTH, _TIFF_TILE_HEIGHT = 256, 257, 274, 322, 323
_TIFF_SHORT = 3
_TIFF_ELSEWHERE = frozenset((5, 10, 12, 16, 17))
"""Types of 8 bytes, which are at another place of the file: the entry has an offset, and libtiff follows it."""
_ISOBMFF_HEADER_BYTES = 1 << 16
"""Bytes in which the size of an AVIF or HEIC image must appear."""


class ImageHeader(NamedTuple):
    """Format (a key of `FORMAT_SUFFIXES`), and width and height in pixels before any rotation."""

    format: str
    width: int
    height: int


def read_header(data: bytes) -> ImageHeader | None:
    """Return the header of an encoded image; None for other data, and for a header that is cut off."""
    try:
        return _read_header(data)
    except (struct.error, IndexError):
        return None


def is_image_name(name: str) -> bool:
    """Return whether a name or a path ends with a suffix of an image, in any case."""
    return name[name.rfind(".") :].lower() in IMAGE_SUFFIXES


def size_fault(num_bytes: int) -> str:
    """Return why no image has so many bytes, before they are read into memory; empty if one may have them."""
    return f"has {num_bytes:,} bytes, more than any image" if num_bytes > _MAX_BYTES else ""


def jpeg_orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG, 1 to 8; 1 (upright) if it has none."""
    if data.find(b"Exif\0\0", 0, 1 << 16) < 0:  # most images of datasets: no need to walk the segments
        return 1
    for position, marker in _jpeg_segments(data):
        if marker == _EXIF_MARKER and data.startswith(b"Exif\0\0", position + 4):
            with contextlib.suppress(struct.error):
                # Not up to the end of the file: its copies for many such segments would take quadratic time.
                end = position + 2 + _JPEG_SEGMENT.unpack_from(data, position)[2]
                orientation = _tiff_tags(data[position + 10 : end]).get(_TIFF_ORIENTATION, 1)
                return orientation if 1 <= orientation <= 8 else 1
    return 1


def is_cmyk_jpeg(data: bytes) -> bool:
    """Return whether a JPEG has four channels."""
    frame = _start_of_frame(data) if data[:2] == b"\xff\xd8" else None
    return frame is not None and data[frame + 9 : frame + 10] == b"\x04"


def is_complete_jpeg(data: bytes) -> bool:
    """Return whether a JPEG has an end marker after the start of its image; a thumbnail in its header has its own."""
    return data.endswith(_END_OF_IMAGE) or data.rfind(_END_OF_IMAGE) > _start_of_scan(data)


def flat_blocks_in_zeros(data: bytes) -> int:
    """Return how many blocks of 8 × 8 pixels of one color would explain the first long run of zeros in an image.

    0 without such a run, and for formats other than JPEG and WebP. A lost sector or an unfinished copy leaves such a
    run, and decoders fill the rest with wrong pixels in silence. It may also be the code of a large area of one color:
    a block takes about 6 bits in a JPEG, and a byte of a WebP is the code of 40 blocks or more.
    """
    if data[:2] == b"\xff\xd8":
        start, end, blocks_per_byte = _start_of_scan(data), len(data), 0.5
    else:
        start, end, blocks_per_byte = *_webp_image(data), 32
    zeros = data.find(bytes(_LONG_RUN), start, end)
    if zeros < 0:
        return 0
    rest = data[zeros:end]
    return int(blocks_per_byte * (len(rest) - len(rest.lstrip(b"\0"))))


def _start_of_scan(data: bytes) -> int:
    """Return where the image of a JPEG begins; its length if there is none."""
    return next((place for place, marker in _jpeg_segments(data) if marker == _START_OF_SCAN), len(data))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the position and the marker of the segments of a JPEG up to its image, or to bytes between them."""
    position, last, marker = 2, len(data) - _JPEG_SEGMENT.size, 0
    while position <= last and marker != _START_OF_SCAN:
        first, marker, length = _JPEG_SEGMENT.unpack_from(data, position)
        if first != 0xFF:
            return
        # A byte 0xFF may fill the space before a marker (ITU-T T.81, B.1.1.2).
        if marker != 0xFF:
            yield position, marker
        position += 1 if marker == 0xFF else 2 + length


def _read_header(data: bytes) -> ImageHeader | None:
    if data[:2] == b"\xff\xd8":
        frame = _start_of_frame(data)
        if frame is None:
            return None
        height, width = _JPEG_SIZE.unpack_from(data, frame + 5)
        return ImageHeader("JPEG", width, height)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return ImageHeader("PNG", *struct.unpack_from(">II", data, 16))
    if data[:2] == b"BM":
        width, height = struct.unpack_from("<ii", data, 18)
        return ImageHeader("BMP", abs(width), abs(height))
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_header(data)
    if data[4:8] == b"ftyp":
        # The first brand can be mif1, which any coded image may have; the compatible brands name the codec.
        brands = data[8 : int.from_bytes(data[:4], "big")]
        name = "AVIF" if b"avi" in brands else "HEIC" if b"hei" in brands else ""
        return _largest_box_size(name, data) if name else None
    if data[:4] in (b"II*\x00", b"MM\x00*"):
        return _tiff_header(data)
    match = _PNM.match(data[:_PNM_HEADER_BYTES])
    if match is None or (match[1] not in b"14" and match[4] not in _PNM_WHITE):
        return None
    return ImageHeader("PNM", int(match[2]), int(match[3]))


def _start_of_frame(data: bytes) -> int | None:
    """Return the position of a JPEG's marker that the size and the number of channels follow; None without one."""
    return next((position for position, marker in _jpeg_segments(data) if marker in _START_OF_FRAME), None)


def _webp_header(data: bytes) -> ImageHeader | None:
    """Return the header of a lossy, lossless or extended WebP (RFC 9649, sections 2.5 to 2.7)."""
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return ImageHeader("WebP", width & 0x3FFF, height & 0x3FFF)
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return ImageHeader("WebP", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8X" and len(data) >= 30:
        width, height = (int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27))
        return ImageHeader("WebP", width, height)
    return None


def _webp_image(data: bytes) -> tuple[int, int]:
    """Return where the image of a WebP begins and ends (RFC 9649, section 2.3); its length for both without one."""
    place = 12 if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else len(data)
    while place < len(data):
        end = place + 8 + int.from_bytes(data[place + 4 : place + 8], "little")
        if data[place : place + 4] in (b"VP8 ", b"VP8L"):
            return place, end
        place = end + end % 2
    return len(data), len(data)


def _largest_box_size(name: str, data: bytes) -> ImageHeader | None:
    """Return the largest size in the boxes `ispe`: an AVIF also has the sizes of tiles and thumbnails."""
    sizes, position = [], data.find(b"ispe", 0, _ISOBMFF_HEADER_BYTES)
    while position >= 0:
        sizes.append(struct.unpack_from(">II", data, position + 8))
        position = data.find(b"ispe", position + 4, _ISOBMFF_HEADER_BYTES)
    return ImageHeader(name, *max(sizes, key=math.prod)) if sizes else None


def _tiff_header(data: bytes) -> ImageHeader | None:
    """Return the header of a TIFF, with the size of its tiles if they are too large: they are decoded whole."""
    tags = _tiff_tags(data)
    size = tags.get(_TIFF_WIDTH, -1), tags.get(_TIFF_HEIGHT, -1)
    tile = tags.get(_TIFF_TILE_WIDTH, 0), tags.get(_TIFF_TILE_HEIGHT, 0)
    if min(*size, *tile) < 0:
        return None
    return ImageHeader("TIFF", *(tile if tile[0] * tile[1] > MAX_PIXELS else size))


def _tiff_tags(data: bytes) -> dict[int, int]:
    """Return the first value of each tag in the first directory of a TIFF, or of EXIF, which has the same layout.

    Of a repeated tag the first entry counts, as for libtiff. A number outside of its entry is -1.
    """
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "I", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    tags: dict[int, int] = {}
    for entry in range(start + 2, start + 2 + 12 * count, 12):
        tag, kind = struct.unpack_from(order + "HH", data, entry)
        (value,) = struct.unpack_from(order + ("H" if kind == _TIFF_SHORT else "I"), data, entry + 8)
        tags.setdefault(tag, -1 if kind in _TIFF_ELSEWHERE else value)
    return tags
