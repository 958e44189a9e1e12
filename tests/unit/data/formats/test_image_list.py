import pickle
import re

import numpy as np
import pytest

from facetrain.data.dataset import ImageSubset
from facetrain.data.formats import image_list
from facetrain.data.formats.image_list import open_list
from facetrain.data.open_dataset import open_aligned, open_dataset, require_aligned
from facetrain.data.tools.pack import pack
from facetrain.errors import DataError
from facetrain.face_landmarks import ARCFACE_TEMPLATE
from tests.support.datasets import encoded_image


@pytest.fixture
def images(tmp_path):
    for number, name in enumerate(["a/1.png", "b/my face.png", "a/2.png"]):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded_image(number))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "labels"),
    [
        ("a.tsv", "a/1.png\tzoe\nb/my face.png\tann\na/2.png\tzoe\n", [1, 0, 1]),
        ("a.csv", "path,person\r\na/1.png,zoe\r\nb/my face.png,ann\r\na/2.png,zoe", [1, 0, 1]),
        ("a.txt", "a/1.png 3\nb/my face.png 0\n\na/2.png 3\n", [3, 0, 3]),
        ("b.txt", "3,a/1.png\n0,b/my face.png\n3,a/2.png\n", [3, 0, 3]),
        ("a.lst", "7\t2.000000\ta/1.png\n2\t0.000000\tb/my face.png\n1\t2.0\t5.0\ta/2.png\n", [2, 0, 2]),
        ("b.csv", "\ufeffperson,path\r\nzoe,a/1.png\r\nann,b/my face.png\r\nzoe,a/2.png\r\n", [1, 0, 1]),
        ("b.tsv", "\ufeffa/1.png\tzoe\nb/my face.png\tann\na/2.png\tzoe\n", [1, 0, 1]),
        ("c.tsv", "\ufeffzoe\ta/1.png\nann\tb/my face.png\nzoe\ta/2.png\n", [1, 0, 1]),
        ("b.lst", "1\ta/1.png\t2\n1\tb/my face.png\t0\n1\ta/2.png\t2\n", [2, 0, 2]),
        (
            "c.csv",
            'path,person\na/1.png,"Lee, Zoe"\n"b/my face.png", "Lee, Ann"\n"a/2.png","Lee, Zoe"\n',
            [1, 0, 1],
        ),
    ],
)
def test_every_form_of_a_list_gives_images_and_identities(images, name, text, labels):
    (images / name).write_bytes(text.encode())
    for _ in range(2):  # the second time from the catalog that was cached
        dataset = open_dataset(images / name)
        assert dataset.labels.tolist() == labels and dataset.num_classes == max(labels) + 1
        assert [dataset.read(n) for n in range(3)] == [encoded_image(n) for n in range(3)]
    assert "\ufeff" not in "".join(dataset.identity_name(label) for label in range(dataset.num_classes))
    again = pickle.loads(pickle.dumps(dataset))
    assert again.location(1) == str(images / "b" / "my face.png") and again.name(1) == "b/my face.png"
    assert open_dataset(images / name, min_images_per_identity=2).num_images == 2


