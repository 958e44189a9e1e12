import pytest

from facetrain.data.decode import encoded_image_size
from facetrain.data.formats.bin import read_bin
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.landmarks import read_landmarks
from facetrain.data.tools.pair_lists import build_pairs, is_pair_list
from facetrain.data.tools.sample_pairs import sample_pairs
from facetrain.errors import DataError, PairsError
from tests.support.datasets import encoded_image, write_records


@pytest.fixture
def flat(tmp_path):
    (tmp_path / "flat").mkdir()
    for number, name in enumerate(("ann_0001", "ann_0002", "bob_x_0001")):
        (tmp_path / "flat" / f"{name}.jpg").write_bytes(encoded_image(number))
    return tmp_path / "flat"


def test_lists_of_two_lines_a_pair_are_read_from_one_folder_or_one_per_person(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg 3\nann_0002.jpg 3\nann_0001.jpg 0\nbob_x_0001.jpg 0\n")
    assert build_pairs(tmp_path / "list.txt", flat, tmp_path / "a.bin") == (2, 1)
    for path in list(flat.iterdir()):
        folder = flat / path.stem.rpartition("_")[0]
        folder.mkdir(exist_ok=True)
        path.rename(folder / path.name)
    build_pairs(tmp_path / "list.txt", flat, tmp_path / "b.bin")
    images, same = read_bin(tmp_path / "b.bin")
    assert same.tolist() == [True, False]
    assert (
        images
        == [encoded_image(0), encoded_image(1), encoded_image(0), encoded_image(2)]
        == read_bin(tmp_path / "a.bin")[0]
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann_0001.jpg 1\n", "line 1: the last pair has one line"),
        ("ann_0001.jpg 1\nann_0002.jpg 0\n", "line 2: 0 does not go with the 1"),
        ("ann_0001.jpg 1\nann_0009.jpg 1\n", "line 2: there is no"),
        ("../flat/ann_0001.jpg 1\nann_0002.jpg 1\n", "line 1: .* no image's name"),
        ("ann_0001.jpg 1\nann_0002 2\n", "line 2: .* is no `image.jpg number`"),
    ],
)
def test_a_wrong_line_of_two_is_named(flat, tmp_path, text, said):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(PairsError, match=said):
        build_pairs(tmp_path / "list.txt", flat, tmp_path / "a.bin")


def test_two_paths_and_a_flag_are_a_pair(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 1\nann_0001.jpg bob_x_0001.jpg 0\n")
    assert build_pairs(tmp_path / "list.txt", flat, tmp_path / "a.bin") == (2, 1)
    assert read_bin(tmp_path / "a.bin")[0] == [
        encoded_image(0),
        encoded_image(1),
        encoded_image(0),
        encoded_image(2),
    ]
    for line, said in (
        ("../list.jpg ann_0002.jpg 1", "no image below"),
        ("none.jpg ann_0002.jpg 1", "there is no"),
        ("ann_0001.jpg ann_0002.jpg 2", "is no `image image 1`"),
    ):
        (tmp_path / "list.txt").write_text(line)
        with pytest.raises(PairsError, match=f"line 1: .*{said}"):
            build_pairs(tmp_path / "list.txt", flat, tmp_path / "b.bin")


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
        assert build_pairs(folder, None, tmp_path / "a.bin") == (4, 2)
        images, same = read_bin(tmp_path / "a.bin")
        assert same.tolist() == [True, False, True, False]
        pairs = [(11, other + 2), (11, other + 3), (12, other + 1), (13, other + 2)]
        assert images == [encoded_image(number) for pair in pairs for number in pair]
    (cfp / "Data" / "Images").rename(tmp_path / "aligned")
    assert build_pairs(folder, tmp_path / "aligned", tmp_path / "b.bin") == (4, 2)
    (folder / "02" / "diff.txt").write_text("1,9\n")
    with pytest.raises(PairsError, match=r"diff\.txt, line 1: '1,9' is no pair of images"):
        build_pairs(folder, tmp_path / "aligned", tmp_path / "c.bin")


def test_the_images_of_pairs_are_aligned_by_their_landmarks(flat, tmp_path):
    (tmp_path / "list.txt").write_text("ann_0001.jpg ann_0002.jpg 1\n")
    (tmp_path / "points.csv").write_text("".join(f"ann_000{n}.jpg,4,6,11,6,8,8,5,11,10,11\n" for n in (1, 2)))
    listed = read_landmarks(tmp_path / "points.csv")
    build_pairs(tmp_path / "list.txt", flat, tmp_path / "a.bin", landmarks=listed, image_size=64)
    assert [encoded_image_size(image) for image in read_bin(tmp_path / "a.bin")[0]] == [(64, 64)] * 2
    (tmp_path / "list.txt").write_text("ann_0001.jpg bob_x_0001.jpg 0\n")
    with pytest.raises(PairsError, match=r"no landmarks of a face \(bob_x_0001\.jpg\)"):
        build_pairs(tmp_path / "list.txt", flat, tmp_path / "b.bin", landmarks=listed)
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix in (".bin", ".tmp")) == ["a.bin"]


def test_drawn_pairs_are_different_halved_and_their_folds_have_nobody_in_common(tmp_path):
    data = write_records(tmp_path / "data", [person for person in range(40) for _ in range(1 + person % 4)])
    assert sample_pairs(data, tmp_path / "a.bin", pairs=40, seed=1) == (40, 20)
    source = open_dataset(data)
    whose = {source.read(number): int(source.labels[number]) for number in range(source.num_images)}
    images, same = read_bin(tmp_path / "a.bin")
    assert same.tolist() == [True, True, False, False] * 10
    pairs = list(zip(images[::2], images[1::2], strict=True))
    assert [whose[one] == whose[other] for one, other in pairs] == same.tolist()
    assert len({frozenset(pair) for pair in pairs}) == 40
    folds = [{whose[image] for image in images[start : start + 8]} for start in range(0, 80, 8)]
    assert sum(map(len, folds)) == len(set.union(*folds))


def test_drawn_pairs_depend_on_the_seed_alone(tmp_path):
    data = write_records(tmp_path / "data", [person for person in range(20) for _ in range(3)])
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        sample_pairs(data, tmp_path / f"{name}.bin", pairs=20, seed=seed)
    a, b, c = ((tmp_path / f"{name}.bin").read_bytes() for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("people", "pairs", "said"),
    [
        (20, 30, "multiple of 20"),
        (20, 0, "multiple of 20"),
        (19, 20, "19 identities"),
        (20, 200, "ask for fewer"),
    ],
)
def test_more_pairs_than_a_dataset_has_are_refused(tmp_path, people, pairs, said):
    data = write_records(tmp_path / "data", [person for person in range(people) for _ in range(2)])
    with pytest.raises(DataError, match=said):
        sample_pairs(data, tmp_path / "a.bin", pairs=pairs)
    assert not (tmp_path / "a.bin").exists()
