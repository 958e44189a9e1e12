"""Small folders in the layouts of the publishers."""

import shutil

import cv2
import numpy as np
import pytest

from facetrain.data.formats.bin import read_bin, write_bin
from facetrain.data.images.header import encoded_image_size
from facetrain.data.tools.landmarks import read_landmarks
from facetrain.data.tools.pair_lists import is_pair_list
from facetrain.data.tools.pair_writer import write_pairs
from facetrain.data.tools.published_sets import find_group_bins, find_published_set, group_bin_pairs
from facetrain.errors import PairsError
from facetrain.verify.sets.pair_set import load_pair_set
from facetrain.verify.sets.slice_table import read_slice_table
from tests.support.datasets import encoded_image
from tests.support.pairs import convert_pair_list

POINTS = "4\t6\t11\t6\t8\t8\t5\t11\t10\t11"
GROUPS = ("African", "Asian", "Caucasian", "Indian")


def write_image(path, number, size=16):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded_image(number, size))


@pytest.fixture
def people(tmp_path):
    """Return a function that writes a folder per person: Ann with images 1 and 2, Bob_X with image 3."""

    def write(folder, start=0):
        for name, image, number in (("Ann", 1, 1), ("Ann", 2, 2), ("Bob_X", 1, 3)):
            write_image(folder / name / f"{name}_{image:04d}.jpg", start + number)

    return write


def images_of(path):
    return read_bin(path)[0]


def people_in(folder):
    return [f"{folder}/{image}" for image in ("Ann/Ann_0001", "Ann/Ann_0002", "Bob_X/Bob_X_0001")]


NUMBERED = "1\t1\nAnn\t1\t2\nAnn\t1\tBob_X\t1\n"
TWO_LINES = "Ann_0001.jpg 1\nAnn_0002.jpg 1\nAnn_0001.jpg 0\nBob_X_0001.jpg 0\n"
IN_ONE_FOLDER = [f"aligned images/{image}" for image in ("Ann_0001", "Ann_0002", "Bob_X_0001")]


@pytest.mark.parametrize(
    ("list_name", "images", "lines"),
    [
        ("pairs.txt", people_in("lfw-deepfunneled/lfw-deepfunneled"), NUMBERED),
        ("xqlfw_pairs.txt", people_in("xqlfw_aligned_112"), NUMBERED),
        (
            "pair_SLLFW.txt",
            people_in("lfw"),
            "Ann/Ann_0001.jpg\nAnn/Ann_0002.jpg\nAnn/Ann_0001.jpg\nBob_X/Bob_X_0001.jpg\n",
        ),
        ("pairs_CALFW.txt", IN_ONE_FOLDER, TWO_LINES),
        ("pairs_CPLFW.txt", IN_ONE_FOLDER, TWO_LINES),
        (  # MLFW, which is not taken for LFW
            "pairs.txt",
            ["lfw/x/x", "aligned/Ann_0001_0001", "aligned/Ann_0002_0000", "aligned/Bob_X_0001_0002"],
            "Ann_0001_0001.jpg\tAnn_0002_0000.jpg\t1\nAnn_0001_0001.jpg\tBob_X_0001_0002.jpg\t0\n",
        ),
    ],
)
def test_a_published_set_is_read_from_its_folder(tmp_path, list_name, images, lines):
    for number, image in enumerate(reversed(images)):
        write_image(tmp_path / f"{image}.jpg", number)
    (tmp_path / list_name).write_text(lines)
    assert is_pair_list(tmp_path, None) and find_published_set(tmp_path)[0] == tmp_path / list_name
    assert convert_pair_list(tmp_path, None, tmp_path / "set.bin") == (2, 1)
    assert images_of(tmp_path / "set.bin") == [encoded_image(number) for number in (2, 1, 2, 0)]
    assert (tmp_path / "set.subjects.csv").read_text() == "subject\nAnn\nAnn\nAnn\nBob_X\n"


