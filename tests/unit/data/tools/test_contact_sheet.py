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
    write_encoded_sheet,
    write_fault_sheet,
    write_identities_sheet,
    write_identity_sheet,
)
from facetrain.data.tools.inspect import image_numbers
from facetrain.data.tools.label_faults import LabelFault
from facetrain.errors import DataError
from tests.support.datasets import encoded_image

HEIGHT = LABEL_HEIGHT + 112


def read_png(path):
    return decode_rgb(path.read_bytes(), location="x")


def assert_shown(sheet, source, rows):
    """Check that the images of a dataset with these numbers are below the text of each row."""
    for row, numbers in enumerate(rows):
        top = row * HEIGHT + LABEL_HEIGHT
        for column, number in enumerate(numbers):
            shown = sheet[top : top + 112, column * 112 : (column + 1) * 112]
            assert (shown == decode_rgb(source.read(number), location="x")).all()


def test_sheets_show_identities_or_all_images_of_one_identity(dataset, tmp_path):
    source = open_dataset(dataset)
    write_identities_sheet(source, tmp_path / "sheet.png", columns=3)
    sheet = read_png(tmp_path / "sheet.png")
    assert sheet.shape == (3 * HEIGHT, 3 * 112, 3)
    for row in range(3):  # black text on white above each row
        line = sheet[row * HEIGHT :][:LABEL_HEIGHT]
        assert line.min() < 100 and line.max() == 255
    write_identity_sheet(source, image_numbers(source, 0, dataset), tmp_path / "ann.png", columns=2)
    shown = read_png(tmp_path / "ann.png")
    assert_shown(shown, source, [[0, 1], [2]])
    assert (shown[HEIGHT + LABEL_HEIGHT :, 112:] == 255).all()
    assert image_numbers(source, 2, dataset) == [4, 5]
    with pytest.raises(DataError, match="identity 3 has no image; give an identity from 0 to 2"):
        image_numbers(source, 3, dataset)


def test_an_augmented_sheet_shows_the_inputs_of_training(dataset, tmp_path):
    augment = Augment(0, AugmentSettings(flip=1.0, gray=1.0))
    write_augmented_sheet(open_dataset(dataset), augment, tmp_path / "sheet.png", epochs=2, size=64)
    shown = read_png(tmp_path / "sheet.png")
    assert shown.shape == (6 * 64, 3 * 64, 3)
    plain, *seen = np.split(shown, 3, axis=1)
    gray = plain @ [0.299, 0.587, 0.114]
    for epoch in seen:
        assert (epoch[..., 0] == epoch[..., 2]).all()
        assert np.abs(epoch[..., 0] - gray[:, ::-1]).max() <= 1


def test_a_sheet_of_faults_shows_the_image_its_identity_and_the_other_one(dataset, tmp_path):
    faults = [LabelFault("mislabeled_image", 0, 2, 0.5, (1,), 2), LabelFault("duplicate_identity", 0, 1, 0.7)]
    write_fault_sheet(open_dataset(dataset), faults, tmp_path / "faults.png")
    shown = read_png(tmp_path / "faults.png")
    assert_shown(shown, open_dataset(dataset), [[1, 0, 2, 4, 5], [0, 1, 2, 3]])
    write_fault_sheet(open_dataset(dataset), [], tmp_path / "none.png")
    assert read_png(tmp_path / "none.png").shape[0] == HEIGHT


def test_a_sheet_has_every_fault_on_numbered_pages(dataset, tmp_path):
    faults = [LabelFault("outlier_image", 0, -1, 0.5, (1,), -1)] * 5
    pages = write_fault_sheet(open_dataset(dataset), faults, tmp_path / "faults.html", rows=2)
    assert [page.name for page in pages] == ["faults.html", "faults_2.html", "faults_3.html"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert all(
        f"{number}. outlier_image: identity 0 (ann), image ann/ann_0002.jpg" in text for number in range(1, 6)
    )
    assert text.count("<img ") == 5 * 3, "the image, and the two other images of its identity"
    pages = write_fault_sheet(open_dataset(dataset), faults, tmp_path / "faults.png", rows=2)
    assert [read_png(page).shape[0] for page in pages] == [2 * HEIGHT] * 2 + [HEIGHT]


def test_names_in_any_script_are_in_html_and_escaped(dataset, tmp_path):
    (dataset / "ann").rename(dataset / "安娜 <b>")
    write_identities_sheet(open_dataset(dataset), tmp_path / "sheet.html")
    text = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "(安娜 &lt;b&gt;): 3 images" in text and "<b>" not in text
    write_identities_sheet(open_dataset(dataset), tmp_path / "sheet.png")
    assert read_png(tmp_path / "sheet.png").shape[0] == 3 * HEIGHT
    assert _ascii("identity 7 (安娜 Zoë)") == "identity 7 (... Zoe)"


def test_pairs_have_a_row_each_with_their_text(tmp_path):
    rows = [
        (name, [encoded_image(number, 112) for number in pair])
        for name, pair in (("ann", (0, 1)), ("bob", (2, 3)))
    ]
    write_encoded_sheet(rows, tmp_path / "pairs.png")
    sheet = read_png(tmp_path / "pairs.png")
    assert sheet.shape[0] == 2 * HEIGHT
    assert (sheet[-112:, 112:224] == decode_rgb(encoded_image(3, 112), location="x")).all()
    write_encoded_sheet(rows, tmp_path / "pairs.html")
    text = (tmp_path / "pairs.html").read_text(encoding="utf-8")
    assert "<p>ann</p>" in text and "<p>bob</p>" in text and text.count("<img ") == 4
