import pytest

from facetrain.data.formats.record_index import rebuild_index
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
