import unicodedata
from pathlib import Path
from unittest import mock

import cv2
import numpy as np
import pytest

from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.data.formats.bin_tables import subjects_path, write_subjects
from facetrain.data.formats.landmark_file import landmarks_path, write_landmarks
from facetrain.data.images.header import read_header
from facetrain.data.tools.landmark_table import read_landmark_table
from facetrain.data.tools.pair_sources import find_group_bins, group_bin_pairs, is_pair_list
from facetrain.data.tools.pair_writer import write_pairs
from facetrain.data.tools.yunet import YuNet
from facetrain.errors import ImageError, PairsError
from facetrain.verify.sets.pair_set import load_pair_set
from facetrain.verify.sets.slice_table import read_slice_table
from tests.support.datasets import encoded_image
from tests.support.detector import write_detector
from tests.support.pairs import convert_bin, convert_pair_list


@pytest.fixture
def flat(tmp_path):
    (tmp_path / "flat").mkdir()
    for number, name in enumerate(("ann_0001", "ann_0002", "bob_x_0001")):
        (tmp_path / "flat" / f"{name}.jpg").write_bytes(encoded_image(number))
    return tmp_path / "flat"


def test_lists_with_two_lines_per_pair_find_images_in_one_folder_or_one_per_person(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg 3\nann_0002.jpg 3\nann_0001.jpg 0\nbob_x_0001.jpg 0\n")
    assert convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin") == (2, 1)
    for path in list(flat.iterdir()):
        folder = flat / path.stem.rpartition("_")[0]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "b.bin")
    images, same = read_bin(tmp_path / "b.bin")
    assert same.tolist() == [True, False]
    assert images == [encoded_image(number) for number in (0, 1, 0, 2)] == read_bin(tmp_path / "a.bin")[0]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("../list.jpg ann_0002.jpg 1", 1),
        ("none.jpg ann_0002.jpg 1", 1),
        ("ann_0001.jpg ann_0002.jpg 2", 1),
        ("ann_0001.jpg 1\n", 1),
        ("ann_0001.jpg ²\nann_0002.jpg ²\n", 1),
        ("ann_0001.jpg 1\nann_0002.jpg 0\n", 2),
        ("ann_0001.jpg 1\nann_0009.jpg 1\n", 2),
        ("ann_0001.jpg 1\nann_0002 2\n", 2),
    ],
)
def test_a_wrong_line_of_a_list_of_images_is_named(flat, tmp_path, text, line):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(PairsError, match=f"line {line}"):
        convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin")


def test_the_subjects_of_a_list_are_written_beside_the_set_and_used(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg 3\nann_0002.jpg 3\nann_0001.jpg 0\nbob_x_0001.jpg 0\n")
    convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin")
    assert (tmp_path / "a.subjects.csv").read_text() == "subject\nann\nann\nann\nbob_x\n"
    assert load_pair_set("a", tmp_path).subject.tolist() == [0, 0, 0, 1]
    # The names of these files are not those of people: they contradict the labels. The table of the replaced set goes.
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 0\nann_0001.jpg bob_x_0001.jpg 1\n")
    convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin")
    assert not (tmp_path / "a.subjects.csv").exists() and load_pair_set("a", tmp_path).subject is None


@pytest.mark.parametrize(
    "text",
    [
        "subject\nann\nann\nann\n",
        "subject\nann\nann\nann\nann\n",
        "ann\nann\nann\nbob\n",
        'subject\n""\n""\nbob\nann\n',
        "subject\n" + "x" * 9999,
    ],
)
def test_a_table_of_subjects_of_another_set_is_refused(tmp_path, text):
    write_bin(tmp_path / "a.bin", [encoded_image(n) for n in range(4)], [True, False])
    (tmp_path / "a.subjects.csv").write_text(text, encoding="latin1")
    with pytest.raises(PairsError, match=r"a\.subjects\.csv"):
        load_pair_set("a", tmp_path)


@pytest.fixture
def cfp(tmp_path):
    """CFP's folders, two people and two folds; image n of the frontal list is 10 + n, of the others 20 + n."""
    protocol = tmp_path / "cfp" / "Protocol"
    for pose, letter, start in (("frontal", "F", 10), ("profile", "P", 20)):
        lines = []
        for number, person in enumerate(("001", "001", "002"), start=1):
            path = tmp_path / "cfp" / "Data" / "Images" / person / pose / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded_image(start + number))
            lines.append(f"{number} ../Data/Images/{person}/{pose}/{number:02d}.jpg\n")
        (protocol / "Split").mkdir(parents=True, exist_ok=True)
        (protocol / f"Pair_list_{letter}.txt").write_text("".join(lines))
    for split in ("FF", "FP"):
        for fold, (same, different) in (("01", ("1,2", "1,3")), ("02", ("2,1", "3,2"))):
            (protocol / "Split" / split / fold).mkdir(parents=True)
            (protocol / "Split" / split / fold / "same.txt").write_text(same + "\n")
            (protocol / "Split" / split / fold / "diff.txt").write_text(different + "\n")
    return tmp_path / "cfp"


