import pytest

from facetrain.data.formats.record_index import rebuild_index
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, RecordError
from tests.support.datasets import write_records


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", [0, 0, 1, 1, 1, 2, 3, 3, 3, 3])


def test_a_rebuilt_index_equals_the_lost_one(data):
    lost = (data / "train.idx").read_bytes()
    with pytest.raises(DataError, match="already exists"):
        rebuild_index(data / "train.rec")
    (data / "train.idx").unlink()
    assert rebuild_index(data / "train.rec") == 15
    assert (data / "train.idx").read_bytes() == lost


def test_no_index_is_written_for_a_truncated_file(data):
    whole = (data / "train.rec").read_bytes()
    (data / "train.rec").write_bytes(whole[: len(whole) // 2])
    before = (data / "train.idx").read_bytes()
    with pytest.raises(RecordError, match="file is truncated"):
        rebuild_index(data / "train.rec", overwrite=True)
    assert (data / "train.idx").read_bytes() == before
    assert len(list(data.glob("*.tmp")) + list(data.glob(".*.tmp"))) == 0


def test_an_index_in_another_order_gives_the_same_images(data):
    expected = open_dataset(data)
    images = [(expected.labels[number], expected.read(number)) for number in range(10)]
    lines = (data / "train.idx").read_text().splitlines()
    for first in (1, 12):  # an image, and an identity record
        (data / "train.idx").write_text("\n".join([*lines[first:], *lines[:first]]) + "\n")
        found = open_dataset(data)
        moved = images[first - 1 :] + images[: first - 1] if first < 11 else images
        assert [(found.labels[number], found.read(number)) for number in range(10)] == moved
