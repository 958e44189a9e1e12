import io
import struct
import sys
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from facetrain.data.images.decode import decode_rgb, encode_jpeg
from facetrain.data.images.header import IMAGE_SUFFIXES, is_complete_jpeg, jpeg_orientation, read_header
from facetrain.errors import ImageError
from tests.support.exif import turned_jpeg

FORMATS = {
    ".jpg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".webp": "WebP", ".avif": "AVIF", ".pgm": "PNM", ".ppm": "PNM",
    ".tif": "TIFF",
}  # fmt: skip


def photo(height=96, width=160):
    image = np.full((height, width, 3), 60, np.uint8)
    image[: height // 2, : width // 2] = 220
    return image


@pytest.mark.parametrize("suffix", sorted(FORMATS))
def test_format_and_size_are_read_and_the_image_is_decoded(suffix):
    if not cv2.haveImageWriter(suffix):
        pytest.skip(f"this OpenCV is built without {suffix}")
    image = photo()[..., 0] if suffix == ".pgm" else photo()
    data = cv2.imencode(suffix, image)[1].tobytes()
    assert suffix in IMAGE_SUFFIXES
    assert read_header(data) == (FORMATS[suffix], 160, 96)
    decoded = decode_rgb(data, location="x")
    assert decoded.shape == (96, 160, 3)
    assert np.abs(decoded.mean((0, 1)) - photo().mean((0, 1))).max() < 6
    assert (decoded[:48, :80].mean() > 180) and (decoded[48:].mean() < 100)
    for end in (4, 12, 20):
        assert read_header(data[:end]) is None or end > 10


@pytest.mark.parametrize("quality", [60, 101])
def test_lossy_and_lossless_webp_have_different_headers(quality):
    data = cv2.imencode(".webp", photo(), [cv2.IMWRITE_WEBP_QUALITY, quality])[1].tobytes()
    assert read_header(data) == ("WebP", 160, 96)


def heic(size=160, brand=b"heic"):
    """Return the boxes of a HEIC that have its brands and its size, without an image."""
    brands = b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0mif1heic"
    return brands + b"\0\0\0\x14ispe\0\0\0\0" + struct.pack(">II", size, size)


def test_heic_needs_another_package_and_has_a_size(monkeypatch):
    assert read_header(heic()) == read_header(heic(brand=b"mif1")) == ("HEIC", 160, 160)
    assert ".heic" in IMAGE_SUFFIXES and read_header(heic().replace(b"heic", b"isom")) is None
    monkeypatch.setitem(sys.modules, "pillow_heif", None)  # not installed
    with pytest.raises(ImageError, match=r"HEIC .*facetrain\[heic\].*heif-convert"):
        decode_rgb(heic(), location="x")
    with pytest.raises(ImageError, match="the limit is"):
        decode_rgb(heic(100_000), location="x")


@pytest.mark.parametrize("error", [ValueError, EOFError, SyntaxError, RuntimeError])
def test_a_damaged_heic_is_an_image_error(monkeypatch, error):
    def open_heif(data, **options):
        raise error("damaged")

    monkeypatch.setitem(sys.modules, "pillow_heif", SimpleNamespace(open_heif=open_heif))
    with pytest.raises(ImageError, match="HEIC"):
        decode_rgb(heic(), location="x")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_heic_is_decoded_to_rgb(mode):
    pillow_heif = pytest.importorskip("pillow_heif")
    pixels = {"RGB": photo(), "RGBA": np.dstack([photo(), photo()[..., 0]]), "L": photo()[..., 0]}[mode]
    file = io.BytesIO()
    pillow_heif.from_bytes(mode, (160, 96), np.ascontiguousarray(pixels).tobytes()).save(file, quality=90)
    decoded = decode_rgb(file.getvalue(), location="x")
    assert decoded.shape == (96, 160, 3) and np.abs(decoded.astype(int) - photo()).mean() < 3
    with pytest.raises(ImageError, match="the HEIC image cannot be decoded|not an image"):
        decode_rgb(file.getvalue()[: len(file.getvalue()) // 2], location="x")


def test_a_header_of_pnm_may_have_comments():
    assert read_header(b"P5\n# made by a camera\n92 # width\n112\n255\n...") == ("PNM", 92, 112)
    assert read_header(b"P5 is not an image") is None


def test_images_with_an_orientation_tag_are_turned_upright():
    upright = photo()
    for orientation, back in ((3, 2), (6, 1), (8, 3)):
        stored = np.rot90(upright, back).copy()  # as the sensor of a turned camera sees it
        data = turned_jpeg(stored, orientation)
        assert jpeg_orientation(data) == orientation
        decoded = decode_rgb(data, location="x")
        assert decoded.shape == upright.shape and np.abs(decoded.astype(int) - upright).mean() < 6
    assert jpeg_orientation(encode_jpeg(upright, 90)) == 1


def test_an_orientation_outside_of_its_segment_does_not_count():
    data = turned_jpeg(photo(), 6)
    (length,) = struct.unpack_from(">H", data, 4)
    short = data[:4] + struct.pack(">H", length - 18) + data[6:]  # without the only entry of the directory
    assert jpeg_orientation(data) == 6 and jpeg_orientation(short) == 1


def tiff(width, further=()):
    """Return the header of a TIFF with two entries of the size, type LONG, and further entries."""
    entries = [(256, 4, width), (257, 4, 96), *further]
    packed = (struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + b"".join(packed) + bytes(4)


def test_the_size_of_a_tiff_is_the_one_that_its_decoder_takes():
    assert read_header(tiff(160)) == ("TIFF", 160, 96)
    assert read_header(tiff(12_000, [(256, 4, 10)])) == ("TIFF", 12_000, 96)
    assert read_header(tiff(160, [(322, 4, 128), (323, 4, 128)])) == ("TIFF", 160, 96)
    assert read_header(tiff(160, [(322, 4, 15_000), (323, 4, 15_000)])) == ("TIFF", 15_000, 15_000)
    elsewhere = tiff(160).replace(struct.pack("<HH", 256, 4), struct.pack("<HH", 256, 16))
    assert read_header(elsewhere) is None  # 160 is the offset of a number of 64 bits


@pytest.mark.parametrize("depth", ["cmyk", "16 bits"])
def test_cmyk_and_16_bit_images_become_8_bit_rgb(depth):
    if depth == "cmyk":
        Image = pytest.importorskip("PIL.Image")
        file = io.BytesIO()
        Image.fromarray(photo()).convert("CMYK").save(file, "JPEG")
        data = file.getvalue()
    else:
        data = cv2.imencode(".png", photo().astype(np.uint16) * 257)[1].tobytes()
    decoded = decode_rgb(data, location="x")
    assert decoded.dtype == np.uint8 and np.abs(decoded.astype(int) - photo()).mean() < 6


def test_a_jpeg_with_fill_bytes_before_a_marker_has_a_size():
    data = encode_jpeg(photo(), 90)
    assert read_header(data[:2] + b"\xff\xff" + data[2:]) == ("JPEG", 160, 96)
    assert read_header(data[:2] + b"\0" + data[2:]) is None


def test_the_end_of_a_thumbnail_is_not_that_of_the_image():
    jpeg, thumbnail = encode_jpeg(photo(), 90), encode_jpeg(photo(24, 40), 90)
    exif = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + thumbnail
    for data in (jpeg, jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + jpeg[2:]):
        for complete in (data, data + b"\0" * 8):
            assert is_complete_jpeg(complete)
        for end in (len(data) - 3, len(data) // 2, len(data) - len(jpeg) + 40, 30):
            assert not is_complete_jpeg(data[:end])
            with pytest.raises(ImageError):
                decode_rgb(data[:end], location="x")