def test_the_splits_of_cfp_become_verification_sets(cfp, tmp_path):
    for split, other in (("FP", 20), ("FF", 10)):
        folder = cfp / "Protocol" / "Split" / split
        assert is_pair_list(folder, None)
        assert convert_pair_list(folder, None, tmp_path / "a.bin") == (4, 2)
        images, same = read_bin(tmp_path / "a.bin")
        assert same.tolist() == [True, False, True, False]
        pairs = [(11, other + 2), (11, other + 3), (12, other + 1), (13, other + 2)]
        assert images == [encoded_image(number) for pair in pairs for number in pair]
        assert load_pair_set("a", tmp_path).subject.tolist() == [0, 0, 0, 1, 0, 0, 1, 0]
    (cfp / "Data" / "Images").rename(tmp_path / "aligned")
    assert convert_pair_list(folder, tmp_path / "aligned", tmp_path / "b.bin") == (4, 2)
    (folder / "02" / "diff.txt").write_text("1,9\n")
    with pytest.raises(PairsError, match=r"diff\.txt, line 1"):
        convert_pair_list(folder, tmp_path / "aligned", tmp_path / "c.bin")


def test_the_images_of_pairs_are_aligned_by_landmarks(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 1\n")
    (tmp_path / "points.csv").write_text("".join(f"ann_000{n}.jpg,4,6,11,6,8,8,5,11,10,11\n" for n in (1, 2)))
    listed = read_landmark_table(tmp_path / "points.csv")
    convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin", landmarks=listed, image_size=64)
    assert [read_header(image)[1:] for image in read_bin(tmp_path / "a.bin")[0]] == [(64, 64)] * 2
    (tmp_path / "list.txt").write_text("ann_0001.jpg bob_x_0001.jpg 0\n")
    with pytest.raises(ImageError, match=r"bob_x_0001\.jpg"):
        convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "b.bin", landmarks=listed)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".tmp")) == ["a.bin"]


def test_absolute_paths_in_a_list_name_images_and_people_in_the_folder(dataset, tmp_path, monkeypatch):
    names = ("ann/ann_0001.jpg", "ann/ann_0002.jpg", "cy/cy_0001.jpg")
    first, second, other = (dataset / name for name in names)
    (tmp_path / "list.txt").write_text(f"{first} {second} 1\n{first} {other} 0\n")
    (tmp_path / "points.csv").write_text("".join(f"{name},4,6,11,6,8,8,5,11,10,11\n" for name in names))
    monkeypatch.chdir(dataset.parent)
    listed = read_landmark_table(tmp_path / "points.csv")
    convert_pair_list(tmp_path / "list.txt", Path(dataset.name), tmp_path / "a.bin", landmarks=listed)
    assert (tmp_path / "a.subjects.csv").read_text() == "subject\nann\nann\nann\ncy\n"


