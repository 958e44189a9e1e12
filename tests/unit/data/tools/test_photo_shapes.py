"""Datasets of whole photos, which training takes for aligned faces."""

import cv2
import numpy as np
import pytest

from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.photo_shapes import describe_photos
from tests.support.command import facetrain


@pytest.mark.parametrize(
    ("width", "height", "are_photos"), [(64, 48, True), (48, 64, True), (48, 48, False), (43, 52, False)]
)
def test_most_images_of_the_shape_of_photos_are_reported(width, height, are_photos, tmp_path):
    shapes = [(height, width)] * 3 + [(48, 48)] * 2 + [(60, 40)] * (not are_photos)
    for number, shape in enumerate(shapes):
        (tmp_path / f"person {number % 2}").mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / f"person {number % 2}" / f"{number}.jpg"), np.zeros((*shape, 3), np.uint8))
    (tmp_path / "person 1" / "damaged.jpg").touch()
    found = describe_photos(open_dataset(tmp_path))
    assert (found is not None) == are_photos
    if are_photos:
        assert f"3 of 6 sampled images look like whole photos ({width} × {height} pixels)" in found


def test_pack_warns_of_photos_that_no_detector_has_aligned(tmp_path):
    (tmp_path / "photos" / "ann").mkdir(parents=True)
    cv2.imwrite(str(tmp_path / "photos" / "ann" / "1.png"), np.zeros((30, 40, 3), np.uint8))
    packed = facetrain("data", "pack", tmp_path / "photos", "--output", tmp_path / "packed")
    assert "look like whole photos (40 × 30 pixels)" in packed.stderr and "--detector yunet" in packed.stderr
