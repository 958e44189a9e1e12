import numpy as np
import pytest

from facetrain.data.formats.recordio import RecordHeader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError
from tests.support.datasets import encoded_image, images_of, write_records


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


@pytest.mark.usefixtures("in_pieces")
def test_records_in_another_order_give_the_same_images_and_ranges_that_hold_one_each(data):
    expected = images_of(open_dataset(data))
    content, lines = (data / "train.rec").read_bytes(), (data / "train.idx").read_text().splitlines()
    keys, starts = zip(*(map(int, line.split()) for line in lines), strict=True)
    records = [content[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)]
    order = [0, *range(10, 0, -2), *range(9, 0, -2), *range(11, len(keys))]
    lengths = np.cumsum([0, *(len(records[number]) for number in order)])
    places = dict(zip(order, lengths.tolist(), strict=False))
    (data / "train.rec").write_bytes(b"".join(records[number] for number in order))
    (data / "train.idx").write_text("".join(f"{key}\t{places[n]}\n" for n, key in enumerate(keys)))
    source = open_dataset(data)
    assert images_of(source) == expected
    size, (least, most) = np.array([len(image) for _, image in expected]), source.sizes(np.arange(10)).T
    assert (least <= size).all() and (size <= most).all() and (most - least < 80)[1:].all()
    _, _, end = source._extents(slice(1, 10))  # of the others than image 0, the last one in the file
    assert end.tolist() == [places[key] + len(records[key]) for key in range(2, 11)]


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


@pytest.mark.parametrize(
    ("empty", "has_header"),
    [([0], False), ([5], False), ([11], False), ([0, 3, 4, 11], False), ([8], True), ([2, 8, 10], True)],
)
def test_records_without_an_image_are_listed(tmp_path, empty, has_header):
    images = [b"" if number in empty else encoded_image(number) for number in range(12)]
    with RecordWriter(tmp_path / "train.rec") as writer:
        if has_header:
            writer.write(0, RecordHeader(2, (13.0, 17.0)), b"")
        for number, image in enumerate(images):
            header = RecordHeader.of_image(number // 3, number)
            if not image and number == 5:  # two labels, as a table has them
                header = RecordHeader(2, (0.0, 9.0))
            writer.write(number + has_header, header, image)
        for label in range(4 if has_header else 0):
            writer.write(13 + label, RecordHeader(2, (1.0 + 3 * label, 4.0 + 3 * label)), b"")
    for _ in range(2):  # from the records, and from the catalog
        source = open_dataset(tmp_path)
        assert [source.read(number) for number in range(source.num_images)] == list(filter(None, images))
        assert [file.name for file in source.skipped] == [f"key {number + has_header}" for number in empty]


@pytest.mark.parametrize("keys", [[1, 3, 2, 4], [1, 4, 2, 3]])
def test_an_image_has_its_own_key_where_the_keys_are_in_no_order(tmp_path, keys):
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (5.0, 5.0)), b"")
        for key in keys:
            writer.write(key, RecordHeader.of_image(0, key), encoded_image(key))
    source = open_dataset(tmp_path)
    assert all(f"key {key} at" in source.location(number) for number, key in enumerate(keys))


def test_an_empty_index_is_named_and_not_the_records(data):
    (data / "train.idx").write_text("")
    with pytest.raises(DataError, match=r"train\.idx: is empty; remove it"):
        open_dataset(data)