def test_xqlfw_takes_its_original_images_if_they_will_be_aligned(people, tmp_path):
    people(tmp_path / "xqlfw_aligned_112")
    people(tmp_path / "lfw_original_imgs_min_qual0.85variant11", start=10)
    (tmp_path / "xqlfw_pairs.txt").write_text("10\t300\nAnn\t1\t2\nAnn\t2\tBob_X\t1\n")
    names = ("Ann/Ann_0001", "Ann/Ann_0002", "Bob_X/Bob_X_0001")
    points = "".join(f"{name}.jpg,{POINTS}\n" for name in names)
    (tmp_path / "points.csv").write_text(points.replace("\t", ","))
    listed = read_landmarks(tmp_path / "points.csv")
    assert find_published_set(tmp_path, originals=True)[1].name.startswith("lfw_original")
    convert_pair_list(tmp_path, None, tmp_path / "xqlfw.bin", landmarks=listed)
    assert {encoded_image_size(image) for image in images_of(tmp_path / "xqlfw.bin")} == {(112, 112)}


def test_a_list_with_all_genuine_pairs_first_gets_mixed_folds(tmp_path):
    """CALFW's list: the genuine pairs of the folds 1 to 10, then all impostor pairs with the number 0."""
    for person in range(20):
        for image in (1, 2):
            write_image(tmp_path / "aligned images" / f"p{person:02d}_{image:04d}.jpg", 2 * person + image)
    lines = [f"p{n:02d}_0001.jpg {n // 2 + 1}\np{n:02d}_0002.jpg {n // 2 + 1}\n" for n in range(20)]
    lines += [f"p{n:02d}_0001.jpg 0\np{(n + 1) % 20:02d}_0001.jpg 0\n" for n in range(20)]
    (tmp_path / "pairs_CALFW.txt").write_text("".join(lines))
    assert convert_pair_list(tmp_path, None, tmp_path / "calfw.bin") == (40, 20)
    images, same = read_bin(tmp_path / "calfw.bin")
    assert same.tolist() == [True, True, False, False] * 10
    first = [encoded_image(2 * n + 1) for n in range(20)]
    assert images[0::8] == first[0::2] and images[4::8] == first[0::2]
    assert images[2::8] == first[1::2] and images[6::8] == first[1::2]


def test_a_list_without_its_images_is_an_error(tmp_path):
    (tmp_path / "xqlfw_pairs.txt").write_text("Ann\t1\t2\n")
    with pytest.raises(PairsError, match=r"xqlfw_pairs\.txt of XQLFW but no folder of its images"):
        is_pair_list(tmp_path, None)


@pytest.fixture
def rfw(tmp_path):
    """Write RFW's folders: in each group ten folds with one genuine and one impostor pair of two people."""
    test = tmp_path / "rfw" / "test"
    for number, group in enumerate(GROUPS):
        people = (f"m.0{number}a_", f"m.0{number}b")
        lines, landmarks = [], []
        for at, person in enumerate(people):
            for image in (1, 2):
                name = f"{group}/{person}/{person}_{image:04d}.jpg"
                write_image(test / "data" / name, 10 * number + 2 * at + image)
                landmarks.append(f"/test/data/{name}\t{at}\t{POINTS}\n")
        lines = [f"{people[0]}\t1\t2\n", f"{people[0]}\t2\t{people[1]}\t1\n"] * 10
        (test / "txts" / group).mkdir(parents=True)
        (test / "txts" / group / f"{group}_pairs.txt").write_text("".join(lines))
        (test / "txts" / group / f"{group}_lmk.txt").write_text("".join(landmarks))
    return tmp_path / "rfw"


