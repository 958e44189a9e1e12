"""Warning if whole photos are embedded in place of aligned faces."""

import cv2
import numpy as np
import pytest

from facetrain import load_model
from facetrain.cli.app import app
from facetrain.embeddings.photo_check import PhotoCheck
from tests.support.models import write_model
from tests.support.shared import shared_path


def warning_of(images, capsys, size=112):
    check = PhotoCheck()
    for index, image in enumerate(images):
        assert check(image, index, size).shape == (size, size, 3)
    check.warn("photos")
    return capsys.readouterr().err


def drawn_face():
    """Return an image with dark eyes and mouth at the places of an aligned face."""
    image = np.full((112, 112, 3), 200, np.uint8)
    for center, axes in (((38, 49), (9, 6)), ((73, 49), (9, 6)), ((56, 72), (7, 3)), ((56, 92), (13, 4))):
        cv2.ellipse(image, center, axes, 0, 0, 360, (70, 60, 60), -1)
    return cv2.GaussianBlur(image, (0, 0), 2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((480, 640, 3), "1 of 2 images look like whole photos (image 1: 640 × 480 pixels, not square)"),
        ((400, 400, 3), "(image 1: 400 × 400 pixels, for an input of 112 × 112)"),
    ],
)
def test_an_image_that_is_not_a_crop_is_named_with_the_command_that_aligns(shape, message, capsys):
    found = warning_of([drawn_face(), np.zeros(shape, np.uint8)], capsys)
    assert message in found and "data pack PHOTOS --output FOLDER --detector FILE.onnx" in found


def test_images_without_a_face_at_its_place_are_reported(capsys):
    noise = np.random.default_rng(0).integers(0, 256, (20, 112, 112, 3), dtype=np.uint8)
    assert "no face pattern at the place of an aligned face" in warning_of(noise, capsys)
    upside_down = [np.rot90(drawn_face(), 2).copy()] * 20
    assert "no face pattern" in warning_of(upside_down, capsys)


def test_aligned_faces_give_no_warning(capsys):
    assert warning_of([drawn_face()] * 2, capsys) == ""
    assert warning_of([], capsys) == ""


def test_aligned_photos_give_no_warning_in_sets_of_any_size(capsys):
    files = sorted(shared_path("real/lfw_train").glob("*/*.jpg"))[:240]
    photos = [cv2.cvtColor(cv2.imread(str(file)), cv2.COLOR_BGR2RGB) for file in files]
    assert warning_of(photos, capsys) == ""
    pairs = [warning_of(photos[n : n + 2], capsys) for n in range(0, 240, 2)]
    assert sum(map(bool, pairs)) <= 2


def test_the_commands_and_the_python_interface_warn(tmp_path, capfd):
    write_model(tmp_path / "m.safetensors")
    photos = [tmp_path / "a.png", tmp_path / "b.png"]
    for photo in photos:
        cv2.imwrite(str(photo), np.zeros((60, 80, 3), np.uint8))
    warning = "2 of 2 images look like whole photos ({}: 80 × 60 pixels, not square)"
    app(["compare", str(tmp_path / "m.safetensors"), *map(str, photos)], standalone_mode=False)
    assert warning.format(photos[0]) in capfd.readouterr().err
    load_model(tmp_path / "m.safetensors").embed([cv2.imread(str(photo)) for photo in photos])
    assert warning.format("image 0") in capfd.readouterr().err
