import pytest

from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, write_records


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", [0, 0, 1, 1, 1, 2, 3, 3, 3, 3])


@pytest.mark.usefixtures("in_pieces")
def test_an_index_in_another_order_gives_the_same_images(data):
    expected = open_dataset(data)
    images = [(expected.labels[number], expected.read(number)) for number in range(10)]
    lines = (data / "train.idx").read_text().splitlines()
    for first in (1, 12):  # an image, and an identity record
        (data / "train.idx").write_text("\n".join([*lines[first:], *lines[:first]]) + "\n")
        found = open_dataset(data)
        moved = images[first - 1 :] + images[: first - 1] if first < 11 else images
        assert [(found.labels[number], found.read(number)) for number in range(10)] == moved


@pytest.mark.parametrize("has_header", [True, False])
@pytest.mark.parametrize("row", [0, 1, 4, 10, -1])
@pytest.mark.usefixtures("in_pieces")
def test_an_index_without_one_of_the_records_is_refused(tmp_path, row, has_header):
    labels = [0, 0, 1, 1, 1, 2, 3, 3, 3, 3]
    data = write_records(tmp_path / "data", labels)
    if not has_header:
        with RecordWriter(data / "train.rec") as writer:
            for key, label in enumerate(labels):
                writer.write(3 * key, RecordHeader.of_image(label, key), encoded_image(key))
    assert open_dataset(data).num_images == 10
    lines = (data / "train.idx").read_text().splitlines(keepends=True)
    del lines[min(row, len(lines) - 1)]
    (data / "train.idx").write_text("".join(lines))
    with pytest.raises(DataError, match=r"train\."):
        open_dataset(data)
    (data / "train.idx").unlink()
    assert open_dataset(data).num_images == 10


def test_an_empty_index_is_named_and_not_the_records(data):
    (data / "train.idx").write_text("")
    with pytest.raises(DataError, match=r"train\.idx: is empty; remove it"):
        open_dataset(data)
