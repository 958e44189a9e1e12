import struct

import cv2
import numpy as np
import pytest

from facetrain.data.images.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.errors import ImageError
from tests.support.datasets import encoded_image
from tests.support.memory import resident_peak


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


def test_resizing_keeps_the_center():
    image = np.zeros((50, 100, 3), np.uint8)
    image[:, 45:55] = 255
    small = resize_square(image, 20)
    assert small.shape == (20, 20, 3) and small[10, 10, 0] > 200 and small[10, 0, 0] == 0
    assert resize_square(small, 40).shape == (40, 40, 3)


@pytest.mark.parametrize("shape", [(60_000, 1), (3, 600_000)])
def test_a_line_of_pixels_is_not_enlarged_as_a_whole(shape):
    image = np.zeros((*shape, 3), np.uint8)
    image[tuple(slice((side - min(shape)) // 2, (side + min(shape)) // 2) for side in shape)] = 200
    with resident_peak() as peak:
        assert (resize_square(image, 224) == 200).all()
    assert peak.bytes < 200 << 20


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(1, 1, 112), (97, 61, 112), (30, 1200, 112), (250, 250, 112), (4, 9000, 112)],
)
def test_an_image_is_cropped_after_it_is_resized(height, width, size):
    image = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    factor = size / min(height, width)
    shape = max(size, round(width * factor)), max(size, round(height * factor))
    resized = cv2.resize(image, shape, interpolation=cv2.INTER_AREA if factor < 1 else cv2.INTER_LINEAR)
    top, left = (shape[1] - size) // 2, (shape[0] - size) // 2
    np.testing.assert_array_equal(resize_square(image, size), resized[top : top + size, left : left + size])


@pytest.mark.parametrize("white", [100, 255])
@pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
def test_white_of_a_pnm_image_is_255(kind, white):
    values = np.array([0, 64, 128, 255, 255, 255]).repeat(1 if kind in ("P2", "P5") else 3)
    text = " ".join(map(str, values)).encode() + b"\n"
    header = f"{kind}\n# by a camera\n3 2\n{white}\n".encode()
    data = header + (values.astype("u1").tobytes() if kind in ("P5", "P6") else text)
    if white == 255:
        assert np.abs(decode_rgb(data, location="x") - values.reshape(2, 3, -1)).max() <= 1
        return
    with pytest.raises(ImageError, match="are not an image"):
        decode_rgb(data, location="x")
