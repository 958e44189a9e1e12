"""Labels from the identity records, also where float32 rounds and where the ranges are wrong."""

import numpy as np
import pytest

from facetrain.data.formats import record_index
from facetrain.data.formats.record_headers import Records
from facetrain.data.formats.record_index import labels_by_ranges, read_index
from facetrain.data.formats.recordio import RecordHeader, RecordReader, RecordWriter
from facetrain.data.open_dataset import open_dataset
from facetrain.errors import DataError, RecordError
from tests.support.datasets import write_records


def labels_of(folder):
    rec = folder / "train.rec"
    return labels_by_ranges(Records(RecordReader(rec), *read_index(rec, folder / "train.idx")))


def write_from(folder, first_key, counts, *, label_of=lambda identity: identity):
    """Write identities of these sizes whose keys begin at `first_key`."""
    edges = first_key + np.cumsum([0, *counts])
    with RecordWriter(folder / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (float(edges[-1]), float(edges[-1] + len(counts)))), b"")
        for identity, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            for key in range(start, stop):
                writer.write(key, RecordHeader(0, (float(label_of(identity)),), key), b"image")
        for identity, (start, stop) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
            writer.write(int(edges[-1]) + identity, RecordHeader(2, (float(start), float(stop))), b"")
    return np.repeat(np.arange(len(counts)), counts)


def test_ranges_give_the_labels_without_reading_the_images(tmp_path):
    write_records(tmp_path, [0, 0, 1, 1, 1, 2])
    assert labels_of(tmp_path).tolist() == [0, 0, 1, 1, 1, 2]


@pytest.mark.usefixtures("in_pieces")
def test_labels_near_rounded_boundaries_are_read_from_the_images(tmp_path):
    for first_key in (2**24 - 5, 2**25 + 1, 2**26 + 3):
        expected = write_from(tmp_path, first_key, [3, 1, 2, 5, 1, 1, 7, 2])
        np.testing.assert_array_equal(labels_of(tmp_path), expected)


@pytest.mark.usefixtures("in_pieces")
def test_ranges_that_contradict_the_images_are_not_used(tmp_path):
    write_from(tmp_path, 1, [2, 3, 2], label_of=lambda identity: 2 - identity)
    assert labels_of(tmp_path) is None
    assert open_dataset(tmp_path).labels.tolist() == [2, 2, 1, 1, 1, 0, 0]


def test_an_image_that_contradicts_the_ranges_is_refused_at_the_latest_when_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(record_index, "_NUM_SAMPLED", 1)  # of few images, all are compared at the start
    given = iter([0, 1, 1, 1])
    write_from(tmp_path, 1, [2, 2], label_of=lambda identity: next(given))
    dataset = open_dataset(tmp_path)
    assert dataset.read(0) == b"image"
    with pytest.raises(DataError, match=r"key 2 .*label of this record is 1.* say 0"):
        dataset.read(1)


@pytest.mark.usefixtures("in_pieces")
def test_a_range_that_is_off_by_one_image_is_not_used(tmp_path):
    labels = np.repeat(np.arange(300), 7)
    labels[7] = 0  # between the images that are compared at equal distances
    given = iter(labels.tolist())
    write_from(tmp_path, 1, [7] * 300, label_of=lambda identity: next(given))
    assert labels_of(tmp_path) is None
    assert open_dataset(tmp_path).labels.tolist() == labels.tolist()


def test_labels_that_float32_rounds_are_refused_though_they_agree_with_the_ranges(tmp_path, monkeypatch):
    write_from(tmp_path, 1, [2, 3, 1])
    monkeypatch.setattr(record_index, "_EXACT_FLOAT32", 2)  # a file of 2^24 identities has 670 MB
    with pytest.raises(RecordError, match="key 6 .* label 2 is a float32"):
        open_dataset(tmp_path)
    write_records(tmp_path, [0, 0, 1, 1, 1, 2])  # with exact labels
    assert open_dataset(tmp_path).num_classes == 3


@pytest.mark.parametrize(("end", "announced", "is_sound"), [(3, 2, True), (3, 4, True), (4, 6, False)])
def test_the_key_after_the_last_one_differs_from_record_0_by_its_rounding_alone(
    tmp_path, end, announced, is_sound
):
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (2.0**24 + announced, 2.0**24 + announced)), b"")
        writer.write(2**24 + end - 1, RecordHeader.of_image(0, 0), b"image")
    if is_sound:
        assert open_dataset(tmp_path).num_images == 1
    else:
        with pytest.raises(DataError, match=r"up to key 16,777,221, but the last one is 16,777,219"):
            open_dataset(tmp_path)


def test_a_file_of_identities_without_images_is_refused(tmp_path):
    write_from(tmp_path, 1, [0, 0])
    with pytest.raises(RecordError, match=r"train\.rec: contains no images"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    "ranges", [[(1, 2), (3, 5)], [(1, 4), (4, 3), (3, 5)], [(1, 3), (3, 4)], [(0, 3), (3, 5)]]
)
def test_ranges_that_do_not_follow_each_other_from_the_first_key_to_the_last_are_not_used(tmp_path, ranges):
    label = np.searchsorted([first for first, _ in ranges], [1, 2, 3, 4], side="right") - 1
    with RecordWriter(tmp_path / "train.rec") as writer:
        writer.write(0, RecordHeader(2, (5.0, 5.0 + len(ranges))), b"")
        for key, number in enumerate(label.tolist(), start=1):
            writer.write(key, RecordHeader.of_image(number, key), b"image")
        for key, ends in enumerate(ranges, start=5):
            writer.write(key, RecordHeader(2, ends), b"")
    assert labels_of(tmp_path) is None and (open_dataset(tmp_path).labels == label).all()


def test_ranges_of_huge_keys_are_not_used(tmp_path):
    expected = write_from(tmp_path, 2**49, [2, 3, 1])  # float32 numbers are 2^26 apart there
    assert labels_of(tmp_path) is None
    np.testing.assert_array_equal(open_dataset(tmp_path).labels, expected)
