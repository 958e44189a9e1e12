"""Verification sets as `.bin`, with the tables beside them."""

import numpy as np
import pytest

from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.bin_tables import write_subjects
from facetrain.data.formats.landmark_file import read_landmarks_beside, write_landmarks
from facetrain.data.images.decode import decode_rgb
from facetrain.errors import PairsError
from facetrain.verify.sets.pair_set import load_pair_set
from tests.support.datasets import encoded_image
from tests.support.pairs import convert_bin

SAME = [True, False, True]
IMAGES = [encoded_image(number) for number in range(6)]


def test_a_set_is_reduced_to_few_pixels_and_keeps_its_tables_and_landmarks(tmp_path):
    write_bin(tmp_path / "plain.bin", IMAGES, SAME)
    landmarks_N52 = np.arange(60, dtype=np.float32).reshape(6, 5, 2) / 60
    write_landmarks(tmp_path / "plain.landmarks.npy", landmarks_N52)
    write_subjects(tmp_path / "plain.bin", ["ann", "ann", "ann", "bob", "bob", "bob"])
    (tmp_path / "plain.groups.csv").write_text("group\n" + "Asian\n" * 3 + "Indian\n" * 3)
    assert convert_bin(tmp_path / "plain.bin", tmp_path / "small.bin", reduce_to=8) == (3, 2)
    loaded = load_pair_set("small", tmp_path)
    assert loaded.same.tolist() == SAME and loaded.subject.tolist() == [0, 0, 0, 1, 1, 1]
    assert (read_landmarks_beside(tmp_path / "small.bin", 6) == landmarks_N52).all()
    assert loaded.groups.read_text() == "group\nAsian\nAsian\nAsian\nIndian\nIndian\nIndian\n"
    for data, encoded in zip(loaded.images, IMAGES, strict=True):
        image = decode_rgb(encoded, location="test")
        expected = image.reshape(8, image.shape[0] // 8, 8, image.shape[1] // 8, 3).mean((1, 3))
        np.testing.assert_allclose(decode_rgb(data, location="test"), expected, atol=0.51)


def test_a_missing_set_names_those_that_exist(tmp_path):
    for name in ("lfw", "cfp_fp"):
        write_bin(tmp_path / f"{name}.bin", IMAGES, SAME)
    with pytest.raises(PairsError, match="there are cfp_fp, lfw"):
        load_pair_set("absent", tmp_path)
