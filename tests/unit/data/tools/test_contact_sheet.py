import re
from base64 import b64decode

import numpy as np
import pytest

from facetrain.data.images.augment import Augment
from facetrain.data.images.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.settings import AugmentSettings
from facetrain.data.tools.contact_sheet import (
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


def rows_of(path):
    """Return the title of each row of a sheet, and its images."""
    rows = re.findall(r'(?:<p>(.*?)</p>)?<div class="pairs">(.*?)</div>', path.read_text(encoding="utf-8"))
    return [(title, list(map(b64decode, re.findall('base64,([^"]*)', images)))) for title, images in rows]


def shown(data):
    return encode_jpeg(resize_square(decode_rgb(data, location="x"), 112), 95)


def test_sheets_show_identities_or_all_images_of_one_identity(dataset, tmp_path):
    source = open_dataset(dataset)
    write_identities_sheet(source, tmp_path / "sheet.html", columns=2)
    expected = {f"identity {n} ({name}): {len(images)} images": [shown(source.read(i)) for i in images[:2]]
                for n, (name, images) in enumerate({"ann": [0, 1, 2], "bob": [3], "cy": [4, 5]}.items())}  # fmt: skip
    assert dict(rows_of(tmp_path / "sheet.html")) == expected
    write_identity_sheet(source, image_numbers(source, 0, dataset), tmp_path / "ann.html", columns=2)
    title, images = "identity 0 (ann): 3 images", [shown(source.read(number)) for number in range(3)]
    assert rows_of(tmp_path / "ann.html") == [(title, images[:2]), ("", images[2:])]
    assert image_numbers(source, 2, dataset) == [4, 5]
    with pytest.raises(DataError, match="identity 3 has no image; give an identity from 0 to 2"):
        image_numbers(source, 3, dataset)


def test_an_augmented_sheet_shows_the_inputs_of_training(dataset, tmp_path):
    augment = Augment(0, AugmentSettings(flip=1.0, gray=1.0))
    write_augmented_sheet(open_dataset(dataset), augment, tmp_path / "sheet.html", epochs=2, size=64)
    rows = rows_of(tmp_path / "sheet.html")
    assert [len(images) for _, images in rows] == [3] * 6
    for _, images in rows:
        plain, *seen = (decode_rgb(data, location="x").astype(float) for data in images)
        gray = (plain @ [0.299, 0.587, 0.114])[:, ::-1]
        for image in seen:
            assert (image[..., 0] == image[..., 2]).all()
            # JPEG changes the pixels a little.
            assert np.abs(image[..., 0] - gray).max() <= 4


def test_a_sheet_of_faults_shows_the_image_its_identity_and_the_other_one(dataset, tmp_path):
    faults = [LabelFault("mislabeled_image", 0, 2, 0.5, (1,), 2), LabelFault("duplicate_identity", 0, 1, 0.7)]
    source = open_dataset(dataset)
    write_fault_sheet(source, faults, tmp_path / "faults.html")
    numbers = [[1, 0, 2, 4, 5], [0, 1, 2, 3]]
    assert [images for _, images in rows_of(tmp_path / "faults.html")] == [
        [shown(source.read(number)) for number in row] for row in numbers
    ]
    write_fault_sheet(source, [], tmp_path / "none.html")
    assert rows_of(tmp_path / "none.html") == [("no faults", [])]


def test_a_sheet_has_every_fault_on_numbered_pages(dataset, tmp_path):
    faults = [LabelFault("outlier_image", 0, -1, 0.5, (1,), -1)] * 5
    pages = write_fault_sheet(open_dataset(dataset), faults, tmp_path / "faults.html", rows=2)
    assert [page.name for page in pages] == ["faults.html", "faults_2.html", "faults_3.html"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert all(
        f"{number}. outlier_image: identity 0 (ann), image ann/ann_0002.jpg" in text for number in range(1, 6)
    )
    assert text.count("<img ") == 5 * 3, "the image, and the two other images of its identity"


def test_names_in_any_script_are_in_html_and_escaped(dataset, tmp_path):
    (dataset / "ann").rename(dataset / "安娜 <b>")
    write_identities_sheet(open_dataset(dataset), tmp_path / "sheet.html")
    text = (tmp_path / "sheet.html").read_text(encoding="utf-8")
    assert "(安娜 &lt;b&gt;): 3 images" in text and "<b>" not in text


def test_pairs_have_a_row_each_with_their_text(tmp_path):
    rows = [
        (name, [encoded_image(n, 112) for n in pair]) for name, pair in (("ann", (0, 1)), ("bob", (2, 3)))
    ]
    write_encoded_sheet(rows, tmp_path / "pairs.html")
    assert rows_of(tmp_path / "pairs.html") == [(name, list(map(shown, images))) for name, images in rows]
