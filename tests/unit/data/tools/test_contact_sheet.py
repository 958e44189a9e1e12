import re
from base64 import b64decode

from facetrain.data.images.decode import decode_rgb, encode_jpeg, resize_square
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools import contact_sheet
from facetrain.data.tools.contact_sheet import (
    write_encoded_sheet,
    write_identities_sheet,
    write_wrong_labels_sheet,
)
from facetrain.data.tools.wrong_labels import WrongLabel
from facetrain.text import count_text
from tests.support.datasets import encoded_image


def rows_of(path):
    """Return the title of each row of a sheet, and its images."""
    rows = re.findall(r'(?:<p>(.*?)</p>)?<div class="faces">(.*?)</div>', path.read_text(encoding="utf-8"))
    return [(title, list(map(b64decode, re.findall('base64,([^"]*)', images)))) for title, images in rows]


def shown(data):
    return encode_jpeg(resize_square(decode_rgb(data, location="x"), 112), 95)


def test_a_sheet_shows_all_images_of_all_identities(dataset, tmp_path):
    source = open_dataset(dataset)
    write_identities_sheet(source, tmp_path / "sheet.html")
    expected = {f"identity {n} ({name}): {count_text(len(images), 'image')}": [shown(source.read(i)) for i in images]
                for n, (name, images) in enumerate({"ann": [0, 1, 2], "bob": [3], "cy": [4, 5]}.items())}  # fmt: skip
    assert dict(rows_of(tmp_path / "sheet.html")) == expected


def test_a_sheet_takes_the_place_of_another_one_as_a_whole(dataset, tmp_path):
    (tmp_path / "sheet.html").write_text("old")
    with (tmp_path / "sheet.html").open() as file:
        write_identities_sheet(open_dataset(dataset), tmp_path / "sheet.html")
        assert file.read() == "old" and rows_of(tmp_path / "sheet.html")


def test_a_sheet_has_no_rows_for_labels_without_images(dataset, tmp_path):
    (dataset / "a.txt").write_text("bob/bob_0001.jpg\t3000\n")
    write_identities_sheet(open_dataset(dataset / "a.txt"), tmp_path / "sheet.html")
    assert [title for title, _ in rows_of(tmp_path / "sheet.html")] == ["identity 3000: 1 image"]


def test_a_sheet_of_a_large_dataset_says_which_part_it_shows(dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(contact_sheet, "_MOST_IMAGES", 3)
    write_identities_sheet(open_dataset(dataset), tmp_path / "sheet.html")
    assert sum(len(images) for _, images in rows_of(tmp_path / "sheet.html")) == 3
    assert "3 of 6 images" in (tmp_path / "sheet.html").read_text()


def test_a_sheet_of_wrong_labels_shows_the_image_its_identity_and_the_other_one(dataset, tmp_path):
    wrong = [WrongLabel(1, 0, 2, 0.5), WrongLabel(3, 1, -1, 0.1)]
    source = open_dataset(dataset)
    write_wrong_labels_sheet(source, wrong, tmp_path / "wrong.html")
    numbers = [[1, 0, 2, 4, 5], [3]]
    assert [images for _, images in rows_of(tmp_path / "wrong.html")] == [
        [shown(source.read(number)) for number in row] for row in numbers
    ]
    write_wrong_labels_sheet(source, [], tmp_path / "none.html")
    assert rows_of(tmp_path / "none.html") == [("no wrong labels", [])]


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
