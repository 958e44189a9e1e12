import numpy as np
import pytest

from facetrain.data.images.augment import Augment
from facetrain.data.images.decode import decode_rgb
from facetrain.data.open_dataset import open_dataset
from facetrain.data.settings import AugmentSettings
from facetrain.data.tools.contact_sheet import (
    LABEL_HEIGHT,
    _ascii,
    write_augmented_sheet,
    write_fault_sheet,
    write_identities_sheet,
    write_identity_sheet,
    write_pair_sheet,
)
from facetrain.data.tools.inspect import image_locations
from facetrain.data.tools.label_faults import LabelFault
from facetrain.errors import DataError
from tests.support.datasets import encoded_image


def read_png(path):
    return decode_rgb(path.read_bytes(), location="x")


def test_sheets_show_identities_or_all_images_of_one_identity(dataset, tmp_path):
    write_identities_sheet(dataset, tmp_path / "sheet.png", columns=3)
    sheet = read_png(tmp_path / "sheet.png")
    assert sheet.shape == (3 * (LABEL_HEIGHT + 112), 3 * 112, 3)
    for row in range(3):  # black text on white above each row
        line = sheet[row * (LABEL_HEIGHT + 112) :][:LABEL_HEIGHT]
        assert line.min() < 100 and line.max() == 255
    write_identity_sheet(dataset, 0, tmp_path / "ann.png", columns=2)
    shown, source = read_png(tmp_path / "ann.png"), open_dataset(dataset)
    for number, (top, left) in enumerate([(0, 0), (0, 112), (LABEL_HEIGHT + 112, 0)]):
        top += LABEL_HEIGHT
        expected = decode_rgb(source.read(number), location="x")
        assert (shown[top : top + 112, left : left + 112] == expected).all()
    assert (shown[2 * LABEL_HEIGHT + 112 :, 112:] == 255).all()
    assert [place.split("/")[-1] for place in image_locations(dataset, 2)] == ["cy_0001.jpg", "cy_0002.jpg"]
    with pytest.raises(DataError, match="identity 3 has no image; give an identity from 0 to 2"):
        write_identity_sheet(dataset, 3, tmp_path / "absent.png")


def test_an_augmented_sheet_shows_the_inputs_of_training(dataset, tmp_path):
    write_augmented_sheet(
        dataset, Augment(0, AugmentSettings(flip=1.0)), tmp_path / "sheet.png", rows=4, epochs=2, size=64
    )
    shown = read_png(tmp_path / "sheet.png")
    assert shown.shape == (4 * 64, 3 * 64, 3)
    plain, *seen = np.split(shown, 3, axis=1)
    for epoch in seen:
        for row in range(4):
            pixels = slice(row * 64, (row + 1) * 64)
            assert (epoch[pixels] == plain[pixels, ::-1]).all()
    write_augmented_sheet(
        dataset, Augment(0, AugmentSettings(flip=0.0, gray=1.0)), tmp_path / "gray.png", epochs=1
    )
    gray = read_png(tmp_path / "gray.png")[:, 112:]
    assert (gray[..., 0] == gray[..., 2]).all()


def test_a_pair_sheet_shows_the_two_images_of_each_pair_side_by_side(tmp_path):
    write_pair_sheet(
        [(0, 1), (2, 3)], encoded_image, encoded_image, tmp_path / "pairs.png", columns=1, size=16
    )
    sheet = decode_rgb((tmp_path / "pairs.png").read_bytes(), location="x")
    assert (sheet[18:34, 16:32] == decode_rgb(encoded_image(3), location="x")).all()


def test_a_sheet_of_faults_shows_the_image_its_identity_and_the_other_one(dataset, tmp_path):
    faults = [
        LabelFault("mislabeled_image", 0, 2, 1, 0.5, (1,), 2),
        LabelFault("duplicate_identity", 0, 1, -1, 0.7),
    ]
    write_fault_sheet(dataset, faults, tmp_path / "faults.png")
    shown, source = read_png(tmp_path / "faults.png"), open_dataset(dataset)
    expected = [[1, 0, 2, 4, 5], [0, 1, 2, 3]]
    for row, numbers in enumerate(expected):
        top = row * (LABEL_HEIGHT + 112) + LABEL_HEIGHT
        for column, number in enumerate(numbers):
            image = decode_rgb(source.read(number), location="x")
            assert (shown[top : top + 112, column * 112 : (column + 1) * 112] == image).all()
    write_fault_sheet(dataset, [], tmp_path / "none.png")
    assert read_png(tmp_path / "none.png").shape[0] == LABEL_HEIGHT + 112


def test_a_sheet_has_every_fault_on_numbered_pages(dataset, tmp_path):
    faults = [LabelFault("outlier_image", 0, -1, 1, 0.5, (1,), -1)] * 5
    pages = write_fault_sheet(dataset, faults, tmp_path / "faults.html", rows=2)
    assert [page.name for page in pages] == ["faults.html", "faults_2.html", "faults_3.html"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert all(
        f"{number}. outlier_image: identity 0 (ann), image ann/ann_0002.jpg" in text for number in range(1, 6)
    )
    assert text.count("<img ") == 5 * 3, "the image, and the two other images of its identity"
    pages = write_fault_sheet(dataset, faults, tmp_path / "faults.png", rows=2)
    assert [read_png(page).shape[0] for page in pages] == [2 * (LABEL_HEIGHT + 112)] * 2 + [
        LABEL_HEIGHT + 112
    ]


def test_names_in_any_script_are_in_html_and_escaped(dataset, tmp_path):
    (dataset / "ann").rename(dataset / "安娜 <b>")
    write_identities_sheet(dataset, tmp_path / "sheet.html")
    text = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "(安娜 &lt;b&gt;): 3 images" in text and "<b>" not in text
    write_identities_sheet(dataset, tmp_path / "sheet.png")
    assert read_png(tmp_path / "sheet.png").shape[0] == 3 * (LABEL_HEIGHT + 112)
    assert _ascii("identity 7 (安娜 Zoë)") == "identity 7 (... Zoe)"


def test_labeled_pairs_have_a_row_each(tmp_path):
    pairs, labels = [(0, 1), (2, 3)], ["1. ann | x", "2. bob | y"]
    write_pair_sheet(pairs, encoded_image, encoded_image, tmp_path / "pairs.png", labels=labels, size=16)
    assert read_png(tmp_path / "pairs.png").shape[0] == 2 * (LABEL_HEIGHT + 16)
    write_pair_sheet(pairs, encoded_image, encoded_image, tmp_path / "pairs.html", labels=labels, size=16)
    text = (tmp_path / "pairs.html").read_text(encoding="utf-8")
    assert all(label in text for label in labels) and text.count("<img ") == 4
