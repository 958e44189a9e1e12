"""Warning if whole photos are embedded in place of aligned faces."""

import json

import cv2
import numpy as np
import pytest
import torch

from facetrain import load_model
from facetrain.cli.app import app
from facetrain.data.formats.bin import write_bin
from facetrain.data.formats.landmark_file import landmarks_path, write_landmarks
from facetrain.data.images.align import align, aligned_landmarks
from facetrain.data.images.decode import encode_png
from facetrain.data.tools.yunet import YuNet
from facetrain.embeddings.embed_images import embed_images, embed_input
from facetrain.embeddings.embedder import ImageEmbedder
from facetrain.embeddings.inference import Inference
from facetrain.embeddings.photo_check import PhotoCheck
from facetrain.errors import ImageError
from facetrain.face_landmarks import NORMALIZED_TEMPLATE, TEMPLATE_SIZE
from facetrain.verify.evaluate import evaluate
from facetrain.verify.protocol_options import EvaluationOptions
from facetrain.verify.set_faults import warn_of_photos
from facetrain.verify.sets.pair_set import PairSet
from tests.support.datasets import write_records
from tests.support.detector import write_detector
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
def test_an_image_that_is_not_a_crop_is_named_with_the_option_that_aligns(shape, message, capsys):
    found = warning_of([drawn_face(), np.zeros(shape, np.uint8)], capsys)
    assert message in found and "give --detector yunet" in found


def test_images_without_a_face_at_its_place_are_reported(capsys):
    noise = np.random.default_rng(0).integers(0, 256, (20, 112, 112, 3), dtype=np.uint8)
    assert "no face pattern at the place of an aligned face" in warning_of(noise, capsys)
    upside_down = [np.rot90(drawn_face(), 2).copy()] * 20
    assert "no face pattern" in warning_of(upside_down, capsys)


def test_aligned_faces_that_are_not_square_or_have_a_photo_among_them_give_no_warning(capsys):
    faces = [cv2.resize(drawn_face(), size) for size in ((178, 218), (112, 112), (112, 120))]
    assert warning_of([*faces, np.zeros((480, 640, 3), np.uint8)], capsys) == ""


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


def test_an_evaluation_of_whole_photos_warns(tmp_path, capfd):
    write_model(tmp_path / "m.safetensors")
    photo = encode_png(np.zeros((60, 80, 3), np.uint8))
    write_bin(tmp_path / "pairs.bin", [photo] * 8, [True, False] * 2)
    for file in ("Gallery_Match/1_0.png", "Probe/1_1.png"):
        (tmp_path / "faces" / file).parent.mkdir(parents=True)
        (tmp_path / "faces" / file).write_bytes(photo)
    options = {"options": EvaluationOptions(bootstrap=0), "inference": Inference("cpu")}
    evaluate(tmp_path / "m.safetensors", ["pairs", "faces"], tmp_path, **options)
    err = capfd.readouterr().err
    for name, number, place in (
        ("pairs", 8, "image 0"),
        ("faces probes", 1, tmp_path / "faces" / "Probe" / "1_1.png"),
        ("faces gallery", 1, tmp_path / "faces" / "Gallery_Match" / "1_0.png"),
    ):
        assert f"warning: {name}: {number} of {number} images look like whole photos ({place}: 80 × 60" in err
    assert err.count("; align them before they become a set") == 3


def test_a_set_of_aligned_faces_gives_no_warning_for_a_network_with_a_small_input(capsys):
    face = encode_png(drawn_face())
    warn_of_photos(PairSet("pairs", [face] * 4, np.array([True, False])), 32)
    assert capsys.readouterr().err == ""


