"""Color model, bit depth and transparency of an encoded image, read from its header without decoding."""

from __future__ import annotations

import struct
from typing import NamedTuple

from facetrain.data.images.header import ImageHeader, pnm_largest_value, read_header, tiff_tags

_START_OF_FRAME = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_START_OF_SCAN = 0xDA
# PNG color types (RFC 2083, section 4.1.1): gray, RGB, palette, gray and alpha, RGB and alpha.
_PNG_IS_GRAY, _PNG_HAS_ALPHA = frozenset((0, 4)), frozenset((4, 6))
_TIFF_BITS, _TIFF_PHOTOMETRIC, _TIFF_SAMPLES, _TIFF_EXTRA_SAMPLES = 258, 262, 277, 338
_TIFF_CMYK = 5


class EncodedColor(NamedTuple):
    """Storage of the colors of an image; where a format does not state a property, the usual one is returned."""

    model: str = "RGB"
    """RGB, gray or CMYK."""
    bits: int = 8
    """Bits per channel."""
    has_alpha: bool = False
    """Whether the image has transparency."""


def encoded_color(data: bytes) -> EncodedColor:
    """Return the color storage of an encoded image; RGB with 8 bits for data without a readable header."""
    header = read_header(data)
    if header is None:
        return EncodedColor()
    try:
        return _encoded_color(data, header)
    except (struct.error, IndexError):
        return EncodedColor()


def _encoded_color(data: bytes, header: ImageHeader) -> EncodedColor:
    match header.format:
        case "JPEG":
            return _jpeg_color(data)
        case "PNG":
            bits, kind = data[24], data[25]
            end_of_chunks = data.find(b"IDAT")
            has_alpha = kind in _PNG_HAS_ALPHA or 0 <= data.find(b"tRNS", 33) < end_of_chunks
            return EncodedColor("gray" if kind in _PNG_IS_GRAY else "RGB", max(bits, 8), has_alpha)
        case "TIFF":
            return _tiff_color(data)
        case "WebP":
            extended = data[12:16] == b"VP8X" and bool(data[20] & 0x10)  # RFC 9649, section 2.7
            lossless = data[12:16] == b"VP8L" and bool(struct.unpack_from("<I", data, 21)[0] >> 28 & 1)
            return EncodedColor(has_alpha=extended or lossless)
        case "AVIF":
            has_alpha = b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha" in data[: 1 << 16]
            return EncodedColor(has_alpha=has_alpha)
        case "BMP":
            return EncodedColor(has_alpha=struct.unpack_from("<H", data, 28)[0] == 32)
        case "JPEG 2000":
            channels, bits = struct.unpack_from(">HB", data, data.index(b"ihdr") + 12)
            return EncodedColor("gray" if channels < 3 else "RGB", (bits & 0x7F) + 1, channels in (2, 4))
        case "PNM":
            is_gray = data[1:2] in b"1245"
            bits = 16 if pnm_largest_value(data) > 255 else 8
            return EncodedColor("gray" if is_gray else "RGB", bits)
    return EncodedColor()


def _jpeg_color(data: bytes) -> EncodedColor:
    position = 2
    while data[position] == 0xFF and data[position + 1] != _START_OF_SCAN:
        if data[position + 1] == 0xFF:  # fill byte before a marker
            position += 1
            continue
        if data[position + 1] in _START_OF_FRAME:
            bits, channels = data[position + 4], data[position + 9]
            return EncodedColor({1: "gray", 4: "CMYK"}.get(channels, "RGB"), bits)
        position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return EncodedColor()


def _tiff_color(data: bytes) -> EncodedColor:
    tags = tiff_tags(data)
    order = "<" if data[:2] == b"II" else ">"
    samples, bits = tags.get(_TIFF_SAMPLES, 1), tags.get(_TIFF_BITS, 8)
    if samples > 2:  # the values of three or more channels do not fit into the entry, which has their offset
        (bits,) = struct.unpack_from(order + "H", data, bits)
    photometric = tags.get(_TIFF_PHOTOMETRIC, 2)
    model = "CMYK" if photometric == _TIFF_CMYK else "gray" if photometric in (0, 1) else "RGB"
    return EncodedColor(model, bits, _TIFF_EXTRA_SAMPLES in tags)