def test_the_catalog_of_a_list_is_in_the_cache_folder(images, tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (images / "people.txt").write_text("a/1.png zoe\na/2.png ann\n")
    before = sorted(images.iterdir())
    for _ in range(2):  # the second time from the catalog
        assert open_dataset(images / "people.txt").num_images == 2
        assert sorted(images.iterdir()) == before
        assert len(list((cache / "facetrain").glob("*.catalog"))) == 1


def test_paths_can_be_relative_to_another_folder(images, tmp_path):
    (tmp_path / "lists").mkdir()
    (images / "a/1.png").rename(images / "a/zoë.PNG")
    (tmp_path / "lists" / "a.txt").write_text("a/zoë.PNG 0\n")
    dataset = open_list(tmp_path / "lists" / "a.txt", images)
    assert pickle.loads(pickle.dumps(dataset)).read(0) == encoded_image(0)
    with pytest.raises(DataError, match=r"lists/a/zoë\.PNG: "):
        open_dataset(tmp_path / "lists" / "a.txt").read(0)


@pytest.mark.parametrize("other", ["zoe", "5"])
def test_a_negative_number_is_no_identity_of_all_unknown_people(tmp_path, other):
    (tmp_path / "a.tsv").write_text(f"1.png\t{other}\n2.png\t-1\n3.png\t-1\n")
    with pytest.raises(DataError, match=r"a\.tsv: the label -1 is negative, as those of unknown people are"):
        open_list(tmp_path / "a.tsv")


def test_an_identity_has_the_name_in_the_list_and_a_label_its_number(tmp_path):
    (tmp_path / "a.tsv").write_text("1.png\tzoe\n2.png\tann\n3.png\tzoe\n4.png\tbob\n")
    (tmp_path / "b.tsv").write_text("1.png\t001\n2.png\t5\n")
    for name, names in (("a.tsv", ["ann", "bob", "zoe"]), ("b.tsv", ["0", "1", "2", "3", "4", "5"])):
        dataset = open_dataset(tmp_path / name)
        assert [dataset.identity_name(label) for label in range(len(names))] == names


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"a/1.png 0\nnonsense\n", "line 2"),
        (b"a/1.png 0\na/2.png\n", "line 2"),
        (b"a/1.raw\tann\na/2.png\tann\n", "line 1"),
        (b"a\\b.RAW,ann\nann,a/2.png\n", "line 1"),
        (b"a/1.png\na/2.png 0\n", "line 1"),
        (b"a/1.png 0.5\n", "0.5"),
        (b"a/1.png nan\n", "nan"),
        (b"a/1.png 007\na/2.png 7\n", "007"),
        (b"\xff\xfe a/1.png 0\n", "line 1"),
        (b"a/1.png 0\na/\0.png 0\n", "line 2"),
        (b"a/1.png,ann\na/2.png,\n", "line 2"),
        (b"ann,a/1.png,train\n", "line 1"),
        (b"7,train,a/1.png\n", "line 1"),
        (b"7\t2\ttrain\ta/1.png\n", "line 1"),
        (b"a/1.png,3,4,50,60,ann\n", "line 1"),
        (b"a/1.png\t0\t7\n", "line 1"),
        (b"7\t2\ta/1.png\ttrain\n", "line 1"),
        (b"7,30,2,a/1.png\n", "line 1: .* has no clear path and identity"),
        (b"id,age,path\n7,30,a/1.png\n", "line 2: .* has no clear path and identity"),
        (b"5 1 2 a/1.png\n", "line 1: .* has no clear path and identity"),
        *(
            (
                text,
                "two lines begin with the number 5, and im2rec's lists number the images there; write the path",
            )
            for text in (b"5\t1\ta/1.png\n6\t1\tb.png\n5.0\t2\ta/2.png\n", b"5 1 a/1.png\n5 1 a/2.png\n")
        ),
        (b"ann,female,a/1.png\n", "line 1"),
        *(
            (text, "line 1: has a carriage return .*; save the list with line ends LF")
            for text in (
                b"path\tidentity\ra/1.png\t0\r",
                b"1\ta/1.png\t0\r1\ta/2.png\t1\r",
                b"a/1.png ann\ra/2.png bo\r",
            )
        ),
        (b"0\ta/1.png\t0" + 13 * b"\t1" + b"\t1e300\n", "line 1: '1e300' is no number of pixels"),
        *(
            (
                b"1\tb.png\t7\n0\ta/1.png\t0" + n * b"\t1" + b"\n",
                f"line 2: a photo.* 4 numbers .* 10 of landmarks, not {n};",
            )
            for n in (1, 10, 13, 15)
        ),
        (b"1\ta/1.png\t0\n1\ta/2.png\t11\tb.png\t1\n", "line 2: .* has no clear path and identity"),
        (b"1\ta/1.png\t0" + 14 * b"\t1" + b"\n", "line 1: .* has no clear path and identity"),
        (b"0 a/1.png 0" + 13 * b" 1" + b" nan\n", "line 1"),
        (b'a/1.png,ann\n"a/2.png,ann\n', "line 2: .*: close every quote right before a comma"),
        (b'a/1.png,ann\na/2.png,"ann\n', "line 2: .*: close every quote right before a comma"),
        (b'a/1.png,ann\na/2.png,"ann "x" lee"\n', "line 2: .*: close every quote right before a comma"),
        (b'a/1.png,ann\n"a/2.png" ,"ann"\n', "line 2: .*: close every quote right before a comma"),
        (b"", ""),
    ],
)
def test_an_invalid_list_is_refused_with_the_line_or_the_label(images, text, named):
    (images / "a.txt").write_bytes(text)
    with pytest.raises(DataError) as caught:
        open_dataset(images / "a.txt")
    assert "a.txt" in str(caught.value) and re.search(named, str(caught.value))


