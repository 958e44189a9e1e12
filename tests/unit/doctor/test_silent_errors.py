"""Errors that stop no run are found in the images and the labels, and correct data gives no warning."""

import json
from dataclasses import replace

import numpy as np
import pytest

from facetrain.config.loading import build_config
from facetrain.data.formats.bin import read_bin
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.synthetic.drawing import draw_jpeg
from facetrain.doctor.examine import check_dataset
from facetrain.doctor.image_sample import draw_sample, storage_faults
from facetrain.doctor.silent_errors import check_alignment, check_images
from facetrain.run.parts.open_data import open_training_set
from tests.support.command import facetrain
from tests.support.datasets import write_records
from tests.support.planted_errors import ALIGNMENT_ERRORS, IMAGE_ERRORS, jpeg, plant
from tests.support.shared import shared_path

TOO_RARE_IN_DRAWN_FACES = {"a quarter turn, 10 %"}


def sample_of(images):
    return draw_sample(len(images), images.__getitem__)


def test_a_sample_of_a_huge_dataset_needs_no_table_of_its_images():
    image, read = draw_jpeg(0, 0, 0, 16), set[int]()
    sample = draw_sample(1 << 40, lambda number: read.add(number) or image)
    assert len(sample) == len(read) > 1 and max(read) < 1 << 40


def decoded(dataset, count):
    chosen = np.linspace(0, dataset.num_images - 1, count).astype(int).tolist()
    return [decode_rgb(dataset.read(index), location=dataset.image_name(index)) for index in chosen]


def checked(path):
    """Check labels and landmarks of a dataset."""
    config = build_config({"data": {"train": str(path)}}, "test")
    return list(check_dataset(config, open_training_set(config)))


@pytest.fixture(scope="module")
def drawn_faces():
    return [decode_rgb(draw_jpeg(0, number, 0, 112), location="") for number in range(100)]


@pytest.fixture(scope="module")
def drawn_sample(drawn_faces):
    return sample_of([jpeg(image) for image in drawn_faces])


@pytest.fixture(scope="module", params=["lfw_train", "faces_train"])
def real_faces(request):
    return decoded(open_dataset(shared_path(f"real/{request.param}")), 500)


def assert_found(name, images):
    """Plant an error into images, and expect a result that names it."""
    if name == "CMYK, 2 %":
        pytest.importorskip("PIL")
    error, share, words = IMAGE_ERRORS[name]
    results = check_images("x", sample_of(plant(images, error, share)))
    found = [result for result in results if result.certainty]
    assert any(words in result.message + result.advice for result in found), found


@pytest.mark.parametrize("name", sorted(IMAGE_ERRORS.keys() - TOO_RARE_IN_DRAWN_FACES))
def test_an_error_planted_into_drawn_faces_is_found(name, drawn_faces):
    assert_found(name, drawn_faces)


@pytest.mark.parametrize("name", ALIGNMENT_ERRORS)
def test_drawn_faces_of_another_alignment_are_found(name, drawn_faces, drawn_sample):
    moved = sample_of(plant(drawn_faces, ALIGNMENT_ERRORS[name], 1.0))
    (result,) = check_alignment("lfw", moved, "train", drawn_sample)
    assert result.status == "warning" and result.certainty in ("likely", "possible"), result


def test_drawn_faces_without_an_error_give_no_warning(drawn_sample):
    results = check_images("x", drawn_sample) + check_alignment("x", drawn_sample, "train", drawn_sample)
    assert [result.status for result in results] == ["ok", "ok"], results


def test_images_that_are_all_a_little_blue_are_no_error(drawn_sample):
    sample = replace(drawn_sample, redness_N=np.full(100, -6.0))
    assert [result.status for result in check_images("x", sample)] == ["ok"]


def test_swapped_colors_of_a_part_are_found_beside_a_part_without_color(drawn_sample):
    number = np.arange(100)
    redness = np.where(number >= 70, -6.0, 40.0)
    sample = replace(drawn_sample, is_gray_N=number < 50, redness_N=redness)
    found = [result for result in check_images("x", sample) if "more blue than red" in result.message]
    assert [(result.certainty, "around 75%" in result.message) for result in found] == [("likely", True)]


@pytest.mark.long
@pytest.mark.parametrize("name", IMAGE_ERRORS)
def test_an_error_planted_into_real_faces_is_found(name, real_faces):
    assert_found(name, real_faces)