def test_the_face_of_an_image_in_several_pairs_is_searched_once_and_its_center_taken_without_one(
    flat, tmp_path
):
    pytest.importorskip("onnx")
    find = YuNet(write_detector(tmp_path / "yunet.onnx"), center_crop=True)
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 1\nann_0001.jpg bob_x_0001.jpg 0\n")
    face = np.full((128, 128, 3), 60, np.uint8)
    face[32:64, 32:64] = 255
    cv2.imwrite(str(flat / "ann_0001.jpg"), face)
    with mock.patch.object(YuNet, "__call__", autospec=True, side_effect=YuNet.__call__) as call:
        convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin", landmarks=find, workers=1)
    assert [one.args[1] for one in call.call_args_list] == ["ann_0001.jpg", "ann_0002.jpg", "bob_x_0001.jpg"]
    assert find.fallbacks == dict.fromkeys(("ann_0002.jpg", "bob_x_0001.jpg"), "center crop")


PATHS = [
    ("Zoë Lee/Zoë Lee_0001.jpg", "Zoë Lee/Zoë Lee_0002.jpg", "1"),
    ("Zoë Lee/Zoë Lee_0001.jpg", "Bo/Bo_0001.jpg", "0"),
]
"""Pairs of images in folders, one of them with a space, and their labels."""


@pytest.mark.parametrize(
    "lines",
    [
        [("Zoë Lee", "1", "2"), ("Zoë Lee", "1", "Bo", "1")],
        [("10", "1"), ("Zoë Lee", "1", "2"), ("Zoë Lee", "1", "Bo", "1")],
        PATHS,
        [(label, first, second) for first, second, label in PATHS],
        [
            ("Zoë Lee_0001.jpg", "3"),
            ("Zoë Lee_0002.jpg", "3"),
            ("Zoë Lee_0001.jpg", "0"),
            ("Bo_0001.jpg", "0"),
        ],
    ],
)
@pytest.mark.parametrize("suffix", [".jpg", ".JPG", ".PNG"])
@pytest.mark.parametrize("separator", ["\t", " "])
def test_every_form_of_a_list_takes_tabs_between_names_with_spaces_and_suffixes_in_capitals(
    tmp_path, lines, suffix, separator
):
    if suffix == ".PNG" and any(".jpg" in word for line in lines for word in line):
        lines = [[word.replace(".jpg", ".png") for word in line] for line in lines]
    name = "Zoë Lee" if separator == "\t" else "ZoëLee"
    for number, (person, image) in enumerate(((name, 1), (name, 2), ("Bo", 1))):
        (tmp_path / "imgs" / person).mkdir(parents=True, exist_ok=True)
        path = tmp_path / "imgs" / person / f"{person}_000{image}{suffix}"
        path.write_bytes(encoded_image(number))
    text = "\n".join(separator.join(line) for line in lines).replace("Zoë Lee", name)
    (tmp_path / "list.txt").write_text(text + "\n", encoding="utf-8")
    assert convert_pair_list(tmp_path / "list.txt", tmp_path / "imgs", tmp_path / "a.bin") == (2, 1)
    images, same = read_bin(tmp_path / "a.bin")
    assert images == [encoded_image(number) for number in (0, 1, 0, 2)] and same.tolist() == [True, False]


@pytest.mark.parametrize(("listed", "stored"), [("NFC", "NFD"), ("NFD", "NFC")])
@pytest.mark.parametrize("text", ["Zoë\t1\t2\n", "Zoë/Zoë_0001.jpg\tZoë/Zoë_0002.jpg\t1\n"])
def test_a_name_with_an_accent_is_found_in_both_forms_of_unicode(tmp_path, listed, stored, text):
    folder = tmp_path / "imgs" / unicodedata.normalize(stored, "Zoë")
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"{folder.name}_000{number}.JPG").write_bytes(encoded_image(number))
    (tmp_path / "list.txt").write_text(unicodedata.normalize(listed, text), encoding="utf-8")
    assert convert_pair_list(tmp_path / "list.txt", tmp_path / "imgs", tmp_path / "a.bin") == (1, 1)


