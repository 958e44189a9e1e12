import numpy as np
import pytest

from facetrain.data.formats.recordio import RecordReader
from facetrain.data.open_dataset import open_dataset
from facetrain.data.tools.rewrite import merge, shuffle, split, subset
from facetrain.data.tools.unpack import index, unpack
from facetrain.errors import DataError, RecordError
from tests.support.datasets import write_records

LABELS = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", LABELS)


def content(folder):
    """Which images belong together, whatever the numbers of the identities and the order."""
    source = open_dataset(folder)
    groups = {label: set() for label in source.labels.tolist()}
    for number, label in enumerate(source.labels.tolist()):
        groups[label].add(source.read(number))
    return {frozenset(group) for group in groups.values()}


def test_merged_datasets_keep_their_people_apart(data, tmp_path):
    other = write_records(tmp_path / "other", [0, 1, 1])
    written = merge([data, other], tmp_path / "out")
    assert (written.identities, written.images) == (6, 13)
    source = open_dataset(tmp_path / "out")
    assert source.labels.tolist() == [*LABELS, 4, 5, 5]
    assert source.read(11) == open_dataset(other).read(1)
    assert (tmp_path / "out" / "property").read_text() == "6,16,16\n"


def test_shuffled_images_keep_their_people_and_depend_on_the_seed_alone(data, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        shuffle(data, tmp_path / name, seed=seed, workers=seed + 1)
    a, b, c = ((tmp_path / name / "train.rec").read_bytes() for name in "abc")
    assert a == b != c
    assert content(tmp_path / "a") == content(data)
    assert open_dataset(tmp_path / "a").labels.tolist() != LABELS


def test_the_parts_of_a_split_have_nobody_in_common_and_miss_nobody(data, tmp_path):
    train, validation = split(data, tmp_path / "out", validation=0.25, seed=3)
    assert (train.identities, validation.identities) == (3, 1)
    one, other = content(tmp_path / "out" / "train"), content(tmp_path / "out" / "validation")
    assert not one & other and one | other == content(data)


@pytest.mark.parametrize("part", [0.0, 1.0, -1.0])
def test_a_split_that_leaves_one_side_empty_is_refused(data, tmp_path, part):
    with pytest.raises(DataError, match="cannot be split"):
        split(data, tmp_path / "out", validation=part)


def test_a_subset_keeps_who_is_listed_and_no_more_images_than_asked_for(data, tmp_path):
    (tmp_path / "keep.txt").write_text("3\n1\n")
    subset(data, tmp_path / "listed", listed=tmp_path / "keep.txt")
    assert open_dataset(tmp_path / "listed").labels.tolist() == [0, 0, 0, 1, 1, 1, 1]
    subset(data, tmp_path / "few", min_images_per_identity=2, max_images_per_identity=2)
    assert open_dataset(tmp_path / "few").labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert subset(data, tmp_path / "two", identities=2, seed=5).identities == 2
    assert content(tmp_path / "two") < content(data)


@pytest.mark.parametrize(
    ("listed", "said"),
    [("7", "no identity 7"), ("-1", "no identity -1"), ("x", "not a list"), ("", "none of")],
)
def test_a_list_of_identities_that_are_not_there_is_refused(data, tmp_path, listed, said):
    (tmp_path / "keep.txt").write_text(listed)
    with pytest.raises(DataError, match=said):
        subset(data, tmp_path / "out", listed=tmp_path / "keep.txt")
    assert not (tmp_path / "out").exists()


def test_unpacked_images_are_the_records_bytes_in_a_folder_per_identity(data, tmp_path):
    assert unpack(data, tmp_path / "out") == (4, 10)
    assert content(tmp_path / "out") == content(data)
    assert (tmp_path / "out" / "3" / "9.png").read_bytes() == open_dataset(data).read(9)


def test_a_failure_half_way_leaves_nothing_behind(data, tmp_path):
    def stop(done, total):
        if done == 5:
            raise KeyboardInterrupt

    for number, tool in enumerate((shuffle, unpack)):
        with pytest.raises(KeyboardInterrupt):
            tool(data, tmp_path / f"out{number}", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    with pytest.raises(DataError, match="is there already"):
        shuffle(data, data)


def test_an_index_written_anew_is_the_one_that_was_lost(data):
    lost = (data / "train.idx").read_bytes()
    with pytest.raises(DataError, match="is there already"):
        index(data / "train.rec")
    (data / "train.idx").unlink()
    assert index(data / "train.rec") == 15
    assert (data / "train.idx").read_bytes() == lost


def test_no_index_is_written_of_a_file_that_is_cut_off(data):
    whole = (data / "train.rec").read_bytes()
    (data / "train.rec").write_bytes(whole[: len(whole) // 2])
    before = (data / "train.idx").read_bytes()
    with pytest.raises(RecordError, match="cut off"):
        index(data / "train.rec", overwrite=True)
    assert (data / "train.idx").read_bytes() == before
    assert len(list(data.glob("*.tmp")) + list(data.glob(".*.tmp"))) == 0


def test_a_written_dataset_has_the_layout_that_mxnet_readers_expect(data, tmp_path):
    subset(data, tmp_path / "out")
    records = list(RecordReader(tmp_path / "out" / "train.rec").scan())
    assert len(records) == 1 + 10 + 4
    assert np.frombuffer(records[0][1][24:32], "<f4").tolist() == [11.0, 15.0]