@pytest.mark.parametrize("line", ["ann.jpg Ann Lee", "ann.JPG", "ann/front.gif\tann", "ann/front.jpg;ann"])
def test_a_first_line_that_is_an_entry_and_not_understood_is_no_header(images, line):
    (images / "a.txt").write_text(f"{line}\na/1.png\t0\na/2.png\t1\n")
    with pytest.raises(DataError, match="a.txt, line 1: .* does not name an image"):
        open_dataset(images / "a.txt")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a/1.png 0 1 2", "it has 4 fields"),
        ("a/1.png 3 1", "it has 3 fields"),
        ("a/1.png;ann", "separated by `;`"),
        ('"a/1.png";"ann"', "separated by `;`"),
        ("a/1.png", "it has no identity"),
    ],
)
def test_the_message_says_what_a_line_has_in_place_of_path_and_identity(images, line, found):
    (images / "a.txt").write_text(f"a/2.png 0\n{line}\n")
    with pytest.raises(DataError, match=f"a.txt, line 2: .* and its identity: .*{found}"):
        open_dataset(images / "a.txt")


@pytest.mark.parametrize("end", ["", " 0"])
def test_the_training_list_of_magface_has_the_identity_in_its_third_field(images, end):
    (images / "a.txt").write_text(f"a/1.png 0 0{end}\na/2.png 0 7{end}\n")
    dataset = open_dataset(images / "a.txt")
    assert dataset.labels.tolist() == [0, 7] and dataset.name(1) == "a/2.png"


@pytest.mark.parametrize(
    "header",
    ["image/path\tidentity", "# made by tool.py", "image.path,image.label", "file (relative to /data),label",
     "# a/1.raw\t0"],
)  # fmt: skip
def test_the_first_line_may_be_a_comment_or_name_columns(images, header):
    (images / "a.txt").write_text(f"{header}\na/1.png\t0\na/2.png\t1\n")
    assert open_dataset(images / "a.txt").labels.tolist() == [0, 1]


def test_a_number_may_be_written_with_a_fraction_or_an_exponent(images):
    (images / "a.txt").write_text("a/1.png 10\na/2.png 1.000000e+01\nb/my face.png 10.0\n")
    assert open_dataset(images / "a.txt").labels.tolist() == [10, 10, 10]


def test_the_list_of_im2rec_may_have_spaces_in_place_of_tabs(images):
    (images / "a.txt").write_text("7 2.000000 a/1.png\n2 0 a/2.png\n")
    assert open_dataset(images / "a.txt").labels.tolist() == [2, 0]


@pytest.mark.parametrize("digits", [17, 19, 20, 5000])
def test_large_numbers_of_images_may_differ_by_one(images, digits):
    large = "5" * (digits - 1)
    (images / "a.txt").write_text(f"{large}5 2 a/1.png\n{large}6 0 a/2.png\n")
    assert open_dataset(images / "a.txt").labels.tolist() == [2, 0]


def test_the_list_of_insightface_may_have_spaces_in_place_of_tabs(images):
    (images / "a.lst").write_text("1 a/1.png 2\n1 a/2.png 0\n")
    dataset = open_dataset(images / "a.lst")
    assert dataset.labels.tolist() == [2, 0] and dataset.name(1) == "a/2.png"