def test_a_byte_order_mark_is_no_part_of_a_list(dataset, tmp_path):
    (tmp_path / "pairs.txt").write_text("ann\t1\t3\nann\t2\tcy\t1\n", encoding="utf-8-sig")
    assert convert_pair_list(tmp_path / "pairs.txt", dataset, tmp_path / "set.bin") == (2, 1)


@pytest.mark.parametrize(
    "line", ["ann 1 9", "ann", "ann 1 ann 2", "../ann 1 2", "ann x 2", "ann ² 2", f"ann {'1' * 5000} 2", ""]
)
def test_a_wrong_list_is_named(dataset, tmp_path, line):
    (tmp_path / "pairs.txt").write_text(line + "\n")
    with pytest.raises(PairsError, match=r"pairs\.txt"):
        convert_pair_list(tmp_path / "pairs.txt", dataset, tmp_path / "set.bin")


def test_a_pair_with_an_image_that_evaluation_cannot_read_is_refused(flat, tmp_path):
    (flat / "bob_x_0001.jpg").write_bytes(b"damaged")
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 1\nann_0001.jpg bob_x_0001.jpg 0\n")
    with pytest.raises(ImageError, match=r"flat/bob_x_0001\.jpg"):
        convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin")


def test_the_tables_of_a_set_stay_if_it_cannot_be_read_and_are_carried_along(tmp_path):
    images = [encoded_image(0), b"no image", encoded_image(1), encoded_image(2)]
    write_bin(tmp_path / "set.bin", images, [True, False])
    (tmp_path / "set.groups.csv").write_text("group\nAsian\nAsian\nIndian\nAfrican\n")
    # With a byte order mark, as spreadsheets write it.
    (tmp_path / "set.subjects.csv").write_text("subject\nann\nann\nbob\ncy\n", encoding="utf-8-sig")
    np.save(tmp_path / "set.landmarks.npy", np.arange(40, dtype=np.float32).reshape(4, 5, 2) / 40)
    (tmp_path / "new.groups.csv").write_text("group\nof an older set\n")
    with pytest.raises(ImageError, match="image 1"):
        convert_bin(tmp_path / "set.bin", tmp_path / "new.bin")
    assert (tmp_path / "new.groups.csv").exists() and not (tmp_path / "new.bin").exists()
    write_bin(tmp_path / "set.bin", [encoded_image(n) for n in range(4)], [True, False])
    assert convert_bin(tmp_path / "set.bin", tmp_path / "new.bin") == (2, 1)
    assert (tmp_path / "new.groups.csv").read_text() == (tmp_path / "set.groups.csv").read_text()
    assert load_pair_set("new", tmp_path).subject.tolist() == [0, 0, 1, 2]
    assert np.load(tmp_path / "new.landmarks.npy")[2, 0, 0] == 0.5


def test_a_list_with_all_genuine_pairs_first_gets_mixed_folds(tmp_path):
    """CALFW's list: the genuine pairs of the folds 1 to 10, then all impostor pairs with the number 0."""
    for person in range(20):
        for image in (1, 2):
            path = tmp_path / "faces" / f"p{person:02d}_{image:04d}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(encoded_image(2 * person + image))
    lines = [f"p{n:02d}_0001.jpg {n // 2 + 1}\np{n:02d}_0002.jpg {n // 2 + 1}\n" for n in range(20)]
    lines += [f"p{n:02d}_0001.jpg 0\np{(n + 1) % 20:02d}_0001.jpg 0\n" for n in range(20)]
    (tmp_path / "pairs_CALFW.txt").write_text("".join(lines))
    assert convert_pair_list(tmp_path / "pairs_CALFW.txt", tmp_path / "faces", tmp_path / "calfw.bin") == (
        40,
        20,
    )
    images, same = read_bin(tmp_path / "calfw.bin")
    assert same.tolist() == [True, True, False, False] * 10
    first = [encoded_image(2 * n + 1) for n in range(20)]
    assert images[0::8] == first[0::2] and images[4::8] == first[0::2]
    assert images[2::8] == first[1::2] and images[6::8] == first[1::2]