@pytest.mark.long
@pytest.mark.parametrize("name", ALIGNMENT_ERRORS)
def test_real_faces_of_another_alignment_are_found(name, real_faces):
    reference = sample_of([jpeg(image) for image in real_faces])
    (result,) = check_alignment(
        "lfw", sample_of(plant(real_faces, ALIGNMENT_ERRORS[name], 1.0)), "train", reference
    )
    assert result.certainty == "likely", result


@pytest.mark.slow
def test_real_faces_without_an_error_give_no_warning():
    folders = [shared_path(f"real/{name}") for name in ("lfw_train", "faces_train", "recordio/im2rec_8faces")]
    names = (
        "lfw_verification/lfw_folds1-2",
        "lfw_verification/py2_style_120pairs",
        "insightface_small/small_lfw",
    )
    samples = {folder.name: draw_sample((d := open_dataset(folder)).num_images, d.read) for folder in folders}
    samples |= {name: sample_of(read_bin(shared_path(f"real/{name}.bin"))[0]) for name in names}
    results = [result for name, sample in samples.items() for result in check_images(name, sample)]
    for reference in ("lfw_train", "faces_train"):
        for name, sample in samples.items():
            results += check_alignment(name, sample, reference, samples[reference])
    assert len(results) > len(samples) + 6
    assert [result for result in results if result.status != "ok"] == []


def test_the_storage_is_read_from_the_headers_of_every_format(drawn_faces):
    import cv2

    image = drawn_faces[0][:, :, ::-1].copy()
    gray, deep, alpha = image[:, :, 0], image.astype(np.uint16), np.dstack([image, image[:, :, 0]])
    stored = {
        "gray.png": gray, "deep.png": deep, "alpha.png": alpha, "gray.jpg": gray, "color.jpg": image,
        "gray.pgm": gray, "deep.ppm": deep, "gray.tif": gray, "deep.tif": deep, "alpha.webp": alpha,
        "color.webp": image, "gray.jp2": gray, "deep.jp2": deep, "color.bmp": image,
    }  # fmt: skip
    for name, pixels in stored.items():
        kind, _, suffix = name.partition(".")
        if not cv2.haveImageWriter(f".{suffix}"):
            continue
        expected = {"deep": ["have more than 8 bits per channel"], "alpha": ["have transparency"]}.get(
            kind, []
        )
        assert storage_faults(bytes(cv2.imencode(f".{suffix}", pixels)[1])) == expected, name


@pytest.mark.parametrize(
    ("labels", "status", "certainty"),
    [([0, 1, 1], "ok", ""), ([1, 2, 2], "warning", "certain"), ([2, 3, 4], "warning", "likely"),
     ([1, 3, 3], "warning", "possible")],
)  # fmt: skip
def test_labels_that_begin_at_one_are_found(labels, status, certainty, tmp_path):
    results = checked(write_records(tmp_path, labels))
    assert (results[1].check, results[1].status, results[1].certainty) == ("identities", status, certainty)


def test_labels_that_begin_at_one_in_one_dataset_of_a_mixture_are_found(tmp_path):
    write_records(tmp_path / "a", [0, 1, 1])
    write_records(tmp_path / "b", [1, 1, 2])
    (tmp_path / "mix.yaml").write_text("datasets: [{path: a}, {path: b}]")
    results = checked(tmp_path / "mix.yaml")
    assert results[1].certainty == "certain" and "mix.yaml, dataset 2: no image" in results[1].message


def test_the_doctor_reports_swapped_colors_of_a_run_with_its_certainty(tmp_path, drawn_faces):
    from tests.support.planted_errors import swapped

    for number, image in enumerate(drawn_faces[:64]):
        folder = tmp_path / "data" / f"{number // 4:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(swapped(image))
    (tmp_path / "run.yaml").write_text(
        f"data: {{train: {tmp_path}/data}}\nmodel: {{backbone: mbf}}\neval: {{targets: []}}\n"
        f"run: {{dir: {tmp_path}/runs, name: x}}\n"
    )
    process = facetrain("doctor", "--config", tmp_path / "run.yaml", "--json")
    results = json.loads(process.stdout)["results"]
    (found,) = (result for result in results if result["check"].startswith("images of "))
    assert found["certainty"] == "likely" and "more blue than red" in found["message"]