@pytest.mark.parametrize("separator", ["\t", " "])
def test_the_landmarks_of_photos_are_known_and_those_of_aligned_faces_are_not(images, separator):
    x, y = [10.5, 20, 15, 11, 19], [1, 2, 3, 4, 5.25]
    photo = separator.join(map(str, ["0", "a/1.png", "3", 0, 0, 9, 9, *x, *y]))
    face = separator.join(["1", "a/2.png", "0"])
    for text, rows in ((f"{face}\n{face}\n{photo}\n", [None, 0]), (f"{photo}\n{face}\n", [0, None])):
        (images / "a.lst").write_text(text)
        dataset = open_dataset(images / "a.lst")
        points = dataset.photo_landmarks
        for row, photo_row in enumerate(rows):
            expected = np.array([x, y]).T if photo_row == 0 else np.full((5, 2), np.nan)
            np.testing.assert_array_equal(points[row], expected)
    (images / "b.lst").write_text(face)
    assert open_dataset(images / "b.lst").photo_landmarks is None
    # Nor does a part of the list, or a mixture with it, pass for aligned faces.
    chosen = ImageSubset(open_dataset(images / "a.lst"), np.array([0]))
    (images / "m.yaml").write_text("datasets:\n- path: b.lst\n- path: a.lst\n")
    assert np.isnan(open_dataset(images / "m.yaml").photo_landmarks[0]).all()
    for part in (chosen, open_dataset(images / "m.yaml")):
        with pytest.raises(DataError, match="1 image is not aligned"):
            require_aligned(part, "x")
    require_aligned(ImageSubset(open_dataset(images / "a.lst"), np.array([1])), "x")


@pytest.mark.parametrize("box", ["", "\t0\t0\t9\t9"])
def test_a_photo_without_landmarks_is_aligned_by_a_detector_and_does_not_pass_for_an_aligned_face(
    images, box
):
    (images / "a.lst").write_text(f"1\ta/2.png\t0\n0\ta/1.png\t3{box}\n")
    (images / "m.yaml").write_text("datasets:\n- path: a.lst\n")
    for name in ("a.lst", "m.yaml"):
        with pytest.raises(DataError, match="1 image is not aligned .* --detector yunet$"):
            open_aligned(images / name)
    with pytest.raises(
        DataError, match=r"a\.lst: 1 image is not aligned .* no landmarks of them; give --detector"
    ):
        pack(images / "a.lst", images / "out")
    found = []
    pack(images / "a.lst", images / "out", landmarks=lambda name, _: found.append(name) or ARCFACE_TEMPLATE)
    assert sorted(found) == ["a/1.png", "a/2.png"] and open_aligned(images / "out").labels.tolist() == [0, 1]


def test_a_repeated_line_is_left_out_and_listed_and_one_with_another_identity_refused(images):
    (images / "a.txt").write_text("a/1.png 0\na/2.png 1\na/1.png 0\n./a//1.png 0\n")
    dataset = open_dataset(images / "a.txt")
    assert dataset.labels.tolist() == [0, 1] and dataset.name(1) == "a/2.png"
    assert [file.kind for file in dataset.skipped] == ["repeated", "repeated"]
    for repeated in ("a/1.png", "./a/1.png"):
        (images / "a.txt").write_text(f"a/1.png 0\na/2.png 1\n{repeated} 1\n")
        with pytest.raises(DataError, match=r"a/1\.png has two identities"):
            open_dataset(images / "a.txt")


def test_two_paths_with_one_hash_are_two_images(images, monkeypatch):
    monkeypatch.setattr(image_list, "hash", len, raising=False)
    (images / "a.txt").write_text("a/1.png 0\na/2.png 1\n")
    assert open_dataset(images / "a.txt").num_images == 2


def test_numbers_with_underscores_are_names(images):
    (images / "a.txt").write_text("a/1.png 1_1\na/2.png 12\n")
    dataset = open_dataset(images / "a.txt")
    assert dataset.labels.tolist() == [1, 0] and dataset.identity_name(1) == "1_1"