def test_rfw_is_one_set_with_the_folds_of_its_four_groups(rfw, tmp_path):
    assert is_pair_list(rfw, None)
    assert convert_pair_list(rfw, None, tmp_path / "rfw.bin", image_size=32) == (80, 40)
    assert {encoded_image_size(image) for image in images_of(tmp_path / "rfw.bin")} == {(32, 32)}
    loaded = load_pair_set("rfw", tmp_path)
    assert loaded.subject.max() + 1 == 8
    group_P = read_slice_table(loaded.groups, loaded.same).columns["group"]
    for fold in range(10):
        assert group_P[8 * fold : 8 * fold + 8].tolist() == [group for group in GROUPS for _ in range(2)]
        assert loaded.same[8 * fold : 8 * fold + 8].tolist() == [True, False] * 4


def test_the_landmarks_of_rfw_are_those_of_the_image(rfw, tmp_path):
    """Each image is a white dot at its left eye: after the alignment it is at the left eye of the template."""
    for index, path in enumerate(sorted((rfw / "test" / "data").rglob("*.jpg"))):
        image = np.zeros((200, 200, 3), np.uint8)
        eye = np.array([60 + index, 70 + index])
        cv2.circle(image, eye.tolist(), 3, (255, 255, 255), -1)
        path.write_bytes(cv2.imencode(".png", image)[1].tobytes())
        points = eye + np.array([[0, 0], [35, 0], [18, 20], [3, 41], [32, 41]])
        lines = rfw / "test" / "txts" / path.parts[-3] / f"{path.parts[-3]}_lmk.txt"
        kept = [line for line in lines.read_text().splitlines() if path.name not in line]
        numbers = "\t".join(str(number) for point in points for number in point)
        lines.write_text("\n".join([*kept, f"/test/data/{'/'.join(path.parts[-3:])}\t0\t{numbers}"]) + "\n")
    convert_pair_list(rfw / "test", None, tmp_path / "rfw.bin")
    for image in images_of(tmp_path / "rfw.bin"):
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_GRAYSCALE)
        center = np.argwhere(pixels > 128).mean(0)[::-1]
        assert np.abs(center - (38.3, 51.7)).max() < 2
    (rfw / "test" / "txts" / "Asian" / "Asian_lmk.txt").write_text("/test/data/Asian/a.jpg\t0\t1\t2\n")
    with pytest.raises(PairsError, match=r"Asian_lmk\.txt, line 1: .* is not of the form `path number"):
        convert_pair_list(rfw, None, tmp_path / "rfw.bin")


def test_the_bins_of_the_groups_of_rfw_become_one_set(tmp_path):
    for number, group in enumerate(GROUPS):
        images = [encoded_image(100 * number + image) for image in range(40)]
        write_bin(tmp_path / f"{group}_test.bin", images, [True, False] * 10)
    assert write_pairs(group_bin_pairs(tmp_path), tmp_path / "rfw.bin")[:2] == (80, 40)
    loaded = load_pair_set("rfw", tmp_path)
    group_P = read_slice_table(loaded.groups, loaded.same).columns["group"]
    assert group_P.tolist() == [group for _ in range(10) for group in GROUPS for _ in range(2)]
    assert loaded.same.tolist() == [True, False] * 40
    first_fold = [100 * number + image for number in range(4) for image in range(4)]
    assert loaded.images[:16] == [encoded_image(image) for image in first_fold]
    (tmp_path / "Asian_test.bin").unlink()
    assert not find_group_bins(tmp_path)


def test_rfw_without_landmarks_keeps_its_images_and_a_new_set_drops_old_groups(rfw, people, tmp_path):
    for path in rfw.rglob("*_lmk.txt"):
        path.unlink()
    convert_pair_list(rfw, None, tmp_path / "a.bin")
    assert images_of(tmp_path / "a.bin")[:2] == [encoded_image(1), encoded_image(2)]
    assert (tmp_path / "a.groups.csv").is_file()
    shutil.rmtree(rfw / "test" / "txts")
    people(rfw / "lfw")
    (rfw / "pairs.txt").write_text("Ann\t1\t2\n")
    convert_pair_list(rfw, None, tmp_path / "a.bin")
    assert not (tmp_path / "a.groups.csv").exists()
    assert load_pair_set("a", tmp_path).groups is None
