import pytest

from facetrain.data.bin import read_bin
from facetrain.data.dataset import open_source
from facetrain.data.tools.pairs import build_pairs
from facetrain.data.tools.sample_pairs import sample_pairs
from facetrain.errors import DataError, PairsError
from tests.support.datasets import picture, write_records


@pytest.fixture
def flat(tmp_path):
    (tmp_path / "flat").mkdir()
    for number, name in enumerate(("ann_0001", "ann_0002", "bob_x_0001")):
        (tmp_path / "flat" / f"{name}.jpg").write_bytes(picture(number))
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
    assert images == [picture(0), picture(1), picture(0), picture(2)] == read_bin(tmp_path / "a.bin")[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann_0001.jpg 1\n", "line 1: the last pair has one line"),
        ("ann_0001.jpg 1\nann_0002.jpg 0\n", "line 2: 0 does not go with the 1"),
        ("ann_0001.jpg 1\nann_0009.jpg 1\n", "line 2: there is no"),
        ("../flat/ann_0001.jpg 1\nann_0002.jpg 1\n", "line 1: .* no picture's name"),
        ("ann_0001.jpg 1\nann_0002 2\n", "line 2: .* is no `picture.jpg number`"),
    ],
)
def test_a_wrong_line_of_two_is_named(flat, tmp_path, text, said):
    (tmp_path / "list.txt").write_text(text)
    with pytest.raises(PairsError, match=said):
        build_pairs(tmp_path / "list.txt", flat, tmp_path / "a.bin")


def test_drawn_pairs_are_different_halved_and_their_folds_have_nobody_in_common(tmp_path):
    data = write_records(tmp_path / "data", [person for person in range(40) for _ in range(1 + person % 4)])
    assert sample_pairs(data, tmp_path / "a.bin", pairs=40, seed=1) == (40, 20)
    source = open_source(data)
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
