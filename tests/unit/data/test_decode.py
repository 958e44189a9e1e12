import struct

import numpy as np
import pytest

from facetrain.data.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.data.image_header import encoded_image_size
from facetrain.errors import ImageError
from tests.support.datasets import encoded_image


def test_gray_and_color_images_decode_to_rgb():
    image = np.zeros((8, 8, 3), np.uint8)
    image[..., 0] = 200
    decoded = decode_rgb(encode_jpeg(image, 95), location="x")
    assert decoded.shape == (8, 8, 3) and decoded[..., 0].mean() > 190 and decoded[..., 2].mean() < 10


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF89a", encoded_image(0)[:40], encoded_image(0)[:20], encode_jpeg(np.zeros((8, 8, 3)), 90)[:30]],
)
def test_data_that_is_not_an_image_is_refused_with_its_location(data):
    with pytest.raises(ImageError, match=r"^somewhere: "):
        decode_rgb(data, location="somewhere")


def test_an_image_that_claims_100_000_pixels_per_side_is_refused_before_decoding():
    png = bytearray(encoded_image(0))
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(ImageError, match="100,000 × 100,000"):
        decode_rgb(bytes(png), location="x")


def test_the_size_is_read_from_the_header_of_each_format():
    assert encoded_image_size(encoded_image(0, 24)) == (24, 24)
    assert encoded_image_size(encode_jpeg(np.zeros((20, 30, 3), np.uint8), 90)) == (30, 20)
    assert encoded_image_size(b"nothing") is None


def test_resizing_keeps_the_center():
    image = np.zeros((50, 100, 3), np.uint8)
    image[:, 45:55] = 255
    small = resize_square(image, 20)
    assert small.shape == (20, 20, 3) and small[10, 10, 0] > 200 and small[10, 0, 0] == 0
    assert resize_square(small, 40).shape == (40, 40, 3)