def test_a_detector_aligns_the_photos_that_are_embedded_compared_and_searched(tmp_path, capfd):
    pytest.importorskip("onnx")
    model, detector = tmp_path / "m.safetensors", write_detector(tmp_path / "yunet.onnx")
    write_model(model)
    photos, aligned = [tmp_path / "photos" / name for name in ("a.png", "b.png")], []
    photos[0].parent.mkdir()
    for number, photo in enumerate(photos):
        image = np.random.default_rng(number).integers(0, 100, (256, 320, 3), dtype=np.uint8)
        image[96:128, 128 + 32 * number :][:, :32] = 255  # a face for the test detector
        photo.write_bytes(encode_png(image))
        aligned.append(align(image, YuNet(detector)("photo", image), load_model(model).image_size))
    embedding_2D = load_model(model).embed(aligned)
    expected = pytest.approx(float(embedding_2D[0] @ embedding_2D[1]), abs=1e-6)
    assert load_model(model).compare(*photos).cosine != expected

    opened = load_model(model, detector=detector)
    assert opened.compare(*photos).cosine == expected
    np.testing.assert_allclose(opened.embed(photos), embedding_2D, atol=1e-5)
    capfd.readouterr()
    given = ["--detector", str(detector)]
    app(["compare", str(model), *map(str, photos), "--json", *given], standalone_mode=False)
    app(["search", *map(str, photos), "--model", str(model), "--json", *given], standalone_mode=False)
    output = tmp_path / "embeddings.npz"
    app(["embed", str(model), str(photos[0].parent), "--output", str(output), *given], standalone_mode=False)
    out, err = capfd.readouterr()
    compared, end = json.JSONDecoder().raw_decode(out)
    (searched,), _ = json.JSONDecoder().raw_decode(out[end:].lstrip())
    assert compared["cosine"] == expected and searched["found"][0]["cosine"] == expected
    np.testing.assert_allclose(np.load(output)["embedding"], embedding_2D, atol=1e-5)
    assert "whole photos" not in err
    with pytest.raises(ImageError, match="image 0: the detector finds no face; leave the photo out"):
        opened.embed(np.zeros((200, 300, 3), np.uint8))
    write_bin(tmp_path / "set.bin", [encode_png(np.zeros((200, 300, 3), np.uint8))] * 2, [True])
    with pytest.raises(ImageError, match="/set.bin: image 0: the detector finds no face"):
        opened.embed(tmp_path / "set.bin")


def test_a_dataset_with_landmarks_of_aligned_faces_is_not_aligned_again(tmp_path, capsys):
    pytest.importorskip("onnx")
    model, detector = tmp_path / "m.safetensors", write_detector(tmp_path / "yunet.onnx")
    write_model(model)
    data = write_records(tmp_path / "faces", [0, 0, 1], size=32)
    turned = np.float32(TEMPLATE_SIZE * NORMALIZED_TEMPLATE * (0.7, 1))  # a face that looks to the side
    aligned = aligned_landmarks(turned, TEMPLATE_SIZE) / TEMPLATE_SIZE
    write_landmarks(landmarks_path(data), np.tile(aligned, (3, 1, 1)))
    expected_ND = load_model(model).embed(data)
    capsys.readouterr()
    for embed in (
        load_model(model, detector=detector).embed,
        lambda data: embed_input(model, data, Inference("cpu"), detector=detector).embedding,
    ):
        np.testing.assert_allclose(embed(data), expected_ND, atol=1e-5)
        assert f"{data}: has the landmarks of aligned faces, so the detector" in capsys.readouterr().err
    wide_crops = 0.5 + 0.85 * (NORMALIZED_TEMPLATE - 0.5)
    for of_photos in (0.4 + 0.2 * NORMALIZED_TEMPLATE, wide_crops, np.full((5, 2), np.nan)):
        write_landmarks(landmarks_path(data), np.tile(of_photos, (3, 1, 1)))
        with pytest.raises(ImageError, match="the detector finds no face"):
            load_model(model, detector=detector).embed(data)


def test_a_network_gets_the_landmarks_by_which_a_detector_aligns(tmp_path):
    pytest.importorskip("onnx")
    detector = write_detector(tmp_path / "yunet.onnx")
    photo = np.random.default_rng(0).integers(0, 100, (256, 320, 3), dtype=np.uint8)
    photo[96:128, 128:160] = 255  # a face for the test detector

    class Points:
        takes_landmarks = True

        def __call__(self, image_BCHW, landmarks_B52):
            return landmarks_B52.flatten(1)

    embedder = ImageEmbedder(Points(), 80, 2, torch.device("cpu"), alone=True)
    embedding_ND, length_N = embed_images(embedder, [photo] * 3, "photos", flip=False, detector=detector)
    found = aligned_landmarks(YuNet(detector)("photo", photo), 80)
    expected_52 = (found + 0.5) / 80
    points_N52 = (embedding_ND * length_N[:, None]).reshape(3, 5, 2)
    np.testing.assert_allclose(points_N52, np.stack([expected_52] * 3), atol=1e-5)
    assert np.abs(expected_52 - NORMALIZED_TEMPLATE).max() > 1e-3
