import pytest

from facetrain.data.open_dataset import open_dataset
from tests.support.datasets import write_records


@pytest.fixture
def data(tmp_path):
    return write_records(tmp_path / "data", [0, 0, 1, 1, 1, 2, 3, 3, 3, 3])


def test_an_index_in_another_order_gives_the_same_images(data):
    expected = open_dataset(data)
    images = [(expected.labels[number], expected.read(number)) for number in range(10)]
    lines = (data / "train.idx").read_text().splitlines()
    for first in (1, 12):  # an image, and an identity record
        (data / "train.idx").write_text("\n".join([*lines[first:], *lines[:first]]) + "\n")
        found = open_dataset(data)
        moved = images[first - 1 :] + images[: first - 1] if first < 11 else images
        assert [(found.labels[number], found.read(number)) for number in range(10)] == moved