def test_a_part_of_a_published_list_keeps_its_order_as_in_evaluation(flat, tmp_path):
    same, different = "ann_0001.jpg ann_0002.jpg 1\n", "ann_0001.jpg bob_x_0001.jpg 0\n"
    # Two published folds, each with its genuine pairs first: a tenth of the list has one kind.
    (tmp_path / "list.txt").write_text((same * 20 + different * 20) * 2)
    assert convert_pair_list(tmp_path / "list.txt", flat, tmp_path / "a.bin") == (80, 40)
    assert read_bin(tmp_path / "a.bin")[1].tolist() == ([True] * 20 + [False] * 20) * 2


RFW_GROUPS = ("African", "Asian", "Caucasian", "Indian")


def write_rfw(folder):
    for number, group in enumerate(RFW_GROUPS):
        images = [encoded_image(100 * number + image) for image in range(40)]
        write_bin(folder / f"{group}_test.bin", images, [True, False] * 10)


def test_the_bins_of_the_groups_of_rfw_become_one_set(tmp_path):
    write_rfw(tmp_path)
    write_pairs(group_bin_pairs(tmp_path), tmp_path / "rfw.bin")
    loaded = load_pair_set("rfw", tmp_path)
    group_P = read_slice_table(loaded.groups, loaded.same).columns["group"]
    assert group_P.tolist() == [group for _ in range(10) for group in RFW_GROUPS for _ in range(2)]
    assert loaded.same.tolist() == [True, False] * 40
    first_fold = [100 * number + image for number in range(4) for image in range(4)]
    assert loaded.images[:16] == [encoded_image(image) for image in first_fold]
    # A new set of this name drops the old groups.
    assert convert_bin(tmp_path / "Asian_test.bin", tmp_path / "rfw.bin") == (20, 10)
    assert load_pair_set("rfw", tmp_path).groups is None
    (tmp_path / "Asian_test.bin").unlink()
    assert not find_group_bins(tmp_path)


def test_the_set_of_rfw_has_the_subjects_and_landmarks_that_all_groups_have(tmp_path):
    write_rfw(tmp_path)
    landmarks_N52 = np.random.default_rng(0).uniform(size=(40, 5, 2)).astype(np.float32)
    people = [str(pair) if pair % 2 == 0 else f"{pair} {side}" for pair in range(20) for side in range(2)]
    for group in RFW_GROUPS:
        write_subjects(tmp_path / f"{group}_test.bin", people)
        write_landmarks(landmarks_path(tmp_path / f"{group}_test.bin"), landmarks_N52)
    write_pairs(group_bin_pairs(tmp_path), tmp_path / "rfw.bin")
    loaded = load_pair_set("rfw", tmp_path)
    assert len(set(loaded.subject.tolist())) == 4 * len(set(people))
    np.testing.assert_array_equal(loaded.landmarks[:8], np.tile(landmarks_N52[:4], (2, 1, 1)))
    for beside in (subjects_path, landmarks_path):
        beside(tmp_path / "Asian_test.bin").unlink()
    write_pairs(group_bin_pairs(tmp_path), tmp_path / "rfw.bin")
    loaded = load_pair_set("rfw", tmp_path)
    assert loaded.subject is None and loaded.landmarks is None
