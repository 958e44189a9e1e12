import struct

import numpy as np
import pytest

from facetrain.data.decode import decode_rgb, encode_jpeg, encoded_image_size, resize_square
from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import check_counts, open_dataset
from facetrain.errors import DataError, ImageError
from tests.support.datasets import encoded_image, write_records


def test_records_of_identities_are_not_images(tmp_path):
    source = open_dataset(write_records(tmp_path, [0, 0, 1, 2]))
    assert (source.num_images, source.num_classes) == (4, 3)
    assert source.labels.tolist() == [0, 0, 1, 2]
    assert source.read(2) == encoded_image(3)
    assert "key 3 at byte" in source.location(2)


def test_a_header_whose_float32_range_is_rounded_up_is_not_believed(tmp_path):
    # WebFace42M's header says 42,474,560 where it means 42,474,558, and the two keys between are no images.
    first = 42_474_550
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (42_474_558.0, 42_474_560.0)), b"")
        for key in range(first, 42_474_558):
            writer.write(key, RecordHeader(0, (float((key - first) // 4),)), encoded_image(key))
        for key in range(42_474_558, 42_474_560):
            writer.write(key, RecordHeader(2, (float(first), float(first + 4))), b"")
    source = open_dataset(tmp_path)
    assert (source.num_images, source.num_classes) == (8, 2)


def test_a_header_that_announces_more_than_there_is_means_a_file_cut_off(tmp_path):
    write_records(tmp_path, [0, 0, 1, 1])
    lines = (tmp_path / "train.idx").read_text().splitlines()
    (tmp_path / "train.idx").write_text("\n".join(lines[:3]) + "\n")
    with pytest.raises(DataError, match="announces images up to key 4, but the last one is 2"):
        open_dataset(tmp_path)


def test_a_folder_per_identity_is_a_dataset(tmp_path):
    for name, count in (("b", 2), ("a", 1), (".hidden", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.PNG").write_bytes(encoded_image(number))
    (tmp_path / "a" / "notes.txt").write_text("no image")
    source = open_dataset(tmp_path)
    assert (source.num_images, source.num_classes, source.labels.tolist()) == (3, 2, [0, 1, 1])
    few = open_dataset(tmp_path, min_images_per_identity=2)
    assert (few.num_images, few.num_classes, few.labels.tolist()) == (2, 1, [0, 0])
    assert few.location(1).endswith("b/1.PNG") and few.read(1) == encoded_image(1)
    with pytest.raises(DataError, match="the most is 2"):
        open_dataset(tmp_path, min_images_per_identity=3)


def test_what_is_no_dataset_is_said_to_be_none(tmp_path):
    with pytest.raises(DataError, match="no such folder"):
        open_dataset(tmp_path / "missing")
    with pytest.raises(DataError, match="neither train.rec nor images"):
        open_dataset(tmp_path)


def test_property_may_name_more_identities_than_have_images_but_not_fewer(tmp_path):
    write_records(tmp_path, [0, 2])
    (tmp_path / "property").write_text("5,112,112\n")
    assert open_dataset(tmp_path).num_classes == 5
    (tmp_path / "property").write_text("2,112,112")
    with pytest.raises(DataError, match="announces 2 identities, but there are labels up to 2"):
        open_dataset(tmp_path)
    (tmp_path / "property").write_text("many")
    with pytest.raises(DataError, match="contains 'many'"):
        open_dataset(tmp_path)


def test_counts_in_the_config_must_agree_with_the_data(tmp_path):
    source = open_dataset(write_records(tmp_path, [0, 1]))
    check_counts(source, tmp_path, num_classes=2, num_images=None)
    with pytest.raises(DataError, match="data.num_classes is 3, but .* contains 2"):
        check_counts(source, tmp_path, num_classes=3, num_images=None)
    with pytest.raises(DataError, match="data.num_images is 1"):
        check_counts(source, tmp_path, num_classes=None, num_images=1)


def test_gray_and_color_images_decode_to_rgb():
    image = np.zeros((8, 8, 3), np.uint8)
    image[..., 0] = 200
    decoded = decode_rgb(encode_jpeg(image, 95), location="x")
    assert decoded.shape == (8, 8, 3) and decoded[..., 0].mean() > 190 and decoded[..., 2].mean() < 10


@pytest.mark.parametrize(
    "data",
    [b"", b"GIF89a", encoded_image(0)[:40], encoded_image(0)[:20], encode_jpeg(np.zeros((8, 8, 3)), 90)[:30]],
)
def test_what_is_no_image_is_an_error_that_says_where(data):
    with pytest.raises(ImageError, match=r"^somewhere: "):
        decode_rgb(data, location="somewhere")


def test_a_image_that_claims_a_hundred_thousand_pixels_a_side_is_refused_before_it_is_decoded():
    png = bytearray(encoded_image(0))
    png[16:24] = struct.pack(">II", 100_000, 100_000)
    with pytest.raises(ImageError, match="100,000 × 100,000"):
        decode_rgb(bytes(png), location="x")


def test_the_size_is_read_from_the_header_of_each_format():
    assert encoded_image_size(encoded_image(0, 24)) == (24, 24)
    assert encoded_image_size(encode_jpeg(np.zeros((20, 30, 3), np.uint8), 90)) == (30, 20)
    assert encoded_image_size(b"nothing") is None


def test_resizing_keeps_the_middle():
    image = np.zeros((50, 100, 3), np.uint8)
    image[:, 45:55] = 255
    small = resize_square(image, 20)
    assert small.shape == (20, 20, 3) and small[10, 10, 0] > 200 and small[10, 0, 0] == 0
    assert resize_square(small, 40).shape == (40, 40, 3)
